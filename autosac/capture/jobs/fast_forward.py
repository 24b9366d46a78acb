"""Steps of a script that are not computed any more: models, backward and optimizers answer as they did before.

From `begin` on, a model that the script calls runs once more, and then returns what it returned when it was called alike (the
same shapes, training or evaluation); backward does nothing, gradients stay, and optimizers only count. What the script does
beside that runs as ever, so that it logs what it logs.

`events` says how far the step would have come: as far as the step that was computed last had after as many of such calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Key = tuple[Any, ...]


class FastForward:
    """`recorded` counts the events of the step that have been recorded so far.

    `entered` gets the calls that no hook sees; `differentiated` is told of each backward that is not computed.
    """

    def __init__(
        self,
        recorded: Callable[[], int],
        entered: Callable[[torch.nn.Module], None],
        differentiated: Callable[[], None],
    ) -> None:
        self.active = False
        self._recorded = recorded
        self._entered = entered
        self._differentiated = differentiated
        self._places: list[int] = []
        self._passed = 0
        self._returned: dict[_Key, Any] = {}
        self._replayed: set[int] = set()
        self._parameters: list[torch.nn.Parameter] = []
        self._norm: Any = None

    @property
    def events(self) -> int:
        """Of the step that is not computed."""
        return self._places[min(self._passed, len(self._places)) - 1] if self._passed and self._places else 0

    def install(self) -> None:
        """Before the script makes its optimizers, after whoever else replaces these functions."""
        self._wrap_backward()
        self._wrap_optimizers()
        self._wrap_clipping()

    def step_begun(self) -> None:
        """A step begins."""
        self._passed = 0
        if not self.active:
            self._places = []

    def begin(self, total: int) -> None:
        """Nothing is computed from now on. The step that has just ended had `total` events."""
        self.active = True
        if self._places:
            self._places[-1] = total

    def called(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """An outermost module has returned. Nothing is held of a step that is recorded: it would not be freed."""
        self._pass()
        if not self.active:
            return
        self._returned[_key(module, args, kwargs)] = out
        if id(module) not in self._replayed:
            self._replayed.add(id(module))
            self._parameters += [p for p in module.parameters() if p.requires_grad]
            self._replay(module)

    def launched(self) -> None:
        """A CUDA graph has been launched."""
        self._pass()

    def _pass(self) -> None:
        self._passed += 1
        if not self.active:
            self._places.append(self._recorded())

    def _replay(self, module: torch.nn.Module) -> None:
        """Calls of a module go first to its `_compiled_call_impl`, before any hook."""
        compiled = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            key = _key(module, args, kwargs)
            if self.active and key in self._returned:
                self._entered(module)
                self._pass()
                return self._returned[key]
            return (compiled or module._call_impl)(*args, **kwargs)

        object.__setattr__(module, "_compiled_call_impl", call)

    def _wrap_backward(self) -> None:
        import torch.autograd as autograd
        import torch.autograd.graph as graph

        engine: Callable[..., Any] = graph._engine_run_backward

        @functools.wraps(engine)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                self._pass()
                self._differentiated()
                if not kwargs.get("accumulate_grad"):
                    return tuple(torch.zeros_like(x) for x in args[3])
                for parameter in self._parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                return None
            found = engine(outputs, *args, **kwargs)
            self._pass()
            return found

        vars(graph)["_engine_run_backward"] = run
        vars(autograd)["_engine_run_backward"] = run

    def _wrap_optimizers(self) -> None:
        optimizer: Any = torch.optim.Optimizer
        hooked = optimizer.profile_hook_step

        def profile_hook_step(step: Callable[..., Any]) -> Any:
            @functools.wraps(step)
            def count(this: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
                if self.active:
                    if closure is None:
                        out = None
                    else:
                        with torch.enable_grad():
                            out = closure()
                else:
                    out = step(this, *([] if closure is None else [closure]), *args, **kwargs)
                self._pass()
                return out

            return hooked(count)

        optimizer.profile_hook_step = staticmethod(profile_hook_step)
        module: Any = torch.nn.Module
        for owner in (optimizer, module):
            owner.zero_grad = self._unless_active(owner.zero_grad)

    def _unless_active(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if self.active else function(*args, **kwargs)

        return call

    def _wrap_clipping(self) -> None:
        from torch.nn.utils import clip_grad

        original = clip_grad.clip_grad_norm_

        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if not self.active or self._norm is None:
                self._norm = original(*args, **kwargs)
            self._pass()
            return self._norm

        for place in (clip_grad, torch.nn.utils):
            vars(place)["clip_grad_norm_"] = clip_grad_norm_


def _key(module: torch.nn.Module, args: Any, kwargs: Any) -> _Key:
    """Equal for calls that return alike."""
    leaves = pytree.tree_leaves((args, kwargs))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return id(module), torch.is_grad_enabled(), module.training, shapes

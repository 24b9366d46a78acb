"""Seeing a module's operators exactly as a checkpointing policy would see them, for capture.

`observe` changes modules as `eager.apply` does, but instead of checkpointing it reports every operator, numbered by the
same code, to a recorder. Modules inside each other may all be observed: an operator
of the inner one is reported to both, the outer one's report inside the inner one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn

from autosac.errors import PlanError
from autosac.integrations.operators.dispatching import called, skipped_by_dynamo
from autosac.integrations.operators.keys import (
    CountingMode,
    Keyer,
    is_counted,
    is_view,
    op_name,
    quiet,
    quiet_hooks,
)
from autosac.integrations.operators.modules import find_module
from autosac.integrations.recompute import compiled_parts
from autosac.integrations.recompute.tape import GraphObserver, present
from autosac.integrations.recompute.units import UnitModule, become


class RegionRecorder(Protocol):
    """Receives what happens in one forward execution of an observed module."""

    def op_begin(self) -> None:
        """An operator is about to run. `op_end` of the same operator follows (unless it raises)."""

    def op_end(
        self, op: str, occurrence: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """The operator has run; `op` and `occurrence` are the key of its decision (-1: a view, none is needed)."""

    def graph_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: Sequence[torch.Tensor]
    ) -> None:
        """What began was a compiled graph, which has returned `out` and changed these of its arguments."""

    def end(self, out: Any) -> None:
        """The module's forward has returned `out`."""


class RegionListener(Protocol):
    """Receives the executions of observed modules."""

    def begin(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionRecorder:
        """The forward of the module `fqn` begins with these arguments, gradients being enabled."""


def observe(model: nn.Module, fqns: Iterable[str], recorder: RegionListener) -> nn.Module:
    """Observe the modules of these clean names inside `model`, which is changed in place and returned.

    Call it where `eager.apply` would be called. PlanError if there is no such module.
    """
    for fqn in sorted(fqns, key=lambda name: (-name.count("."), name)):
        module = find_module(model, fqn)
        if module is None:
            raise PlanError(f"the model has no module {fqn}")
        become(module, ObservedModule, _Observation(fqn, recorder))
    return model


@dataclass(frozen=True, slots=True)
class _Observation:
    """Who hears of a module's operators. Copies of the module, which it may make in its own forward, share it."""

    fqn: str
    recorder: RegionListener

    def __deepcopy__(self, memo: Any) -> _Observation:
        return self


class ObservedModule(UnitModule):
    """A module whose operators are reported. It checkpoints nothing."""

    _are_hooks_quiet = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        observation: _Observation | None = self._autosac
        if observation is None or not torch.is_grad_enabled():
            return self.original_forward(*args, **kwargs)
        if not self._are_hooks_quiet:
            quiet_hooks(self)
            self._are_hooks_quiet = True
        compiled_parts.prepare()
        region = observation.recorder.begin(observation.fqn, args, kwargs)
        with _ObservingMode(region):
            out = self.original_forward(*args, **kwargs)
        region.end(out)
        return out


class _ObservingMode(CountingMode):
    def __init__(self, region: RegionRecorder) -> None:
        super().__init__()
        self._region = region
        self._keyer = Keyer()
        self._outer: GraphObserver | None = None

    def __enter__(self) -> Self:
        """Begin to observe."""
        self._outer, present.observer = present.observer, self
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Observe no more."""
        super().__exit__(kind, value, traceback)
        present.observer = self._outer

    def run_graph(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a compiled graph; nothing in it is an operator of the module."""
        outer = self._outer
        seen_outside = call if outer is None else lambda *args, **kwargs: outer.run_graph(call, args, kwargs)
        self._region.op_begin()
        quiet.depth += 1
        try:
            out, changed = compiled_parts.called_graph(seen_outside, args, kwargs)
        finally:
            quiet.depth -= 1
        self._region.graph_end(args, kwargs, out, changed)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if quiet.depth or not (is_counted(func) or is_view(func)):
            return func(*args, **kwargs)
        self._region.op_begin()
        out = called(func, args, kwargs)
        occurrence = self._keyer.occurrence(func)  # an operator that raises does not count: the module may catch that
        self._region.op_end(op_name(func), occurrence, func, args, kwargs, out)
        return out


skipped_by_dynamo(_ObservingMode)

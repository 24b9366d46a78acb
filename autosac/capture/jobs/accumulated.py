"""Steps of scripts that accumulate gradients: few of the microbatches run, and the others are logged as copies of these.

A microbatch is a forward of the script's model, one backward, and what the script does in between. The first three of a step
run. If the second and the third do the same in forward and backward (`record.repeats`), those that follow are copied; what the
script itself does between them runs as ever. Of the steps after the first, in which nobody knows yet how many there will be,
the last microbatch runs, too, and has to be like those that were copied. The trace is the same as that of the whole step.

A copied forward returns tensors that nothing has computed, with a graph of one node. In its backward the graph that the script
has put on top of these is dropped without a word: what is freed by that has to be what the microbatch before has freed there.

A microbatch runs if anything about it is known to be special: other arguments, other numbers, texts and truth values in
modules. All run where Python would notice the difference: hooks, random numbers of Python's and numpy's generators, several
forwards before a backward, several processes.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.microbatches import _COMPARED, BACKWARD, FORWARD, Microbatches, _Part, _Stage, state_of
from autosac.capture.jobs.script import ScriptSteps
from autosac.capture.record.recorder import Extent, Recorder
from autosac.capture.record.repeats import _FIRST_GIVEN, copy
from autosac.errors import CaptureError
from autosac.integrations.apply import add_forwards
from autosac.trace import Collective, Op

_SIMPLE = (bool, int, float, str, type(None))
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Accumulation(Microbatches):
    """See the module's docstring. `logged` is told after rows have been copied."""

    def __init__(
        self, mode: SimulatedDeviceMode, recorder: Recorder, steps: ScriptSteps, logged: Callable[[], None]
    ) -> None:
        super().__init__(mode, recorder)
        self._steps = steps
        self._logged = logged
        self._model: torch.nn.Module | None = None
        self._number = 0
        self._count: int | None = None  # microbatches of the step before
        self._restart()
        self._number = 0

    def _restart(self) -> None:
        """The first forward of a step has begun."""
        self._count = self._index + 1 if self._number and not self._is_broken else None
        self._number = self._steps.number
        self._index = 0
        self._is_open, self._is_broken = True, False
        self._known = _Stage()
        self._keys: dict[int, Any] = {}
        self._betweens: dict[int, Any] = {}
        self._ended = self._recorder.extent()
        self._held: list[Any] = []

    _index, _is_broken = 0, False

    def watch(self, model: torch.nn.Module) -> None:
        """Follow this model's calls."""
        if self._model is not None or not _is_plain(model):
            return
        self._model = model
        kind: Any = type(model)
        original = kind.__call__

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is not self._model or not self._steps.is_outside:
                return original(module, *args, **kwargs)
            return self._called(functools.partial(original, module, *args, **kwargs), module, args, kwargs)

        kind.__call__ = call
        import torch.autograd as autograd
        import torch.autograd.graph as graph

        engine: Callable[..., Any] = graph._engine_run_backward

        @functools.wraps(engine)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self._differentiated(functools.partial(engine, outputs, *args, **kwargs), outputs, args, kwargs)

        vars(graph)["_engine_run_backward"] = run
        vars(autograd)["_engine_run_backward"] = run

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _called(self, original: Callable[[], Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._steps.is_over or self._steps.number != self._number:
            out = original()
            self._restart()
            return out
        self._index += 1
        self._is_broken |= self._is_open
        self._is_open = True
        key = _key(args, kwargs)
        if self._is_broken or key is None:
            self._is_broken = True
            return original()
        index, known, storages = self._index, self._known, self._recorder.storages
        known.of(index).storages.give(storages.of_all((args, kwargs)))
        self._keys[index] = key, state_of(module)
        if index in _COMPARED:
            out, known.parts[FORWARD, index] = self._run_noted(FORWARD, original)
        elif self._can_copy():
            storages.label_inputs(args)
            add_forwards(module, self._pattern(known, FORWARD).forwards)
            out = self._copied_forward((args, kwargs))
        else:
            out = self._checked(FORWARD, original)
        self._ended = self._recorder.extent()
        return out

    def _can_copy(self) -> bool:
        """Whether this microbatch is taken to be like those that have run."""
        known, index = self._known, self._index
        if self._count is not None and index >= self._count - 1:
            return False
        parts = [known.pattern(kind) for kind in (FORWARD, BACKWARD)]
        if not all(parts) or not known.is_closed() or self._betweens[1] != self._betweens[2]:
            return False
        freed = self._pattern(known, FORWARD).stretch.freed()
        return all(position > _FIRST_GIVEN for position in freed) and self._is_alike

    @property
    def _is_alike(self) -> bool:
        """Whether the microbatch begins as those that have been compared."""
        return all(self._keys[self._index] == self._keys[compared] for compared in _COMPARED)

    def _copied_forward(self, inputs: Any) -> Any:
        known, index = self._known, self._index
        known.copied.add(index)
        raw = self._copy(known, FORWARD, index)
        leaves, like = pytree.tree_flatten(raw)
        wants = self._wants
        with self._mode.unrecorded():
            made = _Copied.apply(torch.empty((), requires_grad=True), tuple(leaves), wants)
        out = pytree.tree_unflatten(list(made), like)
        freed = self._pattern(known, BACKWARD).stretch.freed()
        numbering = known.of(index).storages
        for leaf in pytree.tree_leaves((inputs, out)):
            if isinstance(leaf, torch.Tensor) and numbering.position(self._recorder.storages.of(leaf)) in freed:
                self._held.append(leaf.untyped_storage())
        self._logged()
        return out

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _differentiated(self, engine: Callable[[], Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        if not self._is_open or not self._number or torch._C._current_graph_task_id() != -1:
            return engine()
        known, index = self._known, self._index
        if self._is_broken or any(args[1:]) or not kwargs.get("accumulate_grad"):
            self._refuse("differentiates otherwise")
            return engine()
        self._is_open = False
        if not index:
            return engine()
        between = self._since_forward()
        if index in known.copied:
            if between != self._betweens[_COMPARED[1]]:
                self._refuse("does something else with what the model returns")
            self._copied_backward(engine)
            self._steps.differentiated()
            self._logged()
            return None
        if index in _COMPARED:
            self._betweens[index] = between if _ends_in_model(outputs, self._graph) else object()
            out, known.parts[BACKWARD, index] = self._run_noted(BACKWARD, engine)
            return out
        return self._checked(BACKWARD, engine)

    def _since_forward(self) -> Any:
        """What the script has done since the model has returned; its storages get numbers."""
        recorder, before = self._recorder, self._ended
        now = recorder.extent()
        numbering = self._known.of(self._index)
        made = range(before.storages, now.storages)
        numbering.storages.give(made)
        numbering.events.give(range(before.events, now.events))
        numbering.works.give(range(before.works, now.works))
        rows = [row for row in recorder.log.events[before.rows :] if type(row) is Op or type(row) is Collective]
        return [row.signature for row in rows], recorder.storages.storages[before.storages :]

    def _copied_backward(self, engine: Callable[[], Any]) -> None:
        known, storages = self._known, self._recorder.storages
        numbering, part = known.of(self._index), self._pattern(known, BACKWARD)
        held = storages.held()
        known_numbers = {*numbering.storages.made, *numbering.storages.given} & held
        expected = {n for n in known_numbers if numbering.storages.position(n) in part.stretch.freed()}
        with self._mode.unrecorded(), storages.silent() as ended:
            engine()
            self._held.clear()
        if ended != expected:
            self._refuse("lets go of other tensors")
        copy(
            self._recorder,
            numbering,
            part.stretch,
            lambda _: False,
            lambda: None,
            repeats_forward=True,
        )

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run_noted(self, kind: str, action: Callable[[], Any]) -> tuple[Any, _Part | None]:
        """Run a part of the microbatch; what it returns and does. None for one that cannot be repeated."""
        assert self._model is not None
        drawn = _generators()
        found, part = self._noted(self._known, kind, self._index, self._model, action)
        if _generators() != drawn:
            part = None
        if kind == FORWARD:
            leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            self._wants = tuple(getattr(leaf, "requires_grad", False) for leaf in pytree.tree_leaves(found))
            self._graph = {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
        return found, part

    def _checked(self, kind: str, action: Callable[[], Any]) -> Any:
        """Run a part; the last microbatch has to be like those that were copied if it begins like them."""
        if not self._known.copied or not self._is_alike:
            return action()
        found, part = self._run_noted(kind, action)
        if part is None or not part.is_like(self._pattern(self._known, kind)):
            self._refuse(f"does something else in its {kind}")
        return found

    def _refuse(self, why: str) -> None:
        """Copy no more. CaptureError if something has been copied."""
        self._is_broken = True
        if self._known.copied:
            raise CaptureError(
                f"microbatch {self._index + 1} of step {self._number} {why} than the ones before, some of which were copied: "
                "run the script with --every-microbatch"
            )


class _Copied(torch.autograd.Function):
    """What a copied forward returns, with a graph."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, leaves: tuple[Any, ...], wants: tuple[bool, ...]) -> Any:
        """The leaves. `wants`: which need gradients."""
        ctx.mark_non_differentiable(*(x for x, want in zip(leaves, wants, strict=True) if x is not None and not want))
        return leaves

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        """None."""
        return None, None, None


def _ends_in_model(outputs: Any, inner: set[Any]) -> bool:
    """Whether gradients reach leaves only through what the model has returned."""
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in inner:
            continue
        if hasattr(node, "variable"):
            return False
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return True


def _key(args: Any, kwargs: Any) -> Any:
    """What a model is called with, but for the content of tensors; None where that cannot be told."""
    leaves, like = pytree.tree_flatten((args, kwargs))
    described = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad
            described.append((type(leaf), *layout))
        elif isinstance(leaf, _SIMPLE):
            described.append((type(leaf), leaf))
        else:
            return None
    return described, like


def _generators() -> Any:
    """The states of Python's generator and numpy's."""
    numpy: Any = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state() if numpy is not None else (0, ())
    return random.getstate(), [str(part) if i != 1 else bytes(part) for i, part in enumerate(of_numpy)]


def _is_plain(model: torch.nn.Module) -> bool:
    """Whether nothing that belongs to the model hears of a single microbatch: no hook, no other process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if any(getattr(module, name) for module in model.modules() for name in _MODULE_HOOKS):
        return False
    return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())

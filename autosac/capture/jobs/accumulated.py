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

from autosac.capture.device.device import current_stream
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.copied_parts import BACKWARD, COMPARED, FORWARD, Copies, Part, Stage, state_of
from autosac.capture.jobs.script import ScriptSteps
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import copy
from autosac.errors import MicrobatchError
from autosac.integrations.apply import add_forwards
from autosac.trace import Collective, Free, Op

_SIMPLE = (bool, int, float, str, type(None))
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Accumulation(Copies):
    """See the module's docstring. `logged` is told after rows have been copied."""

    def __init__(
        self, mode: SimulatedDeviceMode, recorder: Recorder, steps: ScriptSteps, logged: Callable[[], None]
    ) -> None:
        super().__init__(mode, recorder)
        self._steps = steps
        self._logged = logged
        self._listeners = _listeners()
        self._model: torch.nn.Module | None = None
        self._number = self._index = 0  # the step, and the microbatch in it
        self._count: int | None = None  # microbatches of the step before
        self._is_open = False  # a backward is to come
        self._is_between = False  # and the forward has ended
        self._is_broken = False  # no more are copied in this step
        self._known = Stage()
        self._keys: dict[int, Any] = {}
        self._betweens: dict[int, Any] = {}
        self._ended = 0  # the row at which the forward has
        self._missed = 1  # microbatches of the step that began before this was told of its model
        self._held: list[Any] = []
        self._wants: tuple[bool, ...] = ()
        self._graph: set[Any] = set()
        self._cleared: dict[int, frozenset[int]] = {}  # what forwards have cast, and the end of autocast lets go of
        self._cast: list[Any] = []
        recorder.cleared = self._note_cleared

    def _restart(self) -> None:
        """The first forward of a step has begun."""
        if self._number:
            self._count, self._missed = None if self._is_broken else self._index + 1 + self._missed, 0
        self._number, self._index = self._steps.number, 0
        self._is_open, self._is_broken, self._is_between = True, False, False
        self._known, self._keys, self._betweens, self._cleared, self._graph = Stage(), {}, {}, {}, set()

    def begin(self) -> None:
        """The script begins: whoever listens now is the capture's own."""
        self._listeners = _listeners()

    def watch(self, model: torch.nn.Module) -> None:
        """Follow this model's calls. The first of them is under way."""
        if self._model is not None:
            return
        self._model = model
        kind: Any = type(model)
        original = kind.__call__

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not model or not self._steps.is_outside:
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
            self._close()
            out = original()
            self._restart()
            return out
        self._close()
        self._index += 1
        self._is_open = True
        key = _key(args, kwargs)
        if self._is_broken or key is None:
            self._is_broken = True
            return original()
        index, known, storages = self._index, self._known, self._recorder.storages
        known.of(index).storages.give(storages.of_all((args, kwargs)))
        self._keys[index] = key, state_of(module)
        if index in COMPARED:
            out, known.parts[FORWARD, index] = self._run_noted(FORWARD, original)
        elif self._can_copy():
            storages.label_inputs(args)
            add_forwards(module, self._pattern(known, FORWARD).forwards)
            out = self._copied_forward((args, kwargs))
        else:
            out = self._checked(FORWARD, original)
        self._ended, self._is_between = len(self._recorder.log.events), True
        return out

    def _close(self) -> None:
        """The microbatch is over."""
        if self._is_open:
            self._refuse("has another backward")

    def _can_copy(self) -> bool:
        """Whether this microbatch is taken to be like those that have run."""
        known, index = self._known, self._index
        if self._count is not None and index >= self._count - 1:
            return False
        parts = [known.pattern(kind) for kind in (FORWARD, BACKWARD)]
        cleared = [self._cleared.get(compared, frozenset()) for compared in COMPARED]
        if not all(parts) or cleared[0] != cleared[1] or not known.is_closed(cleared[1]):
            return False
        if self._betweens[1] != self._betweens[2]:
            return False
        is_given = known.of(index).storages.is_given
        return self._is_alike and not any(map(is_given, self._pattern(known, FORWARD).stretch.freed()))

    @property
    def _is_alike(self) -> bool:
        """Whether the microbatch begins as those that have been compared."""
        return self._is_plain and all(self._keys[self._index] == self._keys[compared] for compared in COMPARED)

    @property
    def _is_plain(self) -> bool:
        """Whether nothing hears of a single microbatch: no hook, no other process."""
        assert self._model is not None
        return _listeners() == self._listeners and _has_no_hooks(self._model) and _is_alone(self._model)

    def _copied_forward(self, inputs: Any) -> Any:
        known, index = self._known, self._index
        known.copied.add(index)
        raw = self._copy(known, FORWARD, index)
        leaves, like = pytree.tree_flatten(raw)
        with self._mode.unrecorded():
            made: Any = _Copied.apply(torch.empty((), requires_grad=True), tuple(leaves), self._wants)  # type: ignore[no-untyped-call]
        out = pytree.tree_unflatten(list(made), like)
        freed = self._pattern(known, BACKWARD).stretch.freed()
        numbering = known.of(index).storages
        for leaf in pytree.tree_leaves((inputs, out)):
            if isinstance(leaf, torch.Tensor) and numbering.position(self._recorder.storages.of(leaf)) in freed:
                self._held.append(leaf.untyped_storage())
        for position in sorted(self._cleared.get(COMPARED[1], ()), reverse=True):
            with self._mode.unrecorded():
                stand_in = torch.empty(1, device=self._recorder.target)
            self._recorder.storages.adopt(stand_in, numbering.number(position))
            self._cast.append(stand_in)
        self._logged()
        return out

    def _note_cleared(self, first: int) -> None:
        """Autocast ends, and has let go of what has been logged from this row on; of what copied forwards have cast now."""
        if not self._is_between:
            return
        if self._index in COMPARED:
            numbering = self._known.of(self._index).storages
            freed = {row.storage for row in self._recorder.log.events[first:] if type(row) is Free}
            before = self._cleared.get(self._index, frozenset())
            self._cleared[self._index] = before.union(map(numbering.position, freed.intersection(numbering.made)))
        self._cast.clear()

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _differentiated(self, engine: Callable[[], Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        if not self._is_open or not self._number or torch._C._current_graph_task_id() != -1:
            return engine()
        known, index = self._known, self._index
        if self._is_broken or any(args[1:]) or not kwargs.get("accumulate_grad"):
            self._refuse("differentiates otherwise")
            return engine()
        self._is_open = self._is_between = False
        if not index:
            return engine()
        between = self._since_forward()
        if index in known.copied:
            if self._cast:
                self._refuse("ends autocast elsewhere")
            if between != self._betweens[COMPARED[1]]:
                self._refuse("does something else with what the model returns")
            self._copied_backward(engine)
            self._steps.differentiated()
            self._logged()
            return None
        if index in COMPARED:
            self._betweens[index] = between if _ends_in_model(outputs, self._graph) else object()
            self._graph = set()  # it holds what nodes hold
            out, known.parts[BACKWARD, index] = self._run_noted(BACKWARD, engine)
            return out
        return self._checked(BACKWARD, engine)

    def _since_forward(self) -> Any:
        """What the script has made of what the model has returned. All storages that belong to that get numbers."""
        numbering = self._known.of(self._index).storages
        derived, found = set(numbering.made), []
        for row in self._recorder.log.events[self._ended :]:
            if (type(row) is Op or type(row) is Collective) and derived.intersection(row.inputs):
                derived.update(row.outputs)
                used = [storage for storage in (*row.inputs, *row.outputs) if storage >= 0]
                numbering.give(storage for storage in used if numbering.position(storage) >= 0)
                found.append((type(row), row.signature, tuple(map(numbering.position, used))))
        return found

    def _copied_backward(self, engine: Callable[[], Any]) -> None:
        known, storages = self._known, self._recorder.storages
        numbering, part = known.of(self._index), self._pattern(known, BACKWARD)
        freed = part.stretch.freed()
        expected = {number for number in storages.held() if numbering.storages.position(number) in freed}
        with self._mode.unrecorded(), storages.silent() as ended:
            engine()
            self._held.clear()
        if ended != expected:
            self._refuse("lets go of other tensors")
        copy(self._recorder, numbering, part.stretch, lambda _: False, lambda: None)

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run_noted(self, kind: str, action: Callable[[], Any]) -> tuple[Any, Part | None]:
        """Run a part of the microbatch; what it returns and does. None for one that cannot be repeated."""
        assert self._model is not None
        drawn = _generators()
        found, part = self._noted(self._known, self._index, self._model, action)
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
        """Copy no more. MicrobatchError if something has been copied."""
        self._is_broken = True
        if self._known.copied:
            raise MicrobatchError(
                f"microbatch {self._index + 1} of step {self._number} {why} than the ones before, some of which were copied"
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
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            layout = (
                tuple(leaf.shape),
                leaf.stride(),
                leaf.storage_offset(),
                leaf.dtype,
                leaf.device,
                leaf.requires_grad,
            )
            described.append((type(leaf), *layout))
        elif isinstance(leaf, _SIMPLE):
            described.append((type(leaf), leaf))
        else:
            return None
    context = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    return described, like, context, current_stream().stream_id


def _generators() -> Any:
    """The states of Python's generator and numpy's."""
    numpy: Any = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state() if numpy is not None else (0, ())
    return random.getstate(), [str(part) if i != 1 else bytes(part) for i, part in enumerate(of_numpy)]


def _has_no_hooks(model: torch.nn.Module) -> bool:
    if any(getattr(module, name) for module in model.modules() for name in _MODULE_HOOKS):
        return False
    return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def _is_alone(model: torch.nn.Module) -> bool:
    """Whether the model is in one process, or DistributedDataParallel does not communicate now."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return True
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel) and not (model.require_backward_grad_sync or model.static_graph)


def _listeners() -> list[int]:
    """How many hooks all modules have, and how many modes see each operator."""
    hooks: Any = torch.nn.modules.module
    names = [name for name in vars(hooks) if name.startswith("_global_") and name.endswith("_hooks")]
    return [torch._C._len_torch_dispatch_stack(), *(len(getattr(hooks, name)) for name in names)]

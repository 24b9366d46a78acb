"""Pipeline stages of which few microbatches run, and the others are logged as copies of these.

In a step of many microbatches a stage does the same for all of them but the first, whose FSDP units gather and whose gradients
are made, and perhaps the last. So of each step the microbatches 0, 1, 2 and the last one run. If 1 and 2 did the same in their
forward, their loss and their backward (`record.repeats`), the others between them and the last are copied: their rows are
logged, and what the schedule goes on to use of them (outputs, losses, gradients to send) are tensors that nothing has
computed. Schedules, transfers, sums of losses and optimizers run as ever. The trace is the same as that of the whole step.

A later one may still differ, in a model that counts its calls. So numbers, texts and truth values that modules hold have to be
the same after 1 and 2, or all microbatches run; and if the forward or the loss of the last one is another one than those that
were copied, the capture ends with a RepetitionError, too.

A copied forward has no graph. If its backward then turns out to be none to copy, the capture ends with a RepetitionError and
is made anew, whole. So that one microbatch is like the others, the parameters of all FSDP units must stay gathered from one to
the next, as they do by default. Schedules that split the backward of inputs from that of weights run whole, too, and so do
jobs whose routers send every microbatch's tokens elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import Numbering, RepetitionError, RowStretch, copy, stretch
from autosac.integrations.apply import add_forwards, forwards_of

_COMPARED = (1, 2)
_SIMPLE = (bool, int, float, str)
_SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"


class _Result(NamedTuple):
    """A tensor that a stretch returns: the position of its storage, its layout, and its class with what that keeps beside it
    (DTensor), if it is no plain tensor.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wrapped: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a microbatch does in one of its three parts: its stretch, what it returns (`results`, in a tree `like`), how often
    each unit of a plan runs forward, and the `state` of the modules afterwards.
    """

    stretch: RowStretch
    results: tuple[_Result | None, ...]
    like: Any
    forwards: tuple[int, ...]
    state: tuple[Any, ...]

    def is_like(self, other: _Part) -> bool:
        """Whether both do the same."""
        return (self.results, self.like, self.forwards, self.state) == (
            other.results,
            other.like,
            other.forwards,
            other.state,
        ) and self.stretch.is_like(other.stretch)


@dataclass
class _Stage:
    """What is known of a stage's microbatches since the schedule has begun."""

    numbers: dict[int, Numbering] = field(default_factory=dict)
    parts: dict[tuple[str, int], _Part | None] = field(default_factory=dict)
    patterns: dict[str, _Part | None] = field(default_factory=dict)  # of the parts that both have run
    copied: set[int] = field(default_factory=set)
    real: set[int] = field(default_factory=set)  # storages of copied microbatches that tensors hold

    def of(self, index: int) -> Numbering:
        """A microbatch's numbers."""
        return self.numbers.setdefault(index, Numbering(index))

    def pattern(self, kind: str) -> _Part | None:
        """What microbatches do in this part, if two have done the same."""
        if kind not in self.patterns and all((kind, index) in self.parts for index in _COMPARED):
            one, other = (self.parts[kind, index] for index in _COMPARED)
            self.patterns[kind] = other if one is not None and other is not None and one.is_like(other) else None
        return self.patterns.get(kind)

    def is_closed(self) -> bool:
        """Whether all that a microbatch makes ends with it, but for what it returns."""
        parts = [
            self.parts[kind, _COMPARED[1]] for kind in (FORWARD, LOSS, BACKWARD) if (kind, _COMPARED[1]) in self.parts
        ]
        held, freed, returned = set[int](), set[int](), set[int]()
        for part in filter(None, parts):
            held |= part.stretch.held()
            freed |= part.stretch.freed()
            returned |= {result.storage for result in part.results if result is not None}
        return held - freed <= returned


class Microbatches:
    """See the module's docstring. One for each capture."""

    def __init__(self, mode: SimulatedDeviceMode, recorder: Recorder) -> None:
        self._mode, self._recorder = mode, recorder
        self._stages: dict[int, _Stage] = {}

    def install(self) -> None:
        """Patch the pipeline stages and schedules of this process."""
        from torch.distributed.pipelining import schedules, stage

        self._patch(stage._PipelineStageBase, "forward_one_chunk", self._forward)
        self._patch(stage._PipelineStageBase, "backward_one_chunk", self._backward)
        self._patch(schedules._PipelineSchedule, "_maybe_compute_loss", self._loss)

    @staticmethod
    def _patch(owner: Any, name: str, method: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            return method(functools.partial(original, this), this, *args, **kwargs)

        setattr(owner, name, call)

    def _of(self, stage: Any) -> _Stage:
        return self._stages.setdefault(id(stage), _Stage())

    # ---- the three parts of a microbatch ----------------------------------------------------------------------------

    def _forward(
        self, original: Any, stage: Any, index: int, args: Any, kwargs: Any = None, *more: Any, **named: Any
    ) -> Any:
        if not stage.has_backward or not torch.is_grad_enabled():
            return original(index, args, kwargs, *more, **named)
        if not index:  # the schedule begins, perhaps not for the first time in a step that accumulates gradients
            self._stages.pop(id(stage), None)
        known = self._of(stage)
        inputs = (args, kwargs, _buffers(stage, "args_recv_info", index))
        known.of(index).storages.give(self._recorder.storages.of_all(inputs))
        needed = (FORWARD, LOSS) if stage.is_last else (FORWARD,)
        kept = len(stage.output_chunks)
        is_inner = _COMPARED[1] < index < (stage.chunks or 0) - 1
        if is_inner and is_gathered(stage.submod) and all(map(known.pattern, needed)):
            known.copied.add(index)
            # What the model is called with: a later stage with what it has received.
            self._recorder.storages.label_inputs(args if stage.is_first else inputs[2])
            add_forwards(stage.submod, self._pattern(known, FORWARD).forwards)
            output = self._copy(known, FORWARD, index)
            stage.fwd_cache[index] = (output if isinstance(output, tuple) else (output,), inputs)
            return output
        output = self._run(known, FORWARD, index, stage, lambda: original(index, args, kwargs, *more, **named))
        if len(stage.output_chunks) > kept:
            known.parts[FORWARD, index] = None  # outputs are merged in the end, which need their graphs
        return output

    def _loss(
        self, original: Any, schedule: Any, stage: Any, output: Any, targets: Any, index: int, *more: Any
    ) -> None:
        if not (stage.is_last and schedule._loss_fn is not None and stage.has_backward and torch.is_grad_enabled()):
            original(stage, output, targets, index, *more)
            return
        known, losses = self._of(stage), schedule._internal_losses
        known.of(index).storages.give(self._recorder.storages.of_all(targets[index]))
        if index in known.copied:
            losses.append(self._copy(known, LOSS, index))
            return

        def run() -> Any:
            original(stage, output, targets, index, *more)
            return losses[-1]

        self._run(known, LOSS, index, stage, run)

    def _backward(self, original: Any, stage: Any, index: int, *more: Any, **named: Any) -> None:
        known = self._of(stage)
        if not stage.has_backward:
            original(index, *more, **named)
            return
        known.of(index).storages.give(self._recorder.storages.of_all(_buffers(stage, "grad_recv_info", index)))
        if index in known.copied:
            if not (named.get("full_backward", True) and is_gathered(stage.submod) and known.is_closed()):
                raise RepetitionError("a microbatch leaves memory behind, or its parameters are let go of")
            held = [stage.fwd_cache.pop(index)]
            stage.bwd_cache[index] = self._copy(known, BACKWARD, index, held.clear)
            return

        def run() -> Any:
            original(index, *more, **named)
            return stage.bwd_cache.get(index)

        self._run(known, BACKWARD, index, stage, run)

    # ---- running and copying ----------------------------------------------------------------------------------------

    def _run(self, known: _Stage, kind: str, index: int, stage: Any, action: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, and note it where it is one to compare. RepetitionError if the last one is not as those
        that were copied.
        """
        if index in _COMPARED:
            found, known.parts[kind, index] = self._noted(known, kind, index, stage.submod, action)
            return found
        if not known.copied or kind == BACKWARD or index != stage.chunks - 1:
            return action()
        found, part = self._noted(known, kind, index, stage.submod, action)
        if part is None or not part.is_like(self._pattern(known, kind)):
            raise RepetitionError(f"the last microbatch differs in its {kind}")
        return found

    def _noted(
        self, known: _Stage, kind: str, index: int, module: torch.nn.Module, action: Callable[[], Any]
    ) -> tuple[Any, _Part | None]:
        """What a part of a microbatch returns, and what it does; None if that cannot be copied."""
        recorder = self._recorder
        before, forwards = recorder.extent(), forwards_of(module)
        stays = is_gathered(module)
        found = action()
        stays = stays and is_gathered(module)
        numbering = known.of(index)
        noted = stretch(recorder, numbering, before, repeats_forward=kind == BACKWARD)
        leaves, like = pytree.tree_flatten(found)
        results = [self._result(leaf, numbering) for leaf in leaves]
        known_leaves = all(leaf is None or result for leaf, result in zip(leaves, results, strict=True))
        if not stays or noted is None or not known_leaves:
            return found, None
        ran = tuple(now - then for now, then in zip(forwards_of(module), forwards, strict=True))
        state = state_of(module)
        return found, _Part(stretch=noted, results=tuple(results), like=like, forwards=ran, state=state)

    def _pattern(self, known: _Stage, kind: str) -> _Part:
        part = known.pattern(kind)
        if part is None:
            raise RepetitionError(f"microbatches differ in their {kind}")
        return part

    def _copy(self, known: _Stage, kind: str, index: int, let_go: Callable[[], None] = lambda: None) -> Any:
        """Log a part of a microbatch like another one's; what it returns."""
        part, numbering = self._pattern(known, kind), known.of(index)
        copy(
            self._recorder,
            numbering,
            part.stretch,
            known.real.__contains__,
            let_go,
            repeats_forward=kind == BACKWARD,
        )
        made: dict[int, torch.Tensor] = {}
        leaves = [None if result is None else self._made(result, numbering, made) for result in part.results]
        known.real |= made.keys()
        return pytree.tree_unflatten(leaves, part.like)

    def _result(self, leaf: Any, numbering: Numbering) -> _Result | None:
        """How to make a tensor like this one; None if it is more than its layout."""
        wrapped: tuple[Any, ...] = ()
        plain = leaf
        if type(leaf).__name__ == "DTensor":
            names, beside = leaf.__tensor_flatten__()
            inner = {name: getattr(leaf, name) for name in names}
            (name,) = (name for name, value in inner.items() if isinstance(value, torch.Tensor))
            plain = inner.pop(name)
            wrapped = (type(leaf), name, inner, beside, leaf.shape, leaf.stride())
        if type(plain) is not FakeTensor or plain.storage_offset() or plain.layout is not torch.strided:
            return None
        position = numbering.storages.position(self._recorder.storages.of(plain))
        layout = tuple(map(int, plain.shape)), tuple(map(int, plain.stride()))
        if position >= -1 or plain.untyped_storage().nbytes() != _span(*layout) * plain.element_size():
            return None
        return _Result(position, *layout, plain.dtype, plain.fake_device, wrapped)

    def _made(self, result: _Result, numbering: Numbering, made: dict[int, torch.Tensor]) -> torch.Tensor:
        storage = numbering.storages.number(result.storage)
        if storage in made:
            raise RepetitionError("results share their memory")
        with self._mode.unrecorded(), torch.no_grad():
            tensor = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=result.device)
        self._recorder.storages.adopt(tensor, storage)
        made[storage] = tensor
        if not result.wrapped:
            return tensor
        kind, name, inner, beside, shape, stride = result.wrapped
        whole: torch.Tensor = kind.__tensor_unflatten__({name: tensor, **inner}, beside, shape, stride)
        return whole.requires_grad_(False)  # a leaf that needs a gradient would be held by the graph of the losses' sum


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements a tensor without an offset needs."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _buffers(stage: Any, name: str, index: int) -> list[Any]:
    """Where a stage receives what belongs to a microbatch."""
    infos = getattr(stage, name).get(index) or ()
    return [getattr(info, "buffer", None) for info in infos]


def state_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """The numbers, texts and truth values that modules hold, such as a count of their calls."""
    return tuple(value for module in model.modules() for value in vars(module).values() if isinstance(value, _SIMPLE))


def is_gathered(model: torch.nn.Module) -> bool:
    """Whether no FSDP unit of a model would have to gather."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.13 on
            if not all(g is None or g.is_unsharded for g in (groups or [getattr(state, "_fsdp_param_group", None)])):
                return False
    return True


def repeats(schedule: Any) -> bool:
    """Whether microbatches of a schedule may be copied: each has one backward."""
    from torch.distributed.pipelining import schedules

    splitting = tuple(getattr(schedules, name) for name in _SPLITTING if hasattr(schedules, name))
    return not isinstance(schedule, splitting)

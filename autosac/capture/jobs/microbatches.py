"""Pipeline stages of which few microbatches run, and the others are logged as copies of these.

In a step of many microbatches a stage does the same for all of them but the first, whose FSDP units gather and whose gradients
are made, and perhaps the last. So of each step the first, the last and two more run. If these two did the same in their
forward, their loss and their backward (`record.repeats`), the others between them and the last are copied: their rows are
logged, and what the schedule goes on to use of them (outputs, losses, gradients to send) are tensors that nothing has
computed. Schedules, transfers, sums of losses and optimizers run as ever. The trace is the same as that of the whole step.

Where forwards free the parameters of FSDP units, a forward and a backward of a stage gather some of them or not, depending on
what the stage has done before (`fsdp_units`). The same holds for tensors that objects of the model hold from one part to the
next (`held_tensors`), if graphs hold them, too: which part frees them depends on the order. Then there are more kinds of
parts: forwards and backwards that come after a forward, or after a backward, and backwards of either kind of forward. The
schedule tells which is which, and two of each kind run. Units and objects are brought into the state that a copied part would
have left behind.

If two differ, as they may where Dynamo compiles, the next ones run until two in a row do the same.

A later one may still differ, in a model that counts its calls. So numbers, texts and truth values that modules hold have to be
the same after both, or all microbatches run; and if the forward or the loss of the last one is another one than those that
were copied, the capture ends with a RepetitionError, too.

Only the recorded step compares two. In those before it, one microbatch of each kind is copied that leaves the modules as the
first one does; if two of the recorded step then differ, the capture ends with a RepetitionError. Of a job's cuts
(`autosac.induction`) only the first compares (`is_compared`): if its microbatches differ, the cuts are no family.

A copied forward has no graph. If its backward then turns out to be none to copy, the capture ends with a RepetitionError and
is made anew, whole. Schedules that split the backward of inputs from that of weights run whole, too, and so do jobs whose
routers send every microbatch's tokens elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.copied_parts import BACKWARD, FORWARD, LOSS, Copies, Part, Stage, is_closed, state_of
from autosac.capture.jobs.fsdp_units import FSDPUnits, UnitsChange
from autosac.capture.jobs.held_tensors import HeldTensor, HeldTensors
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import Numbering, RepetitionError
from autosac.integrations.apply import add_forwards
from autosac.trace import Free

_SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
Order: TypeAlias = Sequence[tuple[str, int]]  # forwards and backwards of a stage, with their microbatches


class PartKind(NamedTuple):
    """Which part of a microbatch; where it matters, after which part of another one it runs, and of a backward, after which
    its forward has run.
    """

    part: str
    after: str = ""
    forward_after: str = ""


_LOSSES = PartKind(LOSS)
_TRIES = 4  # after so many parts of one kind that all differ, those that follow will, too


@dataclass
class _PipelineStage(Stage):
    """A stage's microbatches. `kinds`: those of all parts; `runs`: which microbatches run. `in_graphs`: what graphs of copied
    microbatches would hold beside objects of the model; `compiling`: in which microbatches Dynamo has compiled something. It
    holds what it has compiled for, so these are like no others. `compares`: two parts that are alike make a pattern, else one
    that leaves the modules in the first one's `state`; `uncompared`: kinds of such parts that were copied in the step before.
    """

    units: FSDPUnits = field(kw_only=True)
    objects: HeldTensors = field(kw_only=True)
    in_graphs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    kinds: dict[tuple[str, int], PartKind] = field(default_factory=dict)
    runs: frozenset[int] = frozenset()
    closed: dict[int, bool] = field(default_factory=dict)
    compiling: set[int] = field(default_factory=set)
    compares: bool = True
    state: tuple[Any, ...] = ()
    uncompared: frozenset[PartKind] = frozenset()

    def kind(self, part: str, index: int) -> PartKind:
        return _LOSSES if part == LOSS else self.kinds[part, index]

    def note(self, kind: PartKind, index: int, part: Part | None) -> None:
        """A microbatch has run this kind of part, None if it cannot be copied. What two in a row have done is the pattern.

        RepetitionError if they differ, and one of them was copied in the step before.
        """
        before = self.noted(kind)
        self.parts[kind, index] = part
        if kind in self.patterns:
            return
        trusted = not self.compares and part is not None and part.state == self.state
        other = before[-1] if before else None
        if trusted or (part is not None and other is not None and other.is_like(part)):
            self.patterns[kind] = part
        elif before and kind in self.uncompared:
            raise RepetitionError(f"two microbatches differ in their {kind.part}")
        elif len(before) > _TRIES and part is not None and other is not None:
            self.patterns[kind] = None

    def noted(self, kind: PartKind) -> list[Part | None]:
        """The parts of this kind that have run."""
        return [part for (k, _), part in self.parts.items() if k == kind]

    def gives_up(self, kind: Hashable) -> bool:
        """Whether no two have done the same in this kind of part, after some."""
        return kind in self.patterns and self.patterns[kind] is None

    def pattern(self, kind: Hashable) -> Part | None:
        """What microbatches do in this kind of part, if two in a row have done the same."""
        return self.patterns.get(kind)

    def leaves_nothing(self) -> bool:
        """Whether all ends with its microbatch, in those whose parts are the patterns."""
        for kind, index in self.parts:
            if isinstance(kind, PartKind) and kind.part == BACKWARD and index not in self.closed:
                own = {k: part for (k, i), part in self.parts.items() if i == index}
                patterns = [(part, self.pattern(k)) for k, part in own.items()]
                if all(
                    part is not None and pattern is not None and part.is_like(pattern) for part, pattern in patterns
                ):
                    self.closed[index] = is_closed(list(own.values()))
        return bool(self.closed) and all(self.closed.values())


class Microbatches(Copies):
    """See the module's docstring. One for each capture; `schedule` is the job's. `is_compared`: whether two
    microbatches of the recorded step are.
    """

    def __init__(
        self, mode: SimulatedDeviceMode, recorder: Recorder, schedule: Any, *, is_compared: bool = True
    ) -> None:
        super().__init__(mode, recorder)
        self._stages: dict[int, _PipelineStage] = {}
        self._orders = orders_of(schedule)
        self._is_compared = is_compared

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

    def _begin(self, stage: Any, forward: Callable[[], Any], inputs: Any) -> Any:
        """The schedule begins with a stage, perhaps not for the first time in a step that accumulates gradients. What its
        first forward returns.
        """
        table, count = self._recorder.storages, stage.chunks or 1
        known = _PipelineStage(
            units=FSDPUnits(stage.submod), objects=HeldTensors(stage.submod), uncompared=self._uncompared(stage)
        )
        self._stages[id(stage)] = known
        numbering, first = known.of(0), len(table.storages)
        numbering.storages.give(table.of_all(_opened(inputs)))
        output = forward()
        numbering.storages.make(range(first, len(table.storages)))
        known.objects.find()
        held = self._held(known, numbering, first, ()) or ()
        every = [(part, index) for part in (FORWARD, BACKWARD) for index in range(count)]
        order = self._orders.get(stage.stage_index, ())
        is_told, keeps = set(order) == set(every), known.units.keep_parameters
        # Where parameters stay and graphs hold nothing that objects of the model hold, too, the order does not matter.
        is_plain = keeps and not (is_told and any(left.is_shared for left in held))
        known.kinds = kinds_of(order if is_told else every, is_plain)
        known.runs = running_in(known.kinds) if is_told or keeps else frozenset(range(count))
        known.compares = len(known.runs) == count or (self._is_compared and self._recorder.log.recording)
        if not known.compares:
            known.runs, known.state = running_in(known.kinds, 1), state_of(stage.submod)
        return output

    def _uncompared(self, stage: Any) -> frozenset[PartKind]:
        """The kinds of a stage's parts that have been copied, but never compared with one of their kind."""
        before = self._stages.get(id(stage))
        if before is None or before.compares:
            return frozenset()
        return before.uncompared.union(kind for kind in before.patterns if isinstance(kind, PartKind))

    # ---- the three parts of a microbatch ----------------------------------------------------------------------------

    def _forward(
        self, original: Any, stage: Any, index: int, args: Any, kwargs: Any = None, *more: Any, **named: Any
    ) -> Any:
        if not stage.has_backward or not torch.is_grad_enabled():
            return original(index, args, kwargs, *more, **named)
        inputs = (args, kwargs, _buffers(stage, "args_recv_info", index))
        forward = functools.partial(original, index, args, kwargs, *more, **named)
        if not index:
            return self._begin(stage, forward, inputs)
        known = self._stages[id(stage)]
        known.of(index).storages.give(self._recorder.storages.of_all(_opened(inputs)))
        kept = len(stage.output_chunks)
        if index not in known.runs and self._repeats(known, index, stage.is_last):
            known.copied.add(index)
            # What the model is called with: a later stage with what it has received.
            self._recorder.storages.label_inputs(args if stage.is_first else inputs[2])
            add_forwards(stage.submod, self._pattern(known, known.kind(FORWARD, index)).forwards)
            output = self._copied(known, FORWARD, index)
            stage.fwd_cache[index] = (output if isinstance(output, tuple) else (output,), inputs)
            return output
        output = self._run(known, FORWARD, index, stage, forward)
        if len(stage.output_chunks) > kept:  # they are merged in the end, which needs their graphs
            known.note(known.kind(FORWARD, index), index, None)
        return output

    @staticmethod
    def _repeats(known: _PipelineStage, index: int, has_loss: bool) -> bool:
        """Whether a forward, and the loss after it, are known."""
        forward, backward = known.pattern(known.kind(FORWARD, index)), known.kind(BACKWARD, index)
        if forward is None or forward.units is None or forward.units.before != known.units.state():
            return False
        if known.pattern(backward) is None and len(known.noted(backward)) > known.compares:
            return False
        return not has_loss or known.pattern(_LOSSES) is not None

    def _loss(
        self, original: Any, schedule: Any, stage: Any, output: Any, targets: Any, index: int, *more: Any
    ) -> None:
        if not (stage.is_last and schedule._loss_fn is not None and stage.has_backward and torch.is_grad_enabled()):
            original(stage, output, targets, index, *more)
            return
        known, losses = self._stages[id(stage)], schedule._internal_losses
        known.of(index).storages.give(self._recorder.storages.of_all(targets[index]))
        if index in known.copied:
            losses.append(self._copied(known, LOSS, index))
            return

        def run() -> Any:
            original(stage, output, targets, index, *more)
            return losses[-1]

        self._run(known, LOSS, index, stage, run)

    def _backward(self, original: Any, stage: Any, index: int, *more: Any, **named: Any) -> None:
        if not stage.has_backward:
            original(index, *more, **named)
            return
        known = self._stages[id(stage)]
        known.of(index).storages.give(self._recorder.storages.of_all(_buffers(stage, "grad_recv_info", index)))
        if index in known.copied:
            if not (named.get("full_backward", True) and known.leaves_nothing()):
                raise RepetitionError("a microbatch leaves memory behind")
            held = [stage.fwd_cache.pop(index)]
            stage.bwd_cache[index] = self._copied(known, BACKWARD, index, held.clear)
            return

        def run() -> Any:
            original(index, *more, **named)
            return stage.bwd_cache.get(index)

        self._run(known, BACKWARD, index, stage, run)

    # ---- running and copying ----------------------------------------------------------------------------------------

    def _copied(self, known: _PipelineStage, part: str, index: int, let_go: Callable[[], None] = lambda: None) -> Any:
        """Log a part of a microbatch like those of its kind. What it returns."""
        kind, units, numbering = known.kind(part, index), known.units, known.of(index)
        change = self._pattern(known, kind).units
        if change is None or change.before != units.state(backward=part == BACKWARD):
            raise RepetitionError("parameters are not gathered as they were")
        self._hold(known, numbering)
        first = len(self._recorder.log.events)
        with self._recorder.storages.silent() as ended:
            if part == BACKWARD:
                known.in_graphs.pop(index, None)
        found = self._copy(known, kind, index, let_go)
        units.become(change, [numbering.storages.number(place) for place in change.storages], self._recorder.storages)
        self._leave(known, index, self._pattern(known, kind).held, first, ended)
        return found

    def _hold(self, known: _PipelineStage, numbering: Numbering) -> None:
        """A part begins: what FSDP's units and objects of the model hold has positions of its own."""
        table = self._recorder.storages
        numbering.storages.hold(known.units.storages(table) + known.objects.numbers(table))

    def _leave(
        self, known: _PipelineStage, index: int, held: Sequence[HeldTensor], first: int, ended: Collection[int]
    ) -> None:
        """Let objects of the model hold what a copied part leaves, whose rows begin at `first`. RepetitionError if what they
        let go of, with what has `ended` before, is not what ends in these rows.
        """
        table, numbering = self._recorder.storages, known.of(index)
        before, there = known.objects.numbers(table), known.objects.tensors()
        made: dict[int, torch.Tensor] = {}
        with table.silent() as replaced:
            for place, left in enumerate(held):
                number = numbering.storages.number(left.storage)
                if number == before[place]:
                    continue
                if left.layout is not None:
                    known.objects.put(place, self._made(left.layout, numbering, made))
                    if left.is_shared:
                        known.in_graphs.setdefault(index, []).append(made[number])
                elif number >= 0 and number in before:
                    known.objects.put(place, there[before.index(number)])
                else:
                    raise RepetitionError("an object of the model holds something else")
            there.clear()
            made.clear()
        freed = {row.storage for row in self._recorder.log.events[first:] if type(row) is Free}
        if not set(ended) <= freed or freed.intersection(before) != replaced:
            raise RepetitionError(
                "an object of the model holds memory longer, or shorter, than in the microbatch before"
            )

    def _run(self, known: _PipelineStage, part: str, index: int, stage: Any, action: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, and note it where it may be one to compare. RepetitionError if the last one is not as
        those that were copied.
        """
        kind, is_last = known.kind(part, index), index == stage.chunks - 1
        if not index or len(known.runs) == stage.chunks or known.gives_up(kind):
            return action()
        if is_last and (not known.copied or part == BACKWARD):
            return action()
        before = _compiled_graphs()
        found, noted = self._noted_with_units(known, part, index, stage.submod, action)
        if _compiled_graphs() != before:
            known.compiling.add(index)
        if index in known.compiling:
            noted = None
        if not is_last:
            known.note(kind, index, noted)
        elif (pattern := known.pattern(kind)) is not None and (noted is None or not noted.is_like(pattern)):
            raise RepetitionError(f"the last microbatch differs in its {part}")
        return found

    def _noted_with_units(
        self, known: _PipelineStage, part: str, index: int, model: torch.nn.Module, action: Callable[[], Any]
    ) -> tuple[Any, Part | None]:
        """As `_noted`, with what it does to FSDP's units; None, too, if that is not known."""
        units, table, numbering = known.units, self._recorder.storages, known.of(index)
        before, passed, made = units.state(backward=part == BACKWARD), units.passed(), len(table.storages)
        known.objects.find()
        self._hold(known, numbering)
        found, noted = self._noted(known, index, model, action)
        after = units.state()
        if noted is None or before is None or after is None:
            return found, None
        known.objects.find()
        held = self._held(known, numbering, made, {result.storage for result in noted.results if result is not None})
        if held is None:
            return found, None
        storages = tuple(map(numbering.storages.position, units.storages(table)))
        change = UnitsChange(before, after.gathered, storages, *units.since(passed))
        return found, replace(noted, units=change, held=held)

    def _held(
        self, known: _PipelineStage, numbering: Numbering, first: int, returned: Collection[int]
    ) -> tuple[HeldTensor, ...] | None:
        """What a part leaves in objects of the model; its storages are those from `first` on, and some are returned. None if
        that cannot be copied.
        """
        table, objects = self._recorder.storages, known.objects
        found: list[HeldTensor] = []
        for place, number in enumerate(objects.numbers(table)):
            position = numbering.storages.position(number)
            if number < first:
                found.append(HeldTensor(position))
                continue
            tensor = objects.tensors()[place]
            layout = self._result(tensor, numbering)
            if layout is None or position in returned or tensor.requires_grad:  # that would hold a graph
                return None
            del tensor
            is_shared = objects.is_shared(place, table, functools.partial(self._made, layout, numbering, {}))
            if is_shared is None:
                raise RepetitionError("an object of the model holds another's memory")
            found.append(HeldTensor(position, layout, is_shared))
        return tuple(found)


def orders_of(schedule: Any) -> dict[int, Order]:
    """The forwards and backwards of each stage, as far as a schedule tells; of one that divides backwards nothing.

    Schedule1F1B (PyTorch 2.13) counts the forwards of its last stage from 1. They come in their order.
    """
    found: dict[int, list[tuple[str, int]]] = {}
    parts = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD}
    for actions in (getattr(schedule, "pipeline_order", None) or {}).values():
        for action in filter(None, actions):
            part = parts.get(action.computation_type.name)
            if part is not None:
                found.setdefault(action.stage_index, []).append((part, action.microbatch_index))
    return {stage: _from_zero(order) for stage, order in found.items()}


def _from_zero(order: Order) -> Order:
    first = min((index for part, index in order if part == FORWARD), default=0)
    return [(part, index - first if part == FORWARD else index) for part, index in order]


def kinds_of(order: Order, is_plain: bool) -> dict[tuple[str, int], PartKind]:
    """The kinds of a stage's forwards and backwards; `is_plain`: what has run before does not matter."""
    if is_plain:
        return {(part, index): PartKind(part) for part, index in order}
    found: dict[tuple[str, int], PartKind] = {}
    after = ""
    for part, index in order:
        found[part, index] = PartKind(part, after, found[FORWARD, index].after if part == BACKWARD else "")
        after = part
    return found


def running_in(kinds: dict[tuple[str, int], PartKind], each: int = 2) -> frozenset[int]:
    """Which microbatches run whatever they do: the first and the last of the step, and the first others of each kind of part,
    so many of `each`.
    """
    last = max(index for _, index in kinds)
    members: dict[PartKind, list[int]] = {}
    for (_, index), kind in kinds.items():
        if 0 < index < last:
            members.setdefault(kind, []).append(index)
    return frozenset((0, last)).union(*(indices[:each] for indices in members.values()))


def _compiled_graphs() -> int:
    """How many graphs Dynamo has compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def _opened(inputs: Any) -> list[Any]:
    """What a stage is called with; of attention's masks, their tensors."""
    from torch.nn.attention.flex_attention import BlockMask

    return [leaf.as_tuple() if isinstance(leaf, BlockMask) else leaf for leaf in pytree.tree_leaves(inputs)]


def _buffers(stage: Any, name: str, index: int) -> list[Any]:
    """Where a stage receives what belongs to a microbatch."""
    infos = getattr(stage, name).get(index) or ()
    return [getattr(info, "buffer", None) for info in infos]


def repeats(schedule: Any) -> bool:
    """Whether microbatches of a schedule may be copied: each has one backward."""
    from torch.distributed.pipelining import schedules

    splitting = tuple(getattr(schedules, name) for name in _SPLITTING if hasattr(schedules, name))
    return not isinstance(schedule, splitting)

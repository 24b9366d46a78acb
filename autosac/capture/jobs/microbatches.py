"""Pipeline stages of which few microbatches run, and the others are logged as copies of these.

In a step of many microbatches a stage does the same for all of them but the first, whose FSDP units gather and whose gradients
are made, and perhaps the last. So of each step the first, the last and two more run. If these two did the same in their
forward, their loss and their backward (`record.repeats`), the others between them and the last are copied: their rows are
logged, and what the schedule goes on to use of them (outputs, losses, gradients to send) are tensors that nothing has
computed. Schedules, transfers, sums of losses and optimizers run as ever. The trace is the same as that of the whole step.

Where forwards free the parameters of FSDP units, a forward and a backward of a stage gather some of them or not, depending on
what the stage has done before (`fsdp_units`). Then there are more kinds of parts: forwards and backwards that come after a
forward, or after a backward, and backwards of either kind of forward. The schedule tells which is which, and two of each kind
run. FSDP's units are brought into the state that a copied part would have left behind.

A later one may still differ, in a model that counts its calls. So numbers, texts and truth values that modules hold have to be
the same after both, or all microbatches run; and if the forward or the loss of the last one is another one than those that
were copied, the capture ends with a RepetitionError, too.

A copied forward has no graph. If its backward then turns out to be none to copy, the capture ends with a RepetitionError and
is made anew, whole. Schedules that split the backward of inputs from that of weights run whole, too, and so do jobs whose
routers send every microbatch's tokens elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.copied_parts import BACKWARD, FORWARD, LOSS, Copies, Part, Stage, is_closed
from autosac.capture.jobs.fsdp_units import FSDPUnits, UnitsChange
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import RepetitionError
from autosac.integrations.apply import add_forwards

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


@dataclass
class _PipelineStage(Stage):
    """A stage's microbatches. `kinds`: those of all parts; `runs`: which microbatches run."""

    units: FSDPUnits = field(kw_only=True)
    kinds: dict[tuple[str, int], PartKind] = field(default_factory=dict)
    runs: frozenset[int] = frozenset()
    closed: dict[int, bool] = field(default_factory=dict)

    def kind(self, part: str, index: int) -> PartKind:
        return _LOSSES if part == LOSS else self.kinds[part, index]

    def leaves_nothing(self) -> bool:
        """Whether all that the microbatches make which have run as ones to compare ends with them."""
        for kind, index in self.parts:
            if isinstance(kind, PartKind) and kind.part == BACKWARD and index not in self.closed:
                self.closed[index] = is_closed([part for (_, i), part in self.parts.items() if i == index])
        return all(self.closed.values())


class Microbatches(Copies):
    """See the module's docstring. One for each capture; `schedule` is the job's."""

    def __init__(self, mode: SimulatedDeviceMode, recorder: Recorder, schedule: Any) -> None:
        super().__init__(mode, recorder)
        self._stages: dict[int, _PipelineStage] = {}
        self._orders = orders_of(schedule)

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

    def _begun(self, stage: Any) -> _PipelineStage:
        """The schedule begins with a stage, perhaps not for the first time in a step that accumulates gradients."""
        units, count = FSDPUnits(stage.submod), stage.chunks or 1
        every = [(part, index) for part in (FORWARD, BACKWARD) for index in range(count)]
        order, keeps = self._orders.get(stage.stage_index, ()), units.keep_parameters
        is_told = set(order) == set(every)
        known = _PipelineStage(units=units, kinds=kinds_of(order if is_told else every, keeps))
        if is_told or keeps:  # where parameters stay, the order does not matter
            known.compared, known.runs = compared_in(known.kinds)
        else:
            known.runs = frozenset(range(count))
        self._stages[id(stage)] = known
        return known

    # ---- the three parts of a microbatch ----------------------------------------------------------------------------

    def _forward(
        self, original: Any, stage: Any, index: int, args: Any, kwargs: Any = None, *more: Any, **named: Any
    ) -> Any:
        if not stage.has_backward or not torch.is_grad_enabled():
            return original(index, args, kwargs, *more, **named)
        known = self._begun(stage) if not index else self._stages[id(stage)]
        inputs = (args, kwargs, _buffers(stage, "args_recv_info", index))
        known.of(index).storages.give(self._recorder.storages.of_all(inputs))
        kept = len(stage.output_chunks)
        if index not in known.runs and self._repeats(known, index, stage.is_last):
            known.copied.add(index)
            # What the model is called with: a later stage with what it has received.
            self._recorder.storages.label_inputs(args if stage.is_first else inputs[2])
            add_forwards(stage.submod, self._pattern(known, known.kind(FORWARD, index)).forwards)
            output = self._copied(known, FORWARD, index)
            stage.fwd_cache[index] = (output if isinstance(output, tuple) else (output,), inputs)
            return output
        output = self._run(known, FORWARD, index, stage, lambda: original(index, args, kwargs, *more, **named))
        if len(stage.output_chunks) > kept:  # they are merged in the end, which needs their graphs
            known.parts[known.kind(FORWARD, index), index] = None
        return output

    @staticmethod
    def _repeats(known: _PipelineStage, index: int, has_loss: bool) -> bool:
        """Whether a forward, and the loss after it, are known."""
        forward = known.pattern(known.kind(FORWARD, index))
        if forward is None or forward.units is None or forward.units.before != known.units.state():
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
        numbering.storages.hold(units.storages(self._recorder.storages))
        found = self._copy(known, kind, index, let_go)
        units.become(change, [numbering.storages.number(place) for place in change.storages], self._recorder.storages)
        return found

    def _run(self, known: _PipelineStage, part: str, index: int, stage: Any, action: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, and note it where it may be one to compare. RepetitionError if the last one is not as
        those that were copied.
        """
        if not index or index not in known.runs or not known.compared:
            return action()
        kind, is_last = known.kind(part, index), index == stage.chunks - 1
        if is_last and (not known.copied or part == BACKWARD):
            return action()
        found, noted = self._noted_with_units(known, part, index, stage.submod, action)
        if not is_last:
            known.parts[kind, index] = noted
        elif (pattern := known.pattern(kind)) is not None and (noted is None or not noted.is_like(pattern)):
            raise RepetitionError(f"the last microbatch differs in its {part}")
        return found

    def _noted_with_units(
        self, known: _PipelineStage, part: str, index: int, model: torch.nn.Module, action: Callable[[], Any]
    ) -> tuple[Any, Part | None]:
        """As `_noted`, with what it does to FSDP's units; None, too, if that is not known."""
        units, table, numbers = known.units, self._recorder.storages, known.of(index).storages
        before, passed = units.state(backward=part == BACKWARD), units.passed()
        numbers.hold(units.storages(table))
        found, noted = self._noted(known, index, model, action)
        after = units.state()
        if noted is None or before is None or after is None:
            return found, None
        storages = tuple(numbers.position(number) for number in units.storages(table))
        return found, replace(noted, units=UnitsChange(before, after.gathered, storages, *units.since(passed)))


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


def kinds_of(order: Order, keeps_parameters: bool) -> dict[tuple[str, int], PartKind]:
    """The kinds of a stage's forwards and backwards."""
    if keeps_parameters:
        return {(part, index): PartKind(part) for part, index in order}
    found: dict[tuple[str, int], PartKind] = {}
    after = ""
    for part, index in order:
        found[part, index] = PartKind(part, after, found[FORWARD, index].after if part == BACKWARD else "")
        after = part
    return found


def compared_in(
    kinds: dict[tuple[str, int], PartKind],
) -> tuple[dict[Hashable, tuple[int, int]], frozenset[int]]:
    """Which two microbatches are compared in each kind of part, the first that are neither the first nor the last of the step;
    which microbatches run: those, the first and the last, and all that have a part of a kind of which there are less than two.
    """
    last = max(index for _, index in kinds)
    members: dict[PartKind, list[int]] = {}
    for (_, index), kind in kinds.items():
        if 0 < index < last:
            members.setdefault(kind, []).append(index)
    chosen = {kind: tuple(indices[:2]) for kind, indices in members.items()}
    runs = frozenset((0, last)).union(*chosen.values())
    compared: dict[Hashable, tuple[int, int]] = {kind: (c[0], c[1]) for kind, c in chosen.items() if len(c) == 2}
    inner = [index for part, index in kinds if part == FORWARD and index in runs - {0, last}]
    if len(inner) > 1:
        compared[_LOSSES] = (inner[0], inner[1])
    return compared, runs


def _buffers(stage: Any, name: str, index: int) -> list[Any]:
    """Where a stage receives what belongs to a microbatch."""
    infos = getattr(stage, name).get(index) or ()
    return [getattr(info, "buffer", None) for info in infos]


def repeats(schedule: Any) -> bool:
    """Whether microbatches of a schedule may be copied: each has one backward."""
    from torch.distributed.pipelining import schedules

    splitting = tuple(getattr(schedules, name) for name in _SPLITTING if hasattr(schedules, name))
    return not isinstance(schedule, splitting)

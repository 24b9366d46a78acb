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
from collections.abc import Callable
from typing import Any

import torch

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.copied_parts import BACKWARD, COMPARED, FORWARD, LOSS, Copies, Part, Stage, is_gathered
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import RepetitionError
from autosac.integrations.apply import add_forwards

_SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Microbatches(Copies):
    """See the module's docstring. One for each capture."""

    def __init__(self, mode: SimulatedDeviceMode, recorder: Recorder) -> None:
        super().__init__(mode, recorder)
        self._stages: dict[int, Stage] = {}

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

    def _of(self, stage: Any) -> Stage:
        return self._stages.setdefault(id(stage), Stage())

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
        is_inner = COMPARED[1] < index < (stage.chunks or 0) - 1
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

    def _run(self, known: Stage, kind: str, index: int, stage: Any, action: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, and note it where it is one to compare. RepetitionError if the last one is not as those
        that were copied.
        """
        if index in COMPARED:
            found, known.parts[kind, index] = self._noted_gathered(known, index, stage.submod, action)
            return found
        if not known.copied or kind == BACKWARD or index != stage.chunks - 1:
            return action()
        found, part = self._noted_gathered(known, index, stage.submod, action)
        if part is None or not part.is_like(self._pattern(known, kind)):
            raise RepetitionError(f"the last microbatch differs in its {kind}")
        return found

    def _noted_gathered(
        self, known: Stage, index: int, model: torch.nn.Module, action: Callable[[], Any]
    ) -> tuple[Any, Part | None]:
        """As `_noted`; None, too, if the model does not stay gathered."""
        stays = is_gathered(model)
        found, part = self._noted(known, index, model, action)
        return found, part if stays and is_gathered(model) else None


def _buffers(stage: Any, name: str, index: int) -> list[Any]:
    """Where a stage receives what belongs to a microbatch."""
    infos = getattr(stage, name).get(index) or ()
    return [getattr(info, "buffer", None) for info in infos]


def repeats(schedule: Any) -> bool:
    """Whether microbatches of a schedule may be copied: each has one backward."""
    from torch.distributed.pipelining import schedules

    splitting = tuple(getattr(schedules, name) for name in _SPLITTING if hasattr(schedules, name))
    return not isinstance(schedule, splitting)

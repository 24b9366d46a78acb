"""TorchTitan jobs that accumulate gradients: few of a step's microbatches run, and the others are logged as copies of these.

A microbatch is one call of `Trainer.forward_backward_step`. The first of a step makes the gradients that the others add to. As
soon as two in a row have done the same (`record.repeats`), and all that they have made ends with them or in the next one, but
for the loss, the others are copied. So of each step the microbatches 0, 1, 2 and the last one run; if modules hold tensors
from one microbatch to the next, 3 does, too. The trace is the same as that of the whole step.

Numbers, texts and truth values that modules hold have to be the same after both, or all microbatches run; and if the last one
is another one than those that were copied, the capture ends with a RepetitionError and is made anew, whole. Of a
pipeline, one call is a whole schedule, within which microbatches are copied, too (`microbatches`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.copied_parts import Copies, Part, Stage, is_closed
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import RepetitionError
from autosac.integrations.apply import add_forwards

_MICROBATCH = "microbatch"
_LEAST = 5  # of fewer microbatches none would be copied


class AccumulatedMicrobatches(Copies):
    """See the module's docstring. One for each capture, whose `trainer` it patches."""

    def __init__(self, mode: SimulatedDeviceMode, recorder: Recorder, trainer: Any) -> None:
        super().__init__(mode, recorder)
        self._model = torch.nn.ModuleList(trainer.model_parts)
        self._last = trainer.gradient_accumulation_steps - 1
        self._step, self._original = trainer.train_step, trainer.forward_backward_step
        self._index = 0
        self._known = Stage(chained=True)
        self._before: Part | None = None
        trainer.train_step, trainer.forward_backward_step = self._train_step, self._microbatch

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        self._index, self._known, self._before = 0, Stage(chained=True), None
        return self._step(*args, **kwargs)

    def _microbatch(self, *args: Any, **kwargs: Any) -> Any:
        """A microbatch's loss."""
        index, known = self._index, self._known
        self._index += 1
        known.of(index).storages.give(self._recorder.storages.of_all((args, kwargs)))
        pattern = known.patterns.get(_MICROBATCH)
        if pattern is not None and index != self._last:
            add_forwards(self._model, pattern.forwards)
            return self._copy(known, _MICROBATCH, index)
        run = functools.partial(self._original, *args, **kwargs)
        if not index:  # what it makes and the others use, gradients, is none of a chain
            return run()
        loss, part = self._noted(known, index, self._model, run)
        if pattern is None:
            known.patterns[_MICROBATCH] = part if self._repeats(part) else None
        elif part is None or not part.is_like(pattern):
            raise RepetitionError("the last microbatch differs")
        self._before = part
        return loss

    def _repeats(self, part: Part | None) -> bool:
        """Whether a microbatch has done the same as the one before it, and leaves nothing but its loss behind."""
        if part is None or self._before is None or not part.is_like(self._before):
            return False
        is_given = self._known.of(0).storages.is_given
        return is_closed([part]) and not any(map(is_given, part.stretch.freed()))


def accumulates(trainer: Any) -> bool:
    """Whether a trainer's step has so many microbatches that copying them pays."""
    return bool(trainer.gradient_accumulation_steps >= _LEAST)

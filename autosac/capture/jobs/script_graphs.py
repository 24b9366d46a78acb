"""CUDA graphs of a script: what their launches mean for its steps.

Steps that a script makes aside, on another stream than the default one, and the step in which a graph is captured are taken
for a warm-up: the step that is kept comes after them. A launch of a graph counts for what was captured: a backward, and calls
of `Optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autosac.capture.device.device import Pool
from autosac.capture.jobs.script import ScriptSteps
from autosac.capture.record.recorder import Recorder
from autosac.trace import Event, Op, Phase


class Meaning(NamedTuple):
    """Of a graph's launch: whether it computes gradients, and how often it steps the script's first optimizer."""

    has_backward: bool
    updates: int


class ScriptGraphs:
    """A `capture.cuda.graphs.GraphListener`.

    `follow` brings whoever follows the log up to date, `skip` tells him that the log has changed.
    """

    def __init__(
        self, steps: ScriptSteps, recorder: Recorder, follow: Callable[[], None], skip: Callable[[], None]
    ) -> None:
        """No graph has been captured."""
        self._steps = steps
        self._recorder = recorder
        self._follow = follow
        self._skip = skip

    def capture_begun(self, pool: Pool) -> None:
        """What follows is no step of the script."""
        self._recorder.storages.forget_addition()
        self._follow()
        self._steps.begin_capture()
        self._recorder.graphs.begin(pool)

    def capture_ended(self) -> tuple[Meaning, tuple[Event, ...]]:
        """Steps go on."""
        self._recorder.storages.forget_addition()
        self._follow()
        captured = self._recorder.graphs.end()
        self._skip()
        has_backward = any(type(event) is Op and event.phase is Phase.BACKWARD for event in captured)
        return Meaning(has_backward, self._steps.end_capture()), captured

    def graph_launched(self, meaning: Meaning, captured: tuple[Event, ...], first: int, stream: int) -> None:
        """A step may begin with it, and may end with it."""
        self._steps.launch_begins(meaning.has_backward)
        if not self._steps.forward.active:
            self._recorder.graphs.launch(captured, first, stream)
        self._steps.launch_ends(meaning.updates)

    def pool_entered(self, pool: Pool | None) -> Pool | None:
        """Only memory changes."""
        return self._recorder.graphs.enter_pool(pool)

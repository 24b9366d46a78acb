"""Simulated time while a script runs: when the host comes to a place in its step, and the device to an event.

A step's events have times as soon as somebody asks: the part of the step that has been recorded is priced and executed by
itself, from a device that is idle. Once there is a step like all that follow (`keep`), its timeline says when the host has
issued each of its events, and every later step takes exactly that long, unless it proves to do something else (`price`).
Before the first step time stands still.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.runtime_sim import simulate
from autosac.simulation import Simulation
from autosac.trace import Trace


class Mark(NamedTuple):
    """A place in the script: a step, the number of its events that came before, and a stream."""

    step: int
    events: int
    stream: int


@dataclass(frozen=True, slots=True)
class _Times:
    """A step, or its beginning: when the host has done with each event, when the device has, and the time of all, in ms.

    `alone`: the device was idle before, so that all are done when the device is.
    """

    host_ms: NDArray[np.float64]
    device_ms: NDArray[np.float64]
    stream: NDArray[np.int32]
    total_ms: float
    alone: bool = False

    def stretched(self, by: float) -> _Times:
        """Everything takes longer."""
        return _Times(self.host_ms * by, self.device_ms * by, self.stream, self.total_ms * by)

    def host_at(self, events: int) -> float:
        return float(self.host_ms[min(events, len(self.host_ms)) - 1]) if events and len(self.host_ms) else 0.0

    def device_at(self, mark: Mark) -> float:
        """When the stream has done all that was issued to it before; stream -1: when all have."""
        ended = self.device_ms[: mark.events]
        if mark.stream >= 0:
            ended = ended[self.stream[: mark.events] == mark.stream]
        ended = ended[np.isfinite(ended)]
        return float(ended.max()) if ended.size else self.host_at(mark.events)


class StepTimes:
    """A `DeviceClock`. `present` gives the number of the step under way (0: none) and of its events so far.

    `simulation` simulates it as far as it has come, `changed` says whether it is known to do something else than others, and
    `waited` where in it the host last waited for a stream, or for all.
    """

    def __init__(
        self,
        present: Callable[[], tuple[int, int]],
        simulation: Callable[[], Simulation],
        changed: Callable[[], bool],
        waited: Callable[[], Mark | None],
    ) -> None:
        self._changed = changed
        self._waited = waited
        self._present = present
        self._simulation = simulation
        self._begin_ms: dict[int, float] = {}
        self._steps: dict[int, tuple[int, _Times]] = {}
        self._steady: _Times | None = None
        self._stretch = 1.0  # by what several ranks together take longer than this one alone
        self._told_ms = 0.0

    def begin(self, step: int) -> None:
        """A step begins: of steps that follow each other (`keep`) where the host begins it, else where the device is idle.

        So the first that follows begins before the device has done with the kept one, which was executed alone.
        """
        before = self._begin_ms.get(step - 1)
        if before is None:
            self._begin_ms[step] = 0.0
            return
        last = self._of(step - 1)
        follows = last.alone and self._steady is not None
        self._begin_ms[step] = before + (last.host_at(len(last.host_ms)) if follows else last.total_ms)

    def end(self, step: int) -> None:
        """It has ended; the recorder still holds it."""
        self._of(step)
        for old in [number for number in self._steps if number < step - 1]:
            del self._steps[old]

    def keep(self, simulation: Simulation, alone_ms: float) -> None:
        """All later steps take as long as this one, event by event. This rank's step takes `alone_ms` without the others."""
        self._steady = _steady(simulation)
        self._stretch = self._steady.total_ms / alone_ms if alone_ms else 1.0

    def price(self, step: int) -> float:
        """The present step, which came after the kept one, does something else: its time if all are like it, in ms."""
        events = self._present()[1]
        known = self._steps.get(step)
        if known is None or known[0] != events:
            times = _steady(self._simulation())
            known = self._steps[step] = events, times.stretched(self._stretch)
        return known[1].total_ms

    def elapsed_s(self) -> float:
        """Simulated seconds since the first step began."""
        step, events = self._present()
        if step:  # a step that proves shorter than the others, when it has ended, does not turn time back
            now_ms = self._begin_ms[step] + self._of(step).host_at(events)
            self._told_ms = max(self._told_ms, now_ms, self._waited_ms())
        return self._told_ms / 1e3

    def _waited_ms(self) -> float:
        """When the device had done what the host last waited for. The kept step may not have waited there."""
        mark = self._waited()
        if mark is None:
            return 0.0
        before = mark.step - 1
        done_ms = self._device_ms(Mark(before, sys.maxsize, mark.stream)) if before in self._begin_ms else 0.0
        return max(done_ms, self._device_ms(mark))

    def mark(self, stream: int) -> Mark:
        """The present place on a stream."""
        return Mark(*self._present(), stream)

    def elapsed_ms(self, first: Mark, second: Mark) -> float:
        """The time of the device between two places."""
        return self._device_ms(second) - self._device_ms(first)

    def _device_ms(self, mark: Mark) -> float:
        return self._begin_ms[mark.step] + self._of(mark.step).device_at(mark) if mark.step else 0.0

    def _of(self, step: int) -> _Times:
        present, events = self._present()
        known = self._steps.get(step)
        if known is not None and (step != present or known[0] == events or self._steady is not None):
            return known[1]
        if self._steady is not None:
            if step == present and self._changed():
                self.price(step)
                return self._steps[step][1]
            return self._steady
        times = _alone(self._simulation())
        self._steps[step] = events, times
        return times


def _steady(simulation: Simulation) -> _Times:
    """A step among many like it."""
    rank = simulation.timeline.ranks[simulation.stage]
    first_ms = float(np.nanmin(rank.host_start_ms)) if len(rank.host_start_ms) else 0.0
    return _Times(
        np.maximum.accumulate(np.nan_to_num(rank.host_end_ms - first_ms)),
        rank.end_ms - first_ms,
        rank.stream,
        simulation.step_ms,
    )


def _alone(simulation: Simulation) -> _Times:
    """A step, or a part of it, executed once from an idle device."""
    trace: Trace = simulation.trace
    if not trace.events:
        return _Times(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int32), 0.0)
    target = simulation.target
    timeline = simulate(
        [trace],
        [simulation.pricing],
        host=target.host,
        overlap=target.overlap,
        gpus_per_node=target.cluster.gpus_per_node,
        steps=1,
    )
    rank = timeline.ranks[0]
    host_ms = np.maximum.accumulate(np.nan_to_num(rank.host_end_ms))
    return _Times(host_ms, rank.end_ms, rank.stream, timeline.makespan_ms, alone=True)

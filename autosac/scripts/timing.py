"""Simulated time while a script runs: when the host comes to a place in its step, and the device to an event.

A step's events have times as soon as somebody asks: the part of the step that has been recorded is priced and executed by
itself, from a device that is idle. Once there is a step like all that follow (`keep`), its timeline says when the host has
issued each of its events, and every later step takes exactly that long, unless it proves to do something else (`price`).
What comes before the first step has times of its own (`beginning`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from autosac.capture.device.device import Silence
from autosac.scripts.beginning import Beginning
from autosac.scripts.executed import Mark, Times, alone, steady
from autosac.simulation import Simulation
from autosac.trace import Trace

_EVENT_S = 1e-5


class StepTimes:
    """A `DeviceClock`. `present` gives the number of the step under way (0: none) and of its events so far.

    `simulation` simulates it as far as it has come, or a part of that; `changed` says whether it is known to do something else
    than others, and `waited` where in it the host last waited for a stream, or for all.
    """

    def __init__(
        self,
        present: Callable[[], tuple[int, int]],
        simulation: Callable[[Callable[[Trace], Trace]], Simulation],
        changed: Callable[[], bool],
        waited: Callable[[], Mark | None],
    ) -> None:
        self._changed = changed
        self._waited = waited
        self._present = present
        self._simulated = simulation
        self._beginning = Beginning(simulation)
        self._begin_ms: dict[int, float] = {}
        self._steps: dict[int, tuple[int, Times]] = {}
        self._steady: Times | None = None
        self._stretch = 1.0  # by what several ranks together take longer than this one alone
        self._told_ms = 0.0

    def begin(self, step: int) -> None:
        """A step begins: of steps that follow each other (`keep`) where the host begins it, else where the device is idle.

        So the first that follows begins before the device has done with the kept one, which was executed alone.
        """
        before = self._begin_ms.get(step - 1)
        if before is None:
            present, events = self._present()
            self._begin_ms[step] = 0.0 if present else self._beginning.total_ms(events)
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
        self._steady = steady(simulation)
        self._stretch = self._steady.total_ms / alone_ms if alone_ms else 1.0

    def price(self, step: int) -> float:
        """The present step, which came after the kept one, does something else: its time if all are like it, in ms."""
        events = self._present()[1]
        known = self._steps.get(step)
        if known is None or known[0] != events:
            times = steady(self._simulated(_all))
            known = self._steps[step] = events, times.stretched(self._stretch)
        return known[1].total_ms

    def elapsed_s(self) -> float:
        """Simulated seconds since the script began."""
        step, events = self._present()
        if step:  # a step that proves shorter than the others, when it has ended, does not turn time back
            now_ms = max(self._begin_ms[step] + self._of(step).host_at(events), self._waited_ms())
        else:
            now_ms = self._beginning.host_ms(events)
        self._told_ms = max(self._told_ms, now_ms)
        return self._told_ms / 1e3

    def _waited_ms(self) -> float:
        """When the device had done what the host last waited for. The kept step may not have waited there."""
        mark = self._waited()
        return 0.0 if mark is None else self._device_ms(mark)

    def mark(self, stream: int) -> Mark:
        """The present place on a stream."""
        return Mark(*self._present(), stream)

    def elapsed_ms(self, first: Mark, second: Mark) -> float:
        """The time of the device between two places."""
        return self._device_ms(second) - self._device_ms(first)

    def _device_ms(self, mark: Mark) -> float:
        if not mark.step:
            return self._beginning.device_ms(mark)
        at_ms = self._begin_ms[mark.step] + self._of(mark.step).device_at(mark)
        before = mark.step - 1
        if before not in self._begin_ms or (before not in self._steps and self._steady is None):
            return at_ms
        last = self._of(before)  # a stream has to do with that first; the host is ahead of it
        return max(at_ms, self._begin_ms[before] + last.device_at(Mark(before, sys.maxsize, mark.stream)))

    def _of(self, step: int) -> Times:
        present, events = self._present()
        known = self._steps.get(step)
        if known is not None and (step != present or known[0] == events or self._steady is not None):
            return known[1]
        if self._steady is not None:
            if step == present and self._changed():
                self.price(step)
                return self._steps[step][1]
            return self._steady
        times = alone(self._simulated(_all))
        self._steps[step] = events, times
        return times


class SkippedWaits(Silence):
    """A `DeviceLog` of steps that are not computed: where the host last waited for a stream, or for all."""

    def __init__(self, mark: Callable[[int], Mark]) -> None:
        """`mark`: the present place on a stream."""
        self._mark = mark
        self.last: Mark | None = None

    def host_wait(self, stream: int, event: int, reason: str) -> None:
        if event < 0:
            self.last = self._mark(stream)


class CountedTimes:
    """A `DeviceClock` of runs whose time nobody sees: every event takes as long, and nothing is priced."""

    def __init__(self, present: Callable[[], tuple[int, int]]) -> None:
        """`present`: as for `StepTimes`."""
        self._present = present
        self._step = 0
        self._earlier = self._in_step = 0  # events

    def elapsed_s(self) -> float:
        """Seconds since the script began, on the host and on the device."""
        step, events = self._present()
        if step != self._step:
            self._step, self._earlier, self._in_step = step, self._earlier + self._in_step, 0
        self._in_step = max(self._in_step, events)
        return (self._earlier + self._in_step) * _EVENT_S

    def begin(self, step: int) -> None:
        """Nothing: which step is under way is asked for."""

    def end(self, step: int) -> None:
        """Nothing, either."""

    def mark(self, stream: int) -> float:
        """The present place."""
        return self.elapsed_s()

    def elapsed_ms(self, first: float, second: float) -> float:
        """Between two places."""
        return (second - first) * 1e3


def _all(trace: Trace) -> Trace:
    return trace

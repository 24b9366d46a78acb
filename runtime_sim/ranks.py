"""One rank's step: when each of its events ran, on which stream and engine. Times as in `timeline`."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.execute import Executed, Problem
from autosac.runtime_sim.program import Engine, Program
from autosac.trace import Trace

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank's last simulated step; all arrays have one entry per event of `trace`, NaN (or -1) where it
    does not apply.

    `start_ms`, `end_ms`: on the device. A communication kernel starts when its stream reaches it;
    `transfer_ms` is when all its peers had arrived and bytes began to move. `host_start_ms`, `host_end_ms`:
    on the host (waiting included). `stream`: index into `stream_names` (the trace's streams, then those of
    the process groups). `engine`: see `program.Engine`.
    """

    rank: int
    trace: Trace = field(repr=False)
    start_ms: Times
    end_ms: Times
    transfer_ms: Times
    host_start_ms: Times
    host_end_ms: Times
    stream: NDArray[np.int32]
    engine: NDArray[np.int8]
    stream_names: tuple[str, ...]

    def reached_ms(self, step_ms: float) -> Times:
        """When computation has come to each event, in the order in which the host issued them: never decreasing, within the
        step. What is no computation (an allocation, a collective) comes when the kernel issued before it has ended.
        """
        on = np.flatnonzero(self.engine == Engine.COMPUTE)
        start = np.zeros(len(self.engine))
        start[on] = self.start_ms[on]
        ended = np.zeros(len(self.engine) + 1)
        ended[on + 1] = self.end_ms[on]
        reached = np.maximum(np.maximum.accumulate(start), np.maximum.accumulate(ended)[:-1])
        return np.clip(reached, 0.0, step_ms)

    def stream_busy_ms(self) -> dict[str, float]:
        """How long each stream had a kernel running (waiting for peers included)."""
        on_device = self.stream >= 0
        busy = np.bincount(
            self.stream[on_device],
            weights=(self.end_ms - self.start_ms)[on_device],
            minlength=len(self.stream_names),
        )
        return dict(zip(self.stream_names, busy.tolist(), strict=True))


def rank_timeline(problem: Problem, executed: Executed, position: int) -> RankTimeline:
    """The last step of the rank at this position."""
    program, execution, origin = executed.program, executed.execution, executed.origin_ms
    trace = problem.traces[position]
    count = len(trace.events)
    start, end, transfer = (np.full(count, np.nan) for _ in range(3))
    stream, engine = np.full(count, -1, dtype=np.int32), np.full(count, -1, dtype=np.int8)
    first, past = bisect.bisect_left(program.rank, position), bisect.bisect_right(program.rank, position)
    for item in range(bisect.bisect_left(program.step, problem.steps - 1, first, past), past):  # linked rank by rank
        for event, number in program.legs.get(item, ((program.event[item], -1),)):
            start[event] = execution.start[item]
            end[event] = execution.end[item] if number < 0 else execution.transfer_end[number]
            if number >= 0:
                transfer[event] = execution.transfer_start[number]
            stream[event], engine[event] = program.stream[item], program.engine[item]
    host_start, host_end = _host_times(program, execution, position, problem.host_ms[position])
    return RankTimeline(
        rank=program.ranks[position],
        trace=trace,
        start_ms=start - origin,
        end_ms=end - origin,
        transfer_ms=transfer - origin,
        host_start_ms=host_start - origin,
        host_end_ms=host_end - origin,
        stream=stream,
        engine=engine,
        stream_names=tuple(program.stream_names[position]),
    )


def _host_times(program: Program, execution: Execution, position: int, costs_ms: Times) -> tuple[Times, Times]:
    """When the host was at each event of the last step: known at the points, and in between by the costs."""
    points, resume = program.points[position], execution.resume[position]
    ends = program.step_ends[position]
    first = ends[-2] + 1 if len(ends) > 1 else 0
    elapsed = np.concatenate([[0.0], np.cumsum(costs_ms)])
    events = np.array([point.event for point in points[first:]])  # the last one is one past the end
    before = np.array(resume[first - 1 : -1] if first else [0.0, *resume[:-1]])
    segment = np.diff(np.concatenate([[0], events[:-1] + 1, [len(costs_ms)]]))
    opening = np.repeat(before - elapsed[np.cumsum(segment) - segment], segment)
    begin = opening + elapsed[:-1]
    finish = begin + costs_ms
    finish[events[:-1]] = np.maximum(finish[events[:-1]], resume[first:-1])
    return begin, finish

"""What the step's time consists of: the chain of causes from the step's end back to its beginning.

Every item knows why it did not run earlier: the last of what it waited for, the kernel that had its engine,
the peer that came last to its transfer, or its launch; and a launch, in turn, follows the item that the host
last waited for. Walking these causes backwards from whatever finished last gives segments that follow each
other without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autosac.runtime_sim.engine import HOST, Execution
from autosac.runtime_sim.program import Program

_ON_HOST = ("host", "sync")


class PathSegment(NamedTuple):
    """A stretch of the critical path (ms) on one rank.

    `event`: the operator or collective that ran, or that the host was on its way to launch (-1: to the end of
    the step). `reason`: why it did not begin earlier. "start": nothing before it in the step. "stream": the
    item before it on its stream. "dependency": an item on another stream, through an event, stream or work.
    "engine": another kernel had the engine. "peer": another rank came last. "launch": the host issued it just
    then. "host": this *is* the host, issuing; "sync": the host, after it had waited for the device.
    """

    rank: int
    event: int
    start_ms: float
    end_ms: float
    reason: str


def critical_path(program: Program, execution: Execution, step_end_ms: Sequence[float]) -> tuple[PathSegment, ...]:
    """The critical path of the last simulated step, in order of time. `step_end_ms`: when each step was complete."""
    walk = _Walk(program, execution, step_end_ms)
    while walk.item >= 0 and walk.until > walk.origin:
        walk.back()
    return tuple(
        s._replace(start_ms=max(s.start_ms, walk.origin) - walk.origin, end_ms=s.end_ms - walk.origin)
        for s in reversed(walk.segments)
        if s.end_ms > max(s.start_ms, walk.origin)
    )


def device_time_on(path: Sequence[PathSegment], rank: int) -> dict[int, float]:
    """For each event of a rank that the path leads through on the device: how much of the path (ms)."""
    found: dict[int, float] = {}
    for segment in path:
        if segment.rank == rank and segment.reason not in _ON_HOST:
            found[segment.event] = found.get(segment.event, 0.0) + segment.end_ms - segment.start_ms
    return found


class _Walk:
    """The backward walk: `item` is what ends at `until`."""

    def __init__(self, program: Program, execution: Execution, step_end_ms: Sequence[float]) -> None:
        self.program, self.run = program, execution
        self.origin = step_end_ms[-2] if len(step_end_ms) > 1 else 0.0
        self.segments: list[PathSegment] = []
        self.until = step_end_ms[-1]
        ends = self.run.end
        self.item = max(range(len(ends)), key=ends.__getitem__, default=-1)
        if self.item < 0 or ends[self.item] < self.until:
            rank = max(range(len(self.run.host_ms)), key=self.run.host_ms.__getitem__)
            self._host(rank, -1, self.run.last_released[rank])

    def _host(self, rank: int, event: int, released_by: int) -> None:
        """The host was issuing until `until`, since the step began or since `released_by` ended."""
        since = self.run.end[released_by] if released_by >= 0 else 0.0
        reason = "sync" if released_by >= 0 else "host"
        self.segments.append(PathSegment(self.program.ranks[rank], event, since, self.until, reason))
        self.item, self.until = released_by, since

    def back(self) -> None:
        """Add the segment of `item`, and go to its cause."""
        program, run = self.program, self.run
        item = self.item
        start, reason, cause = self._begin(item)
        rank, event = program.rank[item], program.event[item]
        self.segments.append(PathSegment(program.ranks[rank], event, start, self.until, reason))
        self.item, self.until = cause, start
        if reason == "launch":
            self._host(rank, event, run.released_by[item])

    def _begin(self, item: int) -> tuple[float, str, int]:
        """When the item began to run, why not before, and after which item."""
        program, run = self.program, self.run
        if item in program.legs:
            number = max((t for _, t in program.legs[item]), key=run.transfer_end.__getitem__)
            last = run.last_member[number]
            if last != item:
                return run.transfer_start[number], "peer", last
        elif run.freed_by[item] >= 0:
            return run.start[item], "engine", run.freed_by[item]
        return self._cause(item)

    def _cause(self, item: int) -> tuple[float, str, int]:
        program, run = self.program, self.run
        cause = run.cause[item]
        if cause == HOST:
            return run.start[item], "launch", -1
        reason = "stream" if program.stream[cause] == program.stream[item] else "dependency"
        return run.start[item], reason, cause

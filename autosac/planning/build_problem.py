"""From a captured step to the global problem: candidate units, and the points of the step where memory could peak.

Every execution of a unit adds two boundaries to the step's timeline: the end of its forward, from where on checkpointing
changes what is held (n_pu rises), and the beginning of its backward (n_pu falls, see `autosac.memory_sim.spans`). Between two
boundaries nothing that the solver decides changes, so one point, the highest of the stretch, stands for it. Everything
outside of the units (loss, logits, optimizer, FSDP) is in the timeline itself.

At each backward's beginning the unit's forward runs again on top of what is live. At event t of it, memory is above what is
live outside of the unit by

    growth_t + kept results that t has not come to yet

with growth_t by how much memory had risen at the same event of the forward. `later_t`, all results after t that could be
kept, and what is kept in all are both bounds of the second term (`_recomputation`). Early events, where most is still to
come, take the latter: a point at which the unit still counts as held, and takes the largest growth_t of them more. Late
events take the former: a point after which the unit is no more held, and takes the largest growth_t + later_t more than its
implicit storages, which the un-checkpointed step holds there anyway.

Inputs that only checkpointing holds (`boundary`) stay to the end of the unit's backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autosac.memory_sim import MemoryTimeline
from autosac.memory_sim.spans import Span, StorageEvents, region_spans
from autosac.solvers import CurveSegment, GlobalProblem, GlobalUnit, PeakPoint
from autosac.trace import Region, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStatistics:
    """What the solver needs of a unit's operators (from the SACEstimator): see `autosac.solvers.GlobalUnit`. `is_mean`: of
    executions of different sizes, not of each.
    """

    stored_bytes: int
    discardable_bytes: int
    recompute_ms: float
    segments: tuple[CurveSegment, ...]
    is_mean: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The global problem, and for each of its units the module's index and its executions in the step."""

    problem: GlobalProblem
    modules: tuple[int, ...]
    executions: tuple[tuple[Span, ...], ...]


def build_problem(
    trace: Trace,
    memory: MemoryTimeline,
    statistics: Mapping[int, UnitStatistics],
    allowed: Mapping[int, bool],
) -> PlanningProblem:
    """The global problem of a step that was captured without checkpointing and with its regions observed.

    `statistics` by region index: regions without are no candidates. `allowed` by module index.
    """
    lifetimes = StorageEvents(trace)
    spans = [s for s in region_spans(trace, lifetimes) if s is not None and s.region in statistics]
    executions: dict[int, list[Span]] = {}
    for span in spans:
        executions.setdefault(trace.regions[span.region].module, []).append(span)
    modules = sorted(executions, key=lambda module: (_depth(trace, module), module))
    position = {module: u for u, module in enumerate(modules)}
    units = tuple(
        _unit(trace, lifetimes, executions[module], statistics, _parent(trace, module, position), allowed[module])
        for module in modules
    )
    points = _points(trace, memory, lifetimes, executions, position, units)
    return PlanningProblem(
        problem=GlobalProblem(units=units, points=points),
        modules=tuple(modules),
        executions=tuple(tuple(executions[module]) for module in modules),
    )


def _depth(trace: Trace, module: int) -> int:
    depth = 0
    while trace.module_parents[module] >= 0:
        module = trace.module_parents[module]
        depth += 1
    return depth


def _parent(trace: Trace, module: int, position: Mapping[int, int]) -> int:
    """The closest enclosing candidate, as a position among the units; -1 if there is none."""
    above = trace.module_parents[module]
    while above >= 0:
        if above in position:
            return position[above]
        above = trace.module_parents[above]
    return -1


def _unit(
    trace: Trace,
    lifetimes: StorageEvents,
    spans: Sequence[Span],
    statistics: Mapping[int, UnitStatistics],
    parent: int,
    allowed: bool,
) -> GlobalUnit:
    first = statistics[spans[0].region]
    implicit = [lifetimes.bytes_of(s.implicit) for s in spans]
    return GlobalUnit(
        name=trace.modules[trace.regions[spans[0].region].module],
        # Savings are promised by the execution that saves least, if all are alike.
        implicit_bytes=sum(implicit) // len(implicit) if first.is_mean else min(implicit),
        boundary_bytes=max(lifetimes.bytes_of(s.boundary) for s in spans),
        stored_bytes=first.stored_bytes,
        discardable_bytes=first.discardable_bytes,
        recompute_ms=first.recompute_ms,
        segments=first.segments,
        parent=parent,
        executions=len(spans),
        allowed=allowed,
    )


class _Recomputation(NamedTuple):
    """A unit's recomputation: what it takes while the unit counts as held, and after that beyond what is implicit."""

    unit: int
    early_bytes: int
    late_bytes: int


def _points(
    trace: Trace,
    memory: MemoryTimeline,
    lifetimes: StorageEvents,
    executions: Mapping[int, Sequence[Span]],
    position: Mapping[int, int],
    units: Sequence[GlobalUnit],
) -> tuple[PeakPoint, ...]:
    """The points in time order: at every boundary the recomputations that begin there, then the stretch after it."""
    changes: dict[int, list[tuple[int, int]]] = {0: []}
    boundary: list[tuple[int, int, int, int]] = []
    recomputations: dict[int, list[_Recomputation]] = {}
    for module, spans in executions.items():
        u = position[module]
        for span in spans:
            changes.setdefault(span.held_first, []).append((u, 1))
            changes.setdefault(span.active_first, []).append((u, -1))
            begun = _recomputation(trace.regions[span.region], memory, lifetimes, u, units[u])
            recomputations.setdefault(span.active_first, []).append(begun)
            if units[u].boundary_bytes:
                changes.setdefault(span.active_last, [])
                boundary.append((span.active_first, span.active_last, u, units[u].boundary_bytes))
    boundaries = sorted(event for event in changes if event < len(trace.events))  # a backward may end the step
    ends = [*boundaries[1:], len(trace.events)]
    peaks = memory.peaks_between(np.array(boundaries), np.maximum(np.array(ends), np.array(boundaries) + 1))
    points: list[PeakPoint] = []
    for start, end, peak in zip(boundaries, ends, peaks.tolist(), strict=True):
        deltas = tuple(changes[start])
        before = int(memory.live_bytes[max(start - 1, 0)])
        begins = recomputations.get(start, [])
        points += [
            PeakPoint(f"the recomputation of {units[r.unit].name}", before, (), ((r.unit, r.early_bytes),))
            for r in begins
        ]
        for r in begins:
            points.append(
                PeakPoint(f"the recomputation of {units[r.unit].name}", before, deltas, ((r.unit, r.late_bytes),))
            )
            deltas = ()
        report = memory.peak_event_between(start, max(end, start + 1))
        held = tuple((u, nbytes) for first, last, u, nbytes in boundary if first <= start < last)
        points.append(PeakPoint(_label(trace, memory, report), peak, deltas, held))
    return tuple(points)


# Events count as late if what they could take at the most is not much above the forward's own peak.
_LATE = 1.1


def _recomputation(
    region: Region, memory: MemoryTimeline, lifetimes: StorageEvents, unit: int, statistics: GlobalUnit
) -> _Recomputation:
    """See the module's docstring."""
    before = int(memory.live_bytes[max(region.first - 1, 0)])
    growth = memory.high_bytes[region.first : region.last] - before
    leaving = {*region.inputs, *region.outputs}
    later = np.zeros(region.last - region.first, dtype=np.int64)
    for call in region.calls:
        later[: call.first - region.first] += lifetimes.bytes_of([s for s in call.created if s not in leaving])
    highest = growth + later
    late = highest <= _LATE * max(int(growth.max()), statistics.implicit_bytes)
    early_bytes = int(growth[~late].max(initial=0))
    late_bytes = max(int(highest[late].max(initial=0)), int(growth.max())) - statistics.implicit_bytes
    return _Recomputation(unit, early_bytes, max(0, late_bytes) + statistics.boundary_bytes)


def _label(trace: Trace, memory: MemoryTimeline, event: int) -> str:
    from autosac.memory_sim.attribution import module_name, running_at

    running = running_at(memory, event)
    where = module_name(trace, running.module) or "the step"
    return f"{running.op or 'the beginning'} in the {running.phase.name.lower()} of {where}"

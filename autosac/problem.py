"""From a captured step to the global problem: candidate units, and the points of the step where memory could peak.

Every execution of a unit adds two boundaries to the step's timeline: the end of its forward, from where on checkpointing
changes what is held (n_pu rises), and the beginning of its backward (n_pu falls, see `autosac.spans`). Between two
boundaries nothing that the solver decides changes, so one point, the highest of the stretch, stands for it. At each
backward's beginning there is one more point for the recomputation: there the unit's forward runs again on top of what is
live, and takes

    e_u = max(0, growth_u - implicit_u)

more than the implicit storages that the un-checkpointed step holds there anyway; growth_u is the most by which memory
rose within the forward. Inputs that only checkpointing holds (`boundary`) stay to the end of the unit's backward.
Everything outside of the units (loss, logits, optimizer, FSDP) is in the timeline itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autosac.memory_sim import MemoryTimeline
from autosac.solvers import GlobalProblem, PeakPoint, Segment, Unit
from autosac.spans import Lifetimes, Span, region_spans
from autosac.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStatistics:
    """What the solver needs of a unit's operators (from the SACEstimator): see `autosac.solvers.Unit`."""

    stored_bytes: int
    discardable_bytes: int
    recompute_ms: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The global problem, and for each of its units the module's index and one of its regions (index in the trace)."""

    problem: GlobalProblem
    modules: tuple[int, ...]
    regions: tuple[int, ...]


def build_problem(
    trace: Trace,
    memory: MemoryTimeline,
    statistics: Mapping[int, UnitStatistics],
    allowed: Mapping[int, bool],
) -> PlanningProblem:
    """The global problem of a step that was captured without checkpointing and with its regions observed.

    `statistics` by region index: regions without are no candidates. `allowed` by module index.
    """
    lifetimes = Lifetimes(trace)
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
    points = _points(trace, memory, executions, position, units)
    return PlanningProblem(
        problem=GlobalProblem(units=units, points=points),
        modules=tuple(modules),
        regions=tuple(executions[module][0].region for module in modules),
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
    lifetimes: Lifetimes,
    spans: Sequence[Span],
    statistics: Mapping[int, UnitStatistics],
    parent: int,
    allowed: bool,
) -> Unit:
    first = statistics[spans[0].region]
    # Savings are promised by the execution that saves least.
    return Unit(
        name=trace.modules[trace.regions[spans[0].region].module],
        implicit_bytes=min(lifetimes.bytes_of(s.implicit) for s in spans),
        boundary_bytes=max(lifetimes.bytes_of(s.boundary) for s in spans),
        stored_bytes=first.stored_bytes,
        discardable_bytes=first.discardable_bytes,
        recompute_ms=first.recompute_ms,
        segments=first.segments,
        parent=parent,
        executions=len(spans),
        allowed=allowed,
    )


def _points(
    trace: Trace,
    memory: MemoryTimeline,
    executions: Mapping[int, Sequence[Span]],
    position: Mapping[int, int],
    units: Sequence[Unit],
) -> tuple[PeakPoint, ...]:
    """The points in time order: at every boundary the recomputations that begin there, then the stretch after it."""
    changes: dict[int, list[tuple[int, int]]] = {0: []}
    boundary: list[tuple[int, int, int, int]] = []
    recomputations: dict[int, list[tuple[int, int]]] = {}
    for module, spans in executions.items():
        u = position[module]
        for span in spans:
            changes.setdefault(span.held_first, []).append((u, 1))
            changes.setdefault(span.active_first, []).append((u, -1))
            region = trace.regions[span.region]
            growth = memory.peak_between(region.first, region.last) - int(memory.live_bytes[max(region.first - 1, 0)])
            extra = max(0, growth - units[u].implicit_bytes)
            recomputations.setdefault(span.active_first, []).append((u, extra + units[u].boundary_bytes))
            if units[u].boundary_bytes:
                changes.setdefault(span.active_last, [])
                boundary.append((span.active_first, span.active_last, u, units[u].boundary_bytes))
    boundaries = sorted(changes)
    ends = [*boundaries[1:], len(trace.events)]
    peaks = memory.peaks_between(np.array(boundaries), np.maximum(np.array(ends), np.array(boundaries) + 1))
    points = []
    for start, end, peak in zip(boundaries, ends, peaks.tolist(), strict=True):
        deltas = tuple(changes[start])
        for u, extra in recomputations.get(start, ()):
            before = int(memory.live_bytes[max(start - 1, 0)])
            points.append(PeakPoint(f"the recomputation of {units[u].name}", before, deltas, ((u, extra),)))
            deltas = ()
        report = memory.peak_event_between(start, max(end, start + 1))
        held = tuple((u, nbytes) for first, last, u, nbytes in boundary if first <= start < last)
        points.append(PeakPoint(_label(trace, memory, report), peak, deltas, held))
    return tuple(points)


def _label(trace: Trace, memory: MemoryTimeline, event: int) -> str:
    from autosac.memory_sim.attribution import module_name, running_at

    running = running_at(memory, event)
    where = module_name(trace, running.module) or "the step"
    return f"{running.op or 'the beginning'} in the {running.phase.name.lower()} of {where}"

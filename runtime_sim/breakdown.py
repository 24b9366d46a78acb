"""Where a step's time goes.

The step's window [0, makespan] of a rank is divided without overlap, in this order of precedence::

    compute                 a computation kernel runs
    exposed communication   else: bytes move
    exposed copies          else: a copy engine runs
    bubble                  else: a communication kernel waits for its peers, or others are not done yet
    host bound              else: nothing is on the device, so the host has not issued what would run next

so that these five add up to the step time. Each is a difference of lengths of unions of intervals (`_union`).

Modules share the same time: where several collectives move bytes at once, each of them gets an equal part of that time
(`_shares`), so that the modules' communication adds up to the step's, exposed or not, and their computation to the step's.

Recomputation: `recompute_ms` is the device time of everything in the RECOMPUTE phase. What it costs is a
difference of two simulations, the step and the step in which recomputation takes neither device nor host
time; what it does not cost, `hidden_recompute_ms`, hides behind communication, peers or the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.runtime_sim.execute import Problem, execute
from autosac.runtime_sim.program import Engine
from autosac.runtime_sim.ranks import RankTimeline
from autosac.trace import Collective, Op, Phase, Trace

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Device time of a module and all below it (ms); the root's is the step's, with what ran outside of all modules.

    `communication_ms`: while bytes move, divided evenly among collectives that move at the same time. `recompute_ms` counts
    every kernel in full.
    """

    name: str
    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    recompute_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One rank's step. See the module's docstring; `compute_ms` to `host_bound_ms` add up to `step_ms`.

    `communication_ms`: while bytes move, exposed or not. `optimizer_ms`: device time of its phase.
    `interference_ms`: by how much computation took longer than it is priced, because it shared the GPU with
    communication.
    """

    rank: int
    step_ms: float
    compute_ms: float
    exposed_communication_ms: float
    exposed_copy_ms: float
    bubble_ms: float
    host_bound_ms: float
    communication_ms: float
    recompute_ms: float
    hidden_recompute_ms: float
    optimizer_ms: float
    interference_ms: float
    modules: tuple[ModuleTimes, ...]


def breakdowns(problem: Problem, ranks: Sequence[RankTimeline], step_ms: float) -> tuple[Breakdown, ...]:
    """The breakdown of every rank, in a step that takes so long."""
    cost_ms = step_ms - _without_recomputation(problem, step_ms)
    priced = zip(ranks, problem.event_ms, strict=True)
    return tuple(_breakdown(rank, step_ms, priced_ms, cost_ms) for rank, priced_ms in priced)


def _phases(trace: Trace) -> NDArray[np.int8]:
    """The phase of every operator and collective, -1 for other events."""
    phases = [e.phase if type(e) is Op or type(e) is Collective else -1 for e in trace.events]
    return np.array(phases, dtype=np.int8)


def _without_recomputation(problem: Problem, makespan_ms: float) -> float:
    """The step time if the RECOMPUTE phase took no time."""
    masks = [_phases(trace) == Phase.RECOMPUTE for trace in problem.traces]
    if not any(mask.any() for mask in masks):
        return makespan_ms
    event_ms = tuple(np.where(m, 0.0, ms) for m, ms in zip(masks, problem.event_ms, strict=True))
    host_ms = tuple(np.where(m, 0.0, ms) for m, ms in zip(masks, problem.host_ms, strict=True))
    return execute(replace(problem, event_ms=event_ms, host_ms=host_ms)).makespan_ms


def _union(start: Times, end: Times) -> tuple[Times, Times]:
    """The union of intervals, as disjoint ones in order."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    if not start.size:
        return start, end
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], end[last]


def _length(*parts: tuple[Times, Times]) -> float:
    start, end = _union(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    return float((end - start).sum())


def _shares(start: Times, end: Times, without: tuple[Times, Times]) -> Times:
    """The length of each interval, where `n` of them overlap 1/n of it, and nothing within the union `without`."""
    points = np.unique(np.concatenate([start, end, *without]))
    if points.size < 2:
        return np.zeros_like(start)
    middle = (points[:-1] + points[1:]) / 2
    number = np.searchsorted(np.sort(start), middle) - np.searchsorted(np.sort(end), middle)
    counted = (number > 0) & (np.searchsorted(without[0], middle) == np.searchsorted(without[1], middle))
    parts = np.where(counted, np.diff(points) / np.maximum(number, 1), 0.0)
    passed = np.concatenate([[0.0], np.cumsum(parts)])
    return np.asarray(passed[np.searchsorted(points, end)] - passed[np.searchsorted(points, start)])


class StepParts(NamedTuple):
    """What a rank's step consists of, in milliseconds; they add up to it. See `Breakdown`."""

    compute_ms: float
    exposed_communication_ms: float
    exposed_copy_ms: float
    bubble_ms: float
    host_bound_ms: float


def step_parts(rank: RankTimeline, step_ms: float) -> StepParts:
    """The parts of a rank's step that takes so long: what is known without another simulation."""
    clipped = _clipped(step_ms)
    moving = rank.engine == Engine.COMMUNICATION
    copying = (rank.engine == Engine.HOST_TO_DEVICE) | (rank.engine == Engine.DEVICE_TO_HOST)
    compute = rank.engine == Engine.COMPUTE
    parts = [
        _union(*clipped(rank.start_ms[compute], rank.end_ms[compute])),
        clipped(rank.transfer_ms[moving], rank.end_ms[moving]),
        clipped(rank.start_ms[copying], rank.end_ms[copying]),
        clipped(rank.start_ms[moving], rank.transfer_ms[moving]),
        clipped(np.array([_finished(rank)]), np.array([step_ms])),
    ]
    lengths = [_length(*parts[: i + 1]) for i in range(len(parts))]
    return StepParts(
        compute_ms=lengths[0],
        exposed_communication_ms=lengths[1] - lengths[0],
        exposed_copy_ms=lengths[2] - lengths[1],
        bubble_ms=lengths[4] - lengths[2],
        host_bound_ms=step_ms - lengths[4],
    )


def _clipped(step_ms: float) -> Callable[[Times, Times], tuple[Times, Times]]:
    return lambda start, end: (np.clip(start, 0.0, step_ms), np.clip(end, 0.0, step_ms))


def _breakdown(rank: RankTimeline, step_ms: float, priced_ms: Times, recompute_cost_ms: float) -> Breakdown:
    compute, moving = rank.engine == Engine.COMPUTE, rank.engine == Engine.COMMUNICATION
    phases = _phases(rank.trace)
    device_ms = np.nan_to_num(rank.end_ms - np.where(moving, rank.transfer_ms, rank.start_ms))
    recompute_ms = float(device_ms[phases == Phase.RECOMPUTE].sum())
    return Breakdown(
        rank=rank.rank,
        step_ms=step_ms,
        **step_parts(rank, step_ms)._asdict(),
        communication_ms=_length(_clipped(step_ms)(rank.transfer_ms[moving], rank.end_ms[moving])),
        recompute_ms=recompute_ms,
        hidden_recompute_ms=min(max(0.0, recompute_ms - recompute_cost_ms), recompute_ms),
        optimizer_ms=float(device_ms[phases == Phase.OPTIMIZER].sum()),
        interference_ms=max(0.0, float((device_ms - priced_ms)[compute].sum())),
        modules=_modules(rank, device_ms, phases, step_ms),
    )


def _finished(rank: RankTimeline) -> float:
    """When this rank's device and host were done."""
    last = float(np.nanmax(rank.end_ms)) if np.isfinite(rank.end_ms).any() else 0.0
    return max(last, float(rank.host_end_ms[-1]))


def _modules(rank: RankTimeline, device_ms: Times, phases: NDArray[np.int8], step_ms: float) -> tuple[ModuleTimes, ...]:
    trace = rank.trace
    module = np.array([getattr(event, "module", -1) for event in trace.events])
    if trace.modules and not trace.modules[0]:
        module = np.maximum(module, 0)  # what runs outside of all modules is the root's
    known = (module >= 0) & (rank.engine >= 0)
    compute, moving = rank.engine == Engine.COMPUTE, rank.engine == Engine.COMMUNICATION
    begin = np.clip(np.where(moving, rank.transfer_ms, rank.start_ms), 0.0, step_ms)
    end = np.clip(rank.end_ms, 0.0, step_ms)
    nothing = np.empty(0), np.empty(0)
    computing = _union(begin[compute], end[compute])
    computed, moved, exposed = (np.zeros(len(trace.events)) for _ in range(3))
    computed[compute] = _shares(begin[compute], end[compute], nothing)
    moved[moving] = _shares(begin[moving], end[moving], nothing)
    exposed[moving] = _shares(begin[moving], end[moving], computing)
    columns = [computed, moved, exposed, np.where(phases == Phase.RECOMPUTE, device_ms, 0.0)]
    count = len(trace.modules)
    sums = np.stack([np.bincount(module[known], weights=c[known], minlength=count) for c in columns], axis=1)
    for i in sorted(range(count), key=lambda i: -_depth(trace, i)):
        parent = trace.module_parents[i]
        if parent >= 0:
            sums[parent] += sums[i]
    return tuple(
        ModuleTimes(
            name=name,
            compute_ms=float(row[0]),
            communication_ms=float(row[1]),
            exposed_communication_ms=float(row[2]),
            recompute_ms=float(row[3]),
        )
        for name, row in zip(trace.modules, sums, strict=True)
    )


def _depth(trace: Trace, module: int) -> int:
    depth = 0
    while trace.module_parents[module] >= 0:
        module = trace.module_parents[module]
        depth += 1
    return depth

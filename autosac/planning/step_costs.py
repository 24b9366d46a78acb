"""What recomputation costs the step: the marginal cost of every unit's, from simulated timelines.

A millisecond of recomputation costs the step a millisecond only where nothing else is waited for. Behind exposed
communication it is free until that is filled; where the host is behind, every operator costs what issuing it takes.

`StepCosts.step` executes the step that was captured without checkpointing with work added to it: at the beginning of
each execution's backward the device time of its recomputation (on the backward's first kernel) and the host's time to issue
it (after that kernel), and in its forward what a selective policy costs the host. Nothing is captured for it.

Added work divides the step into windows, from the place of one addition to that of the next. If window k is by d_k longer
than without them, then of the addition r_k at its beginning the part

    a_k = r_k - d_k

was absorbed: it ran while the compute stream would have waited. What exceeds r_k was the delay of an earlier addition, the
last one first (`_absorbed`). Summed over a unit's executions this is its `hidden_ms`: recomputation up to that is free. It is
first measured with everything recomputed, level by level of the module tree, and then at the plan that was found with it:
where a part of a unit's recomputation was not hidden, what was hidden is all that can be.

The host: `floor_ms` is what a selective policy costs beside its recomputation, by the step in which every unit keeps all of
its operators, shared out as the host's work is. A unit where that is not less than to recompute everything has nothing to
decide but whether it is checkpointed: recomputing all of it at once is `plain`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autosac.memory_sim.spans import Span
from autosac.planning.build_problem import PlanningProblem
from autosac.runtime_sim import Timeline
from autosac.runtime_sim.execute import Problem
from autosac.runtime_sim.host import PLANNED_MODES
from autosac.runtime_sim.program import Engine
from autosac.runtime_sim.timeline import timeline_of
from autosac.simulation import Simulation
from autosac.trace import Op

# A step that waits for less than this share of itself has nothing to hide recomputation behind.
_NOTICEABLE = 0.01
# Hidden time is rounded down to this share of a unit's recomputation, so that alike units stay alike for the solver.
_GRAIN = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What checkpointing one execution of a unit costs (ms): see above, and `solvers.GlobalUnit.cost_ms`.

    `plain_ms`: None, or what it costs if the unit is only worth checkpointing as a whole. `share`: what each millisecond of
    its recomputation counts for (`joint_prices`).
    """

    hidden_ms: float = 0.0
    floor_ms: float = 0.0
    plain_ms: float | None = None
    share: float = 1.0


class AddedWork(NamedTuple):
    """What a unit adds to each of its executions (ms): on the device in the backward, on the host in both."""

    device_ms: float = 0.0
    host_backward_ms: float = 0.0
    host_forward_ms: float = 0.0


class _Place(NamedTuple):
    """Where an execution's added work goes: the first kernels of forward and backward (events), -1 for none."""

    unit: int
    forward: int
    backward: int


class StepCosts:
    """The costs of one captured step's units, whose recomputation in all takes `recompute_ms` each and runs so many operators
    (`again`).
    """

    def __init__(
        self, base: Simulation, planning: PlanningProblem, recompute_ms: Sequence[float], again: Sequence[int]
    ) -> None:
        self._base = base
        self._planning = planning
        self._recompute_ms = recompute_ms
        self._again = again
        self._kernels = np.flatnonzero(base.timeline.ranks[base.stage].engine == Engine.COMPUTE)
        self._places = [self._place(u, span) for u, executions in enumerate(planning.executions) for span in executions]
        self._operators = [self._count(executions[0]) for executions in planning.executions]

    def _place(self, unit: int, span: Span) -> _Place:
        def first_kernel(event: int, last: int) -> int:
            i = int(np.searchsorted(self._kernels, event))
            return int(self._kernels[i]) if i < len(self._kernels) and self._kernels[i] < last else -1

        region = self._base.trace.regions[span.region]
        return _Place(unit, first_kernel(region.first, region.last), first_kernel(span.active_first, span.active_last))

    def _count(self, span: Span) -> tuple[int, int, float]:
        """Of an execution's forward: operators with kernels, views, and the host's time for all of it."""
        trace = self._base.trace
        region = trace.regions[span.region]
        views = [
            trace.signatures[e.signature].is_view for e in trace.events[region.first : region.last] if type(e) is Op
        ]
        host_ms = self._base.timeline.problem.host_ms[self._base.stage][region.first : region.last]
        return len(views) - sum(views), sum(views), float(host_ms.sum())

    def plain(self, unit: int) -> AddedWork:
        """Everything is recomputed, by plain checkpointing."""
        return self.added_work(unit, self._again[unit], self._recompute_ms[unit])

    def added_work(self, unit: int, again: int, recompute_ms: float) -> AddedWork:
        """A policy that runs so many operators again, in `recompute_ms`."""
        host = self._base.target.host
        kernels, views, again_ms = self._operators[unit]
        share = min(1.0, again / kernels) if kernels else 1.0
        backward_us = host.checkpoint_us + share * (kernels * host.recompute_op_us)
        forward_us = PLANNED_MODES * (kernels + views) * host.selective_op_us
        return AddedWork(recompute_ms, share * again_ms + backward_us / 1e3, forward_us / 1e3)

    def step(self, added: Mapping[int, AddedWork]) -> Timeline:
        """The step with this work added, by unit."""
        return timeline_of(self.adding(self._base.timeline.problem, added))

    def adding(self, problem: Problem, added: Mapping[int, AddedWork]) -> Problem:
        """What `step` executes: the problem with this work added to its rank."""
        base = self._base
        event_ms, host_ms = problem.event_ms[base.stage].copy(), problem.host_ms[base.stage].copy()
        last = len(host_ms) - 1
        for unit, forward, backward in self._places:
            work = added.get(unit)
            if work is not None and backward >= 0:
                event_ms[backward] += work.device_ms
                host_ms[min(backward + 1, last)] += work.host_backward_ms
                host_ms[min(forward + 1, last)] += work.host_forward_ms
        return replace(
            problem,
            event_ms=_with(problem.event_ms, base.stage, event_ms),
            host_ms=_with(problem.host_ms, base.stage, host_ms),
        )

    def shares(self, events: Collection[int]) -> tuple[float, ...]:
        """Of each unit's executions, the share whose added work is done at one of these events."""
        here, all_ = [0] * len(self._recompute_ms), [0] * len(self._recompute_ms)
        for unit, _, backward in self._places:
            all_[unit] += 1
            here[unit] += backward in events
        return tuple(found / count if count else 0.0 for found, count in zip(here, all_, strict=True))

    def initial(self) -> tuple[UnitCost, ...] | None:
        """The costs around a plan that recomputes everything; None if all recomputation costs its time and no more."""
        costs = [UnitCost()] * len(self._recompute_ms)
        for level in self._planning.problem.levels():
            plain = {u: self.plain(u) for u in level}
            keeping = {u: self.added_work(u, 0, 0.0) for u in level}
            floors = self._floors(keeping)
            if self._nothing_to_hide() and not any(floors.values()):
                continue
            grown = self.step(plain)
            hidden = self._absorbed(plain, grown)
            for u, floor in floors.items():
                plain_ms = self._recompute_ms[u] - hidden[u]
                if floor and floor >= max(plain_ms, 0.0):
                    costs[u] = UnitCost(plain_ms=max(plain_ms, 0.0))
                else:
                    costs[u] = UnitCost(hidden_ms=self._grained(u, hidden[u]), floor_ms=floor)
        return tuple(costs) if any(cost != UnitCost() for cost in costs) else None

    def refined(self, costs: Sequence[UnitCost], added: Mapping[int, AddedWork]) -> tuple[UnitCost, ...]:
        """The costs as the step with this work added shows them. What was not hidden there cannot be hidden."""
        hidden = self._absorbed(added, self.step(added))
        found = list(costs)
        for u, work in added.items():
            if costs[u].plain_ms is None and hidden[u] < work.device_ms * (1 - _GRAIN):
                found[u] = replace(costs[u], hidden_ms=self._grained(u, hidden[u]))
            elif costs[u].plain_ms is None:
                found[u] = replace(costs[u], hidden_ms=max(costs[u].hidden_ms, self._grained(u, hidden[u])))
        return tuple(found)

    def _grained(self, unit: int, hidden_ms: float) -> float:
        grain = self._recompute_ms[unit] * _GRAIN
        return grain * int(hidden_ms / grain + 1e-6) if grain > 0 and hidden_ms > 0 else 0.0

    def _nothing_to_hide(self) -> bool:
        """The compute stream hardly ever waits."""
        breakdown = self._base.breakdown
        return breakdown.step_ms - breakdown.compute_ms < _NOTICEABLE * breakdown.step_ms

    def _floors(self, keeping: Mapping[int, AddedWork]) -> dict[int, float]:
        """What this work, all of the host, cost the step for each execution of their units."""
        host_work_ms = {u: work.host_forward_ms + work.host_backward_ms for u, work in keeping.items()}
        step_ms = self._base.step_ms
        executions = self._planning.executions
        total_ms = sum(ms * len(executions[u]) for u, ms in host_work_ms.items())
        if self._late_ms(keeping) < _NOTICEABLE * step_ms:
            return dict.fromkeys(keeping, 0.0)
        grown_ms = self.step(keeping).makespan_ms - step_ms
        if grown_ms < _NOTICEABLE * step_ms:
            return dict.fromkeys(keeping, 0.0)
        return {u: grown_ms * ms / total_ms for u, ms in host_work_ms.items()}

    def _late_ms(self, added: Mapping[int, AddedWork]) -> float:
        """By how much the host is late with a launch, at the most, if it does this work and nothing waits for it: then no
        kernel begins later than that.
        """
        rank = self._base.timeline.ranks[self._base.stage]
        before = self._base.timeline.problem
        more_ms = self.adding(before, added).host_ms[self._base.stage] - before.host_ms[self._base.stage]
        launched = (rank.engine >= 0) & (rank.engine < Engine.HOST)
        late_ms = (rank.host_end_ms + np.cumsum(more_ms) - rank.start_ms)[launched]
        return float(late_ms.max(initial=0.0))

    def _absorbed(self, added: Mapping[int, AddedWork], grown: Timeline) -> dict[int, float]:
        """Per unit, how much of one execution's added work the step did not feel (negative: it felt more than that)."""
        before, after = self._base.timeline.ranks[self._base.stage], grown.ranks[self._base.stage]
        places = [p for p in self._places if p.unit in added and p.backward >= 0]
        places.sort(key=lambda place: float(before.start_ms[place.backward]))
        old = [float(before.start_ms[p.backward]) for p in places] + [self._base.step_ms]
        new = [float(after.start_ms[p.backward]) for p in places] + [grown.makespan_ms]
        absorbed = [
            added[p.unit].device_ms - ((new[k + 1] - new[k]) - (old[k + 1] - old[k])) for k, p in enumerate(places)
        ]
        for k in range(len(places) - 1, 0, -1):  # what exceeds an addition was the delay of those before it
            excess = absorbed[k] - added[places[k].unit].device_ms
            if excess > 0:
                absorbed[k] -= excess
                absorbed[k - 1] += excess
        found = dict.fromkeys(added, 0.0)
        for place, ms in zip(places, absorbed, strict=True):
            found[place.unit] += min(ms, added[place.unit].device_ms) / len(self._planning.executions[place.unit])
        return found


def _with(rows: tuple[np.ndarray, ...], position: int, row: np.ndarray) -> tuple[np.ndarray, ...]:
    return (*rows[:position], row, *rows[position + 1 :])

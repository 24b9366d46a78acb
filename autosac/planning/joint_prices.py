"""What the step of all pipeline stages pays for each unit's recomputation, and the least that it can be.

The step T of all stages is the length of the longest of many paths through their work, so it is a convex function of how
long each unit of each stage recomputes, t_u. Let r be plans of all stages, and w_u the share of unit u's E_u executions whose
backward lies on the longest path under r. Then for any other plans

    T(t) >= T(r) + sum_u w_u E_u (t_u - r_u)                                        (a)

What w_u leaves out is free: recomputation that hides in bubbles, behind other stages, or behind communication. So w_u is the
price at which a stage's problem is solved anew (`UnitCost.share`). Where several paths are about equally long, the plans that
are best for one of them are not for another: the mean of the prices under all plans so far then leads to plans that suit all
of them (fictitious play between the planner and whoever chooses the path). The mean of (a) over these plans is a bound, too,
and each stage's part of it has a least value by the joint linear program (`Planner.bounds`): that gives the least that T can
be.

The longest path is that of the step without checkpointing with the plans' work added to it (`StepCosts`): there each unit
has its place, checkpointed or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosac.planning.planner import Costs, Planner
from autosac.planning.step_costs import UnitCost
from autosac.plans import Plan
from autosac.runtime_sim.critical_path import device_time_on
from autosac.runtime_sim.timeline import timeline_of
from autosac.simulation import Pipeline

# A price below this is this: of plans that take equally long, one that recomputes less is better.
_LEAST_SHARE = 0.01
# In bounds: an operator without any time would be none that there is to keep.
_NEARLY_NOTHING = 1e-9
# Prices within one stage that differ by less than this lead to no other plan.
_UNIFORM = 0.02


@dataclass(frozen=True, kw_only=True)
class _Point:
    """Plans of all stages with their step, and by stage the prices of its units there (none where nothing is decided)."""

    plans: tuple[Plan, ...]
    step_ms: float
    shares: tuple[tuple[float, ...], ...]


class JointPrices:
    """Prices of the units of all stages in the `observed` step. `planners`: None for a stage that needs no checkpointing."""

    def __init__(self, observed: Pipeline, planners: Sequence[Planner | None]) -> None:
        self._planners = planners
        joined = observed.joined()
        self._timeline = joined[0].timeline
        self._costs = [
            None if planner is None else planner.costs_in(stage)
            for planner, stage in zip(planners, joined, strict=True)
        ]
        self._points: list[_Point] = []

    def add(self, plans: Sequence[Plan], step_ms: float) -> None:
        """Measure the prices under these plans of all stages, whose step is known."""
        problem = self._timeline.problem
        for planner, costs, plan in zip(self._planners, self._costs, plans, strict=True):
            if planner is not None and costs is not None:
                problem = costs.adding(problem, planner.added_work(plan))
        timeline = timeline_of(problem)
        path = timeline.critical_path()
        shares = tuple(
            () if costs is None else costs.shares(device_time_on(path, rank.rank).keys())
            for costs, rank in zip(self._costs, timeline.ranks, strict=True)
        )
        self._points.append(_Point(plans=tuple(plans), step_ms=step_ms, shares=shares))

    def costs(self, position: int) -> Costs | None:
        """The mean prices of a stage's units; None if they are all the same, which the stage by itself can do as well."""
        shares = self.shares(position)
        if not shares or max(shares) - min(shares) < _UNIFORM:
            return None
        return _as_costs(shares, _LEAST_SHARE)

    def shares(self, position: int) -> tuple[float, ...]:
        """Of each unit of a stage, the mean share of its executions that lie on the longest path."""
        columns = zip(*(point.shares[position] for point in self._points), strict=True)
        return tuple(math.fsum(column) / len(self._points) for column in columns)

    def least_ms(self, plans: Sequence[Plan]) -> float:
        """A lower bound of the step of all plans whose peaks, by the stages' problems, are not above those of these."""
        fixed_ms = math.fsum(self._fixed_ms(point) for point in self._points) / len(self._points)
        return fixed_ms + math.fsum(self._least_ms(position, plan) for position, plan in enumerate(plans))

    def _fixed_ms(self, point: _Point) -> float:
        """What of a point's step is no recomputation."""
        spent_ms = 0.0
        for planner, plan, shares in zip(self._planners, point.plans, point.shares, strict=True):
            if planner is not None and any(shares):
                spent_ms += planner.measured(plan, _as_costs(shares, _NEARLY_NOTHING))[0]
        return point.step_ms - spent_ms

    def _least_ms(self, position: int, plan: Plan) -> float:
        planner, shares = self._planners[position], self.shares(position)
        if planner is None or not any(shares):
            return 0.0
        return planner.bounds(plan, _as_costs(shares, _NEARLY_NOTHING))[1]


def _as_costs(shares: Sequence[float], least: float) -> Costs:
    return tuple(UnitCost(share=max(least, share)) for share in shares)

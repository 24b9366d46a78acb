"""Plans for given peaks: the global problem of one captured step, solved as often as asked (see `closed_loop`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from autosac.choices import CURVES, SOLVERS
from autosac.derivation.deriver import settings_of
from autosac.errors import UsageError
from autosac.planning.baseline_plans import is_a_plan, mirrored
from autosac.planning.build_problem import PlanningProblem, build_problem
from autosac.planning.relaxations import Relaxed, relaxations
from autosac.planning.step_costs import AddedWork, StepCosts, UnitCost
from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Binding, MadeFor, Plan, Reasons, Unit
from autosac.simulation import Simulation
from autosac.solvers import (
    CurveSegment,
    GlobalProblem,
    LocalItem,
    LocalProblem,
    LocalSolution,
    TwoLevelSolution,
    check_backend,
    joint_bound_ms,
    relative_gap,
    solve_two_level,
)

# The paper's, which decide as if all that is not kept ran again.
ADDITIVE = ("greedy", "knapsack")
OBJECTIVES = ("recompute", "step")
_MOST_SECONDS = 86_400.0
# Seconds of processor time in which the joint problem may find a better plan.
_POLISH_S = 2.0

Costs: TypeAlias = tuple[UnitCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked for. `utilisation` is the share of the budget from which on a verified plan is good enough.

    `curve`: the model of the units' trade-off curves in the global MILP (`autosac.estimator.sac_curves`).

    `objective`: the solver minimises the time of recomputation, or what the step pays for it. `offload`: activations
    may be offloaded to host memory where that makes the step shorter (`autosac.planning.offloading`),
    `chunk_loss`: the loss may be computed in chunks where that does (`autosac.planning.loss_chunks`; for whoever captures the
    job). Without `confirm` the step under the plan is derived and not captured: that is left to the caller. Without `changes`
    the search ends before single units of its best plan are changed (`autosac.planning.local_search`).
    """

    budget_bytes: int
    budget_kind: str = "reserved"
    solver: str = "pareto"
    curve: str = "staircase"
    milp: str = "cbc"
    time_limit_s: float = 30.0
    gap: float = 5e-3
    rounds: int = 8
    utilisation: float = 0.99
    objective: str = "step"
    offload: bool = False
    chunk_loss: bool = False
    confirm: bool = True
    changes: bool = True

    @property
    def target_bytes(self) -> int:
        """The verified peak to reach: between what is good enough and the budget."""
        return int(self.budget_bytes * (1 + self.utilisation) / 2)

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise UsageError("the budget must be more than zero")
        if self.budget_kind not in ("reserved", "active"):
            raise UsageError(f"budget kind {self.budget_kind!r}: expected 'reserved' or 'active'")
        if self.solver not in SOLVERS:
            raise UsageError(f"solver {self.solver!r}: expected one of {', '.join(SOLVERS)}")
        if self.curve not in CURVES:
            raise UsageError(f"curve {self.curve!r}: expected one of {', '.join(CURVES)}")
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective {self.objective!r}: expected one of {', '.join(OBJECTIVES)}")
        if not 0 < self.time_limit_s <= _MOST_SECONDS:
            raise UsageError(
                f"the time limit must be more than zero seconds and at most {_MOST_SECONDS:.0f}, not {self.time_limit_s:g}"
            )
        if not 0 <= self.gap < 1:
            raise UsageError(f"the gap must be at least 0 and less than 1, not {self.gap}")
        check_backend(self.milp)


def full_plan(base: Simulation, goal: Goal | None = None) -> Plan:
    """Full checkpointing: see `Planner.smallest`."""
    return Planner(base, goal or Goal(budget_bytes=1)).smallest()


def undecided(plan: Plan) -> Plan:
    """A plan that recomputes everything, without its decisions: what the compiler traces may be other operators than those
    that were observed.
    """
    return replace(plan, units=tuple(replace(unit, decisions=()) for unit in plan.units))


def plan_of(base: Simulation, goal: Goal, units: tuple[Unit, ...]) -> Plan:
    """A plan with these units, made for the captured job and the goal."""
    info = base.trace.info
    return Plan(
        made_for=MadeFor(
            job_fingerprint=info.job_fingerprint,
            model=info.model,
            torch_version=info.torch_version,
            torchtitan_version=info.torchtitan_version,
            gpu=base.target.hardware.name,
            world_size=info.world_size,
            budget_bytes=goal.budget_bytes,
            budget_kind="active" if goal.budget_kind == "active" else "reserved",
            pipeline_stages=info.parallelism.pp,
            job_settings=dict(info.job_settings),
            parameters=tuple(info.parameter_shapes.items()),
        ),
        units=units,
        settings=settings_of(info),
    )


class Planner:
    """Plans for inner budgets: the global problem of one captured step, solved as often as asked.

    Recomputation costs its time, or what `costs` say that the step pays for it (one for each unit, see `step_costs`).
    """

    def __init__(self, base: Simulation, goal: Goal, policies: UnitPolicies | None = None) -> None:
        self.base = base
        self.goal = goal
        self.policies = policies or UnitPolicies(base, curve=goal.curve)
        self._polish_s = _POLISH_S
        self.problem = self._problem(goal.solver in ADDITIVE)

    def _problem(self, additive: bool) -> PlanningProblem:
        statistics = self.policies.statistics(additive=additive)
        return build_problem(self.base.trace, self.base.memory, statistics, self.policies.allowed())

    def solve(
        self, inner_bytes: int, costs: Costs | None = None, *, level: bool = False
    ) -> tuple[Plan, TwoLevelSolution]:
        """The plan with the least cost of recomputation whose active peak, by the problem, is within `inner_bytes`; with
        `level` one in which equal units keep nearly the same. InfeasibleError if there is none.
        """
        goal = self.goal
        problem, items = self.priced(costs)
        solution = solve_two_level(
            problem,
            items,
            inner_bytes,
            local=goal.solver,
            solver=goal.milp,
            time_limit_s=goal.time_limit_s,
            gap=goal.gap,
            polish_s=self._polish_s,
            level=level,
        )
        if solution.unpolished:  # for another budget or other prices the same problem takes as long
            self._polish_s = 0.0
        return replace(self.plan(solution.kept), reasons=(self._reasons(solution, costs),)), solution

    def _reasons(self, solution: TwoLevelSolution, costs: Costs | None) -> Reasons:
        budgets, points = solution.budgets, self.problem.problem.points
        binding = zip(budgets.binding, budgets.binding_ms_per_gib, strict=True)
        return Reasons(
            objective="recompute" if costs is None else "step",
            method="joint milp" if solution.polished else solution.method + ", levelled" * solution.level,
            ms_per_gib=max(0.0, budgets.shadow_ms_per_gib),
            binding=tuple(Binding(points[p].label, price_ms) for p, price_ms in binding),
        )

    def plan(self, kept: Sequence[tuple[int, ...] | None]) -> Plan:
        """The plan that keeps these items of each unit (None: not checkpointed)."""
        pairs = zip(self.problem.modules, kept, strict=True)
        chosen = (self.policies.of_module(module).keeping(items) for module, items in pairs if items is not None)
        return plan_of(self.base, self.goal, tuple(chosen))

    def gap(self, plan: Plan, costs: Costs | None = None) -> float:
        """By how much a plan is above the least possible at its own peak, at the most (0.01: 1 %).

        Its recomputation, or with `costs` the step with what it pays for that. The reference is the relaxation of the joint
        problem over all operators of all units.
        """
        spent_ms, bound_ms = self.bounds(plan, costs)
        fixed_ms = 0.0 if costs is None else self.base.step_ms
        return relative_gap(fixed_ms + spent_ms, fixed_ms + bound_ms)

    def bounds(self, plan: Plan, costs: Costs | None = None) -> tuple[float, float]:
        """What a plan recomputes, or what the step pays for it, and the least possible at the plan's own peak (ms)."""
        problem, items = self.reference(costs)
        spent_ms, peak_bytes = self.measured(plan, costs)
        # A little more than the peak, for the solver's tolerances: the bound stays one.
        limit = peak_bytes + peak_bytes // 10**6 + 4096
        return spent_ms, joint_bound_ms(problem, items, limit, solver=self.goal.milp)

    @cached_property
    def _reference(self) -> PlanningProblem:
        """The problem with what really runs again, whatever the local solver takes for it."""
        return self._problem(False) if self.goal.solver in ADDITIVE else self.problem

    def measured(self, plan: Plan, costs: Costs | None = None) -> tuple[float, int]:
        """The recomputation (ms), or what the step pays for it, and the highest peak (bytes) of any plan, as the problem
        counts them.
        """
        problem = self.reference(costs)[0]
        units = {unit.fqn: unit for unit in plan.units}
        chosen = [units.get(unit.name) for unit in problem.units]
        # Plain checkpointing holds less than any policy can: it is counted as the policy that keeps only what must be.
        pairs = list(zip(chosen, problem.units, strict=True))
        kept = [None if unit is None else max(unit.kept_bytes, known.stored_bytes) for unit, known in pairs]
        spent_ms = math.fsum(
            known.cost_ms(cost.share * unit.recompute_ms if cost.plain_ms is None else cost.plain_ms)
            for (unit, known), cost in zip(pairs, costs or (UnitCost(),) * len(pairs), strict=True)
            if unit is not None
        )
        return spent_ms, int(problem.peaks_bytes(kept).max())

    def policies_of(self, plan: Plan, costs: Costs | None = None) -> tuple[LocalSolution | None, ...] | None:
        """What a plan does in each of the global problem's units (None: not checkpointed), as `reference` counts it; None if
        it is no plan of these.
        """
        units = {unit.fqn: unit for unit in plan.units}
        found: list[LocalSolution | None] = []
        for module, problem in zip(self.problem.modules, self.reference(costs)[1], strict=True):
            policy = self.policies.of_module(module)
            unit = units.pop(policy.name, None)
            found.append(None if unit is None else problem.keeping(policy.kept_items(unit.decisions)))
        return None if units else tuple(found)

    def reference(self, costs: Costs | None = None) -> tuple[GlobalProblem, list[LocalProblem]]:
        """As `priced`, by what really runs again whatever the local solver takes for it."""
        return self._priced(self._reference, costs, additive=False)

    def priced(self, costs: Costs | None = None) -> tuple[GlobalProblem, list[LocalProblem]]:
        """The global problem and its units' items, whose times are what the step pays."""
        return self._priced(self.problem, costs, additive=self.goal.solver in ADDITIVE)

    def _priced(
        self, planning: PlanningProblem, costs: Costs | None, *, additive: bool
    ) -> tuple[GlobalProblem, list[LocalProblem]]:
        problem = planning.problem
        items = [self.policies.of_module(module).problem(additive=additive) for module in planning.modules]
        if costs is None:
            return problem, items
        units = list(problem.units)
        for u, cost in enumerate(costs):
            if cost.share != 1.0:
                items[u] = _scaled(items[u], cost.share)
                units[u] = replace(units[u], recompute_ms=cost.share * units[u].recompute_ms)
            if cost.plain_ms is None:
                units[u] = units[u].paying(cost.hidden_ms, cost.floor_ms)
            else:
                items[u] = _all_or_none(items[u], cost.plain_ms)
                units[u] = replace(
                    units[u],
                    stored_bytes=items[u].stored_bytes,
                    discardable_bytes=0,
                    recompute_ms=cost.plain_ms,
                    segments=(CurveSegment(0.0, 1.0),),
                )
        return replace(problem, units=tuple(units)), items

    @cached_property
    def _step_costs(self) -> StepCosts:
        return self.costs_in(self.base)

    def costs_in(self, base: Simulation) -> StepCosts:
        """The costs of the units in the planned step, or in that of a pipeline that it is a stage of."""
        recompute_ms = [unit.recompute_ms for unit in self.problem.problem.units]
        again = [len(self.policies.of_module(module).operators_again(())) for module in self.problem.modules]
        return StepCosts(base, self.problem, recompute_ms, again)

    def costs(self) -> Costs | None:
        """What the step pays for recomputation; None if that is its time everywhere, or is not known (the job is compiled,
        the captured step is not).
        """
        if self.base.trace.info.compiled:
            return None
        return self._step_costs.initial()

    def refined(self, costs: Costs, plan: Plan) -> Costs:
        """The costs as the step under a plan shows them."""
        return self._step_costs.refined(costs, self.added_work(plan))

    def added_work(self, plan: Plan) -> dict[int, AddedWork]:
        """What a plan adds to the captured step, by unit."""
        position = {unit.name: u for u, unit in enumerate(self.problem.problem.units)}
        added = {}
        for unit in plan.units:
            u = position[unit.fqn]
            again = len(self.policies.of_module(self.problem.modules[u]).operators_again(unit.decisions))
            added[u] = self._step_costs.added_work(u, again, unit.recompute_ms)
        return added

    def smallest(self) -> Plan:
        """The plan with the least memory of those that recompute everything in all units of one level of the module tree.

        Not always the outermost: to recompute a whole network at once takes as much as never to have checkpointed it.
        """
        chosen = min(self.problem.problem.levels(), key=self._peak_bytes, default=[])
        policies = (self.policies.of_module(self.problem.modules[u]) for u in chosen)
        return plan_of(self.base, self.goal, tuple(policy.recompute_all() for policy in policies))

    def relaxations(self, plan: Plan) -> Iterator[list[Relaxed]]:
        """Sequences of plans that recompute less and less in single modules."""
        return relaxations(self.policies, plan)

    def mirror(self, baseline: Simulation) -> Plan:
        """The plan that does what the job does under a baseline; without units if no plan can."""
        return plan_of(self.base, self.goal, mirrored(self.policies, baseline.trace))

    def own(self, name: str, baseline: Simulation) -> Plan | None:
        """The plan that is the job's own checkpointing, as TorchTitan does it; None if that may not be a plan."""
        if not is_a_plan(self.policies, name, baseline.trace):
            return None
        plan = plan_of(self.base, self.goal, ())
        return replace(plan, settings=replace(plan.settings, job_checkpointing="full"))

    def _peak_bytes(self, chosen: list[int]) -> int:
        """The peak if these units keep only what they must."""
        problem = self.problem.problem
        wanted = set(chosen)
        kept = [unit.stored_bytes if u in wanted else None for u, unit in enumerate(problem.units)]
        return int(problem.peaks_bytes(kept).max())


def _scaled(local: LocalProblem, share: float) -> LocalProblem:
    """The items, of which each millisecond counts for `share`."""
    items = tuple(item._replace(recompute_ms=share * item.recompute_ms) for item in local.items)
    if local.closure is None:
        return LocalProblem(items=items)
    operators = tuple(o._replace(recompute_ms=share * o.recompute_ms) for o in local.closure.operators)
    return LocalProblem(items=items, closure=replace(local.closure, operators=operators))


def _all_or_none(local: LocalProblem, plain_ms: float) -> LocalProblem:
    """The items of a unit in which nothing is gained by keeping what may be recomputed."""
    items = tuple(item._replace(recompute_ms=0.0) for item in local.items)
    return LocalProblem(items=(*items, LocalItem(0, plain_ms, False)))

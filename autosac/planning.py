"""The closed loop: from a captured step to a plan that has been simulated under itself.

1. Simulate the step without checkpointing. If it fits the budget there is nothing to do.
2. Statistics of every unit's operators (`autosac.policies`), the global problem (`autosac.problem`).
3. Global MILP: which units, and how many bytes each may keep; then a local policy for each (`autosac.policies`).
4. Capture the step again under that plan and simulate it. The model that the MILP solves bounds *active* memory from the
   un-checkpointed step; what the budget bounds is the simulated peak of the planned step, reserved by default. So the
   MILP's own budget is moved by what the two differ, until the verified peak uses the budget and does not exceed it
   (`_Search`): a bracket of the largest inner budget that fitted and the smallest that did not.
5. Of all verified plans that fit, the one with the shortest simulated step is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from autosac.errors import InfeasibleError, UsageError
from autosac.plans import MadeFor, Plan, Settings, Unit
from autosac.policies import UnitPolicies
from autosac.problem import build_problem
from autosac.quantities import format_bytes
from autosac.simulation import Simulation
from autosac.solvers import TwoLevelSolution, relative_gap, solve_two_level

SOLVERS = ("greedy", "knapsack", "ilp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked for. `utilisation` is the share of the budget from which on a verified plan is good enough."""

    budget_bytes: int
    budget_kind: str = "reserved"
    solver: str = "knapsack"
    milp: str = "cbc"
    time_limit_s: float = 30.0
    gap: float = 5e-3
    rounds: int = 6
    utilisation: float = 0.98

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise UsageError("the budget must be more than zero")
        if self.budget_kind not in ("reserved", "active"):
            raise UsageError(f"budget kind {self.budget_kind!r}: expected 'reserved' or 'active'")
        if self.solver not in SOLVERS:
            raise UsageError(f"solver {self.solver!r}: expected one of {', '.join(SOLVERS)}")
        if self.time_limit_s <= 0:
            raise UsageError("the time limit must be more than zero seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A verified plan, its simulation, and what is worth telling."""

    plan: Plan
    simulation: Simulation
    notes: tuple[str, ...] = ()


class Captures(Protocol):
    """The captures that planning needs."""

    def observed(self) -> Simulation:
        """The step without checkpointing, the regions of all candidates observed."""

    def baselines(self) -> Mapping[str, Simulation]:
        """The step under the policies that the plan is shown beside, by name; "none" is among them."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""


def make_plan(captures: Captures, goal: Goal, progress: Callable[[str], None] = lambda _: None) -> Planned:
    """The verified plan for a goal. InfeasibleError if there is none; it says the smallest budget that would do."""
    base = captures.observed()
    progress("simulating the step without checkpointing")
    baselines = captures.baselines()
    if base.peak_bytes(goal.budget_kind) <= goal.budget_bytes:
        best = _Candidate(_plan_of(base, goal, ()), base)
        notes: tuple[str, ...] = ("the step fits the budget without any checkpointing",)
    else:
        search = _Search(captures, base, goal, progress)
        search.run()
        if "full" in baselines:
            search.compete(baselines["full"])
        best = search.best()
        notes = search.notes(best)
    predictions = {"autosac": best.simulation.prediction()}
    predictions |= {name: simulation.prediction() for name, simulation in baselines.items()}
    return Planned(plan=replace(best.plan, predictions=predictions), simulation=best.simulation, notes=notes)


def full_plan(base: Simulation, goal: Goal | None = None, policies: UnitPolicies | None = None) -> Plan:
    """Everything of every outermost module that may be checkpointed is recomputed."""
    policies = policies or UnitPolicies(base)
    outermost = [
        policy for policy in policies.units if not any(policies.is_inside(policy, other) for other in policies.units)
    ]
    return _plan_of(base, goal or Goal(budget_bytes=1), tuple(policy.recompute_all() for policy in outermost))


def _plan_of(base: Simulation, goal: Goal, units: tuple[Unit, ...]) -> Plan:
    info = base.trace.info
    degrees = info.get("parallelism") or {}
    return Plan(
        made_for=MadeFor(
            job_fingerprint=str(info.get("job_fingerprint", "")),
            model=str(info.get("model", "")),
            torch_version=str(info.get("torch_version", "")),
            torchtitan_version=str(info.get("torchtitan_version", "")),
            gpu=base.target.hardware.name,
            world_size=int(info.get("world_size", 1)),
            budget_bytes=goal.budget_bytes,
            budget_kind=goal.budget_kind,
            pipeline_stages=int(degrees.get("pp", 1)),
            job_settings=dict(info.get("job_settings", {})),
            parameters=tuple((name, tuple(shape)) for name, shape in info.get("parameter_shapes", {}).items()),
        ),
        units=units,
        settings=Settings(
            preserve_rng_state=bool(info.get("preserve_rng_state", True)), early_stop=bool(info.get("early_stop", True))
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=False)
class _Candidate:
    """A plan and the step simulated under it."""

    plan: Plan
    simulation: Simulation


class Planner:
    """Plans for inner budgets: the global problem of one captured step, solved as often as asked."""

    def __init__(self, base: Simulation, goal: Goal) -> None:
        self.base = base
        self.goal = goal
        self.policies = UnitPolicies(base)
        self.problem = build_problem(base.trace, base.memory, self.policies.statistics(), self.policies.allowed())

    def solve(self, inner_bytes: int) -> tuple[Plan, TwoLevelSolution]:
        """The plan with the least recomputation whose active peak, by the problem, is within `inner_bytes`.

        InfeasibleError if there is none.
        """
        goal = self.goal
        solution = solve_two_level(
            self.problem.problem,
            [self.policies.of_module(module).sac.problem for module in self.problem.modules],
            inner_bytes,
            local=goal.solver,
            solver=goal.milp,
            time_limit_s=goal.time_limit_s,
            gap=goal.gap,
        )
        chosen = [
            self.policies.of_module(module).unit(policy)
            for module, policy in zip(self.problem.modules, solution.policies, strict=True)
            if policy is not None
        ]
        return _plan_of(self.base, self.goal, tuple(chosen)), solution

    def smallest(self) -> Plan:
        """The plan with the least memory: everything of every outermost unit is recomputed."""
        return full_plan(self.base, self.goal, self.policies)


class _Search:
    """Finds the inner budget of the MILP at which the verified peak just fits."""

    def __init__(self, captures: Captures, base: Simulation, goal: Goal, progress: Callable[[str], None]) -> None:
        self.captures = captures
        self.base = base
        self.goal = goal
        self.progress = progress
        self.planner = Planner(base, goal)
        self.tried: list[_Candidate] = []
        self.solution: TwoLevelSolution | None = None

    def run(self) -> None:
        """Verify plans for inner budgets until one uses the budget."""
        goal = self.goal
        aim = int(goal.budget_bytes * (1 + goal.utilisation) / 2)
        inner = aim - max(0, self.base.peak_bytes(goal.budget_kind) - self.base.peak_active_bytes)
        fitted, exceeded = 0, max(self.base.peak_active_bytes, goal.budget_bytes)
        seen: set[str] = set()
        for number in range(1, goal.rounds + 1):
            self.progress(f"round {number}: solving for {format_bytes(inner)} of active memory")
            candidate = self._candidate(inner, first=number == 1)
            if candidate is None:  # the solver has nothing for so little: what does not exceed lies above
                fitted = max(fitted, inner)
                inner = (fitted + exceeded) // 2
                continue
            if candidate.hash() in seen:
                break
            seen.add(candidate.hash())
            peak = self._verify(candidate, number)
            if peak <= goal.budget_bytes:
                fitted = max(fitted, inner)
                if peak >= goal.utilisation * goal.budget_bytes or self.tried[-1].simulation.recompute_ms == 0:
                    break
            else:
                exceeded = min(exceeded, inner)
            wanted = inner + aim - peak
            inner = wanted if fitted < wanted < exceeded else (fitted + exceeded) // 2
            if exceeded - fitted < 2**20:
                break

    def _candidate(self, inner: int, *, first: bool) -> Plan | None:
        try:
            plan, self.solution = self.planner.solve(inner)
        except InfeasibleError:
            return self.planner.smallest() if first else None
        return plan

    def _verify(self, plan: Plan, number: int) -> int:
        self.progress(f"round {number}: capturing the step under the plan")
        simulation = self.captures.under(plan)
        self.tried.append(_Candidate(plan, simulation))
        return simulation.peak_bytes(self.goal.budget_kind)

    def compete(self, full: Simulation) -> None:
        """Full checkpointing costs the host nothing per operator: where that counts, it may be the better plan."""
        limit = self.goal.budget_bytes
        fitting = [c.simulation.step_ms for c in self.tried if c.simulation.peak_bytes(self.goal.budget_kind) <= limit]
        if full.peak_bytes(self.goal.budget_kind) <= limit and full.step_ms < min(fitting, default=float("inf")):
            self._verify(self.planner.smallest(), len(self.tried) + 1)

    def best(self) -> _Candidate:
        """The fastest verified plan that fits. InfeasibleError."""
        goal = self.goal
        fitting = [c for c in self.tried if c.simulation.peak_bytes(goal.budget_kind) <= goal.budget_bytes]
        if not fitting:
            raise self._infeasible()
        return min(fitting, key=lambda c: (c.simulation.step_ms, c.simulation.peak_bytes(goal.budget_kind)))

    def _infeasible(self) -> InfeasibleError:
        """What the smallest budget would be: the verified peak of the plan with the least memory."""
        kind = self.goal.budget_kind
        smallest = self.planner.smallest()
        known = [c.simulation for c in self.tried if c.plan.hash() == smallest.hash()]
        simulation = known[0] if known else self.captures.under(smallest)
        peaks = [c.simulation.peak_bytes(kind) for c in self.tried]
        least = min([simulation.peak_bytes(kind), *peaks])
        report = simulation.memory.peak()
        return InfeasibleError(
            f"no plan meets {format_bytes(self.goal.budget_bytes)} {kind}: the smallest budget that would do is "
            f"{format_bytes(least)}; with all recomputed the peak is at {report.op or 'the start'} in the "
            f"{report.phase.name.lower()} of {report.module or 'the step'}"
        )

    def notes(self, best: _Candidate) -> tuple[str, ...]:
        """What is worth telling of the plan."""
        kind, budget = self.goal.budget_kind, self.goal.budget_bytes
        peak = best.simulation.peak_bytes(kind)
        report = best.simulation.memory.peak()
        found = [
            f"the verified peak uses {peak / budget:.1%} of the budget; {len(self.tried)} plans were simulated",
            f"the peak is at {report.op} in the {report.phase.name.lower()} of {report.module or 'the step'}",
        ]
        if self.solution is not None:
            gap = relative_gap(self.solution.recompute_ms, self.solution.budgets.bound_ms)
            found.append(f"recomputation is at most {gap:.1%} above the least possible at this peak (linear bound)")
            if self.solution.budgets.shadow_ms_per_gib > 0:
                price_ms = self.solution.budgets.shadow_ms_per_gib
                found.append(f"1 GiB more would save about {price_ms:.1f} ms of recomputation")
        return tuple(found + list(self.planner.policies.refusals))

"""Planners of the harness: they count what solving takes; one of them decides by the joint MILP, one is PyTorch's own.

What a policy takes to generate has three parts (`Effort`): statistics and the problem, once for a configuration; solving,
once for every inner budget that the closed loop tries; verifying, the captures and simulations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autosac.bench import pytorch_tools
from autosac.bench.policies import JOINT, TOOLS, Policy
from autosac.bench.subjects import Subject
from autosac.errors import InfeasibleError
from autosac.planning.candidates import Bracket, Candidate, Candidates
from autosac.planning.closed_loop import derivation_for, find_verified
from autosac.planning.planner import Costs, Goal, Planner, plan_of
from autosac.planning.search import Search
from autosac.plans import Plan
from autosac.simulation import Simulation
from autosac.solvers import GlobalSolution, TwoLevelSolution, solve_joint


class Effort(NamedTuple):
    """What generating a policy took. `problem_s`: None where problem, solving and verifying were not told apart."""

    problem_s: float | None
    solve_s: float
    solves: int
    verify_s: float
    captures: int

    @property
    def policy_s(self) -> float | None:
        """Problem and solving."""
        return None if self.problem_s is None else self.problem_s + self.solve_s


class TimedPlanner(Planner):
    """Counts solving."""

    def __init__(self, base: Simulation, goal: Goal) -> None:
        began = time.perf_counter()
        super().__init__(base, goal)
        self.problem_s = time.perf_counter() - began
        self.solve_s = 0.0
        self.solves = 0

    def solve(
        self, inner_bytes: int, costs: Costs | None = None, *, level: bool = False
    ) -> tuple[Plan, TwoLevelSolution]:
        """See `Planner.solve`."""
        began = time.perf_counter()
        try:
            return self._solve(inner_bytes, costs, level)
        finally:
            self.solve_s += time.perf_counter() - began
            self.solves += 1

    def _solve(self, inner_bytes: int, costs: Costs | None, level: bool) -> tuple[Plan, TwoLevelSolution]:
        return super().solve(inner_bytes, costs, level=level)


class JointPlanner(TimedPlanner):
    """Decides every operator of every unit in one MILP, of equal units nothing in common."""

    def _solve(self, inner_bytes: int, costs: Costs | None, level: bool) -> tuple[Plan, TwoLevelSolution]:
        goal = self.goal
        problem, items = self.priced(costs)
        joint = solve_joint(
            problem, items, inner_bytes, solver=goal.milp, time_limit_s=goal.time_limit_s, gap=goal.gap / 5
        )
        policies = tuple(
            None if kept is None else local.solution(kept) for local, kept in zip(items, joint.kept, strict=True)
        )
        budgets = GlobalSolution(
            discard_fraction=tuple(None if kept is None else 0.0 for kept in joint.kept),
            kept_bytes=joint.kept_bytes,
            peak_bytes=joint.peak_bytes,
            recompute_ms=joint.recompute_ms,
            bound_ms=joint.bound_ms,
            binding=(),
            shadow_ms_per_gib=0.0,
        )
        solution = TwoLevelSolution(
            policies=policies,
            peak_bytes=joint.peak_bytes,
            recompute_ms=joint.recompute_ms,
            budgets=budgets,
            polished=True,
        )
        return self.plan(joint.kept), solution


@dataclass(frozen=True, kw_only=True)
class Found:
    """A verified plan, what it took, and by which fraction its recomputation is above the joint problem's bound, at most."""

    best: Candidate
    effort: Effort
    gap: float | None = None


def find_plan(subject: Subject, policy: Policy, goal: Goal, progress: Callable[[str], None] = lambda _: None) -> Found:
    """The verified plan of a policy that is found for a budget. InfeasibleError, SimulationError, CaptureError."""
    if subject.compiled or subject.stages > 1:
        return _as_planned(subject, policy, goal, progress)
    base = subject.observed()
    if base.peak_bytes(goal.budget_kind) <= goal.budget_bytes:
        return Found(best=Candidate(plan=plan_of(base, goal, ()), simulation=base), effort=Effort(0.0, 0.0, 0, 0.0, 0))
    if policy.name == TOOLS:
        return _by_pytorch(subject, goal, progress)
    began = time.perf_counter()
    planner = (JointPlanner if policy.name == JOINT else TimedPlanner)(base, goal)
    derivation = derivation_for(subject, planner)
    search = Search(derivation, planner, progress)
    best = find_verified(search, derivation, goal, subject.baselines(), progress)
    total_s = time.perf_counter() - began
    effort = Effort(
        planner.problem_s,
        planner.solve_s,
        planner.solves,
        total_s - planner.problem_s - planner.solve_s,
        len(search.verified),
    )
    return Found(best=best, effort=effort, gap=search.gap(best) if best.plan.units else None)


def _as_planned(subject: Subject, policy: Policy, goal: Goal, progress: Callable[[str], None]) -> Found:
    """The plan of `autosac plan` with the policy's solver, of a step that no single problem of operators describes."""
    if policy.name in (JOINT, TOOLS):
        of = "compiled steps" if subject.compiled else "several pipeline stages"
        raise InfeasibleError(f"{policy.name} makes no plans of {of}")
    began = time.perf_counter()
    planned = subject.planned(goal, progress)
    effort = Effort(None, 0.0, 0, time.perf_counter() - began, 1)
    return Found(best=Candidate(plan=planned.plan, simulation=planned.simulation), effort=effort)


def _by_pytorch(subject: Subject, goal: Goal, progress: Callable[[str], None]) -> Found:
    """The fastest plan of PyTorch's planner that fits when simulated, of those for a few budgets of active memory."""
    planner = TimedPlanner(subject.observed(), goal)
    derivation = derivation_for(subject, planner)
    candidates = Candidates(derivation, progress, "simulating the step under a plan of torch.distributed._tools")
    bracket = Bracket(goal.budget_bytes, goal.budget_bytes, goal.target_bytes)
    solve_s = verify_s = 0.0
    solves = 0
    while solves < goal.rounds:
        began = time.perf_counter()
        plan = _unless_infeasible(planner, bracket.inner)
        solve_s += time.perf_counter() - began
        solves += 1
        if plan is None:
            bracket.unsolved()
            continue
        began = time.perf_counter()
        candidate = candidates.verify(plan)
        verify_s += time.perf_counter() - began
        if candidate.fits(goal) and candidate.uses(goal):
            break
        bracket.verified(candidate, goal)
    fitting = [candidate for candidate in candidates.verified if candidate.fits(goal)]
    if not fitting:
        raise InfeasibleError("torch.distributed._tools has no plan that fits the budget when simulated")
    best = min(fitting, key=lambda candidate: candidate.simulation.step_ms)
    effort = Effort(planner.problem_s, solve_s, solves, verify_s, len(candidates.verified))
    return Found(best=best, effort=effort, gap=planner.gap(best.plan) if best.plan.units else None)


def _unless_infeasible(planner: Planner, inner_bytes: int) -> Plan | None:
    try:
        return pytorch_tools.plan_within(planner, inner_bytes)
    except InfeasibleError:
        return None

"""The search for the inner budget of the MILP at which a plan's verified peak just fits (see `autosac.planning`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autosac.errors import InfeasibleError
from autosac.planner import Goal, Planner
from autosac.plans import Plan
from autosac.quantities import format_bytes
from autosac.simulation import Simulation
from autosac.solvers import TwoLevelSolution

# A bracket of inner budgets narrower than this is not worth another capture.
_NARROW_BYTES = 2**20


class Verifier(Protocol):
    """Captures and simulates the step under a plan."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, the step simulated under it, and the solution that it came from (None: from no solver)."""

    plan: Plan
    simulation: Simulation
    solution: TwoLevelSolution | None = None

    def fits(self, goal: Goal) -> bool:
        """The verified peak is within the goal's budget."""
        return self.simulation.peak_bytes(goal.budget_kind) <= goal.budget_bytes


class Search:
    """Verifies plans of one planner for one budget after the other; what was verified counts for every budget."""

    def __init__(self, verifier: Verifier, planner: Planner, progress: Callable[[str], None]) -> None:
        self._verifier = verifier
        self._planner = planner
        self._progress = progress
        base, kind = planner.base, planner.goal.budget_kind
        # By how much the verified peak lies above what the problem promises; corrected by each verification.
        self._excess_bytes = max(0, base.peak_bytes(kind) - base.peak_active_bytes)
        self.verified: list[Candidate] = []

    def run(self, goal: Goal) -> Candidate:
        """The fastest verified plan that fits. InfeasibleError says the smallest budget that would do."""
        aim = int(goal.budget_bytes * (1 + goal.utilisation) / 2)
        base = self._planner.base
        fitted, exceeded = 0, max(base.peak_active_bytes, goal.budget_bytes)
        inner = aim - self._excess_bytes
        for _ in range(goal.rounds):
            self._progress(f"solving for {format_bytes(inner)} of active memory")
            candidate = self._candidate(inner)
            if candidate is None:  # the solver has nothing for so little: what does not exceed lies above
                fitted = max(fitted, inner)
                inner = (fitted + exceeded) // 2
                if not self.verified:
                    self._verify(self._planner.smallest())
                continue
            peak = candidate.simulation.peak_bytes(goal.budget_kind)
            self._excess_bytes = peak - inner
            if candidate.fits(goal):
                fitted = max(fitted, inner)
                if peak >= goal.utilisation * goal.budget_bytes or candidate.simulation.recompute_ms == 0:
                    break
            else:
                exceeded = min(exceeded, inner)
            wanted = aim - self._excess_bytes
            inner = wanted if fitted < wanted < exceeded else (fitted + exceeded) // 2
            if exceeded - fitted < _NARROW_BYTES:
                break
        return self.best(goal)

    def compete(self, goal: Goal, full: Simulation) -> None:
        """Full checkpointing costs the host nothing per operator: where that counts, it may be the better plan."""
        fastest = min((c.simulation.step_ms for c in self.verified if c.fits(goal)), default=float("inf"))
        if full.peak_bytes(goal.budget_kind) <= goal.budget_bytes and full.step_ms < fastest:
            self._verify(self._planner.smallest())

    def best(self, goal: Goal) -> Candidate:
        """The fastest verified plan that fits. InfeasibleError."""
        fitting = [c for c in self.verified if c.fits(goal)]
        if not fitting:
            raise self._infeasible(goal)
        return min(fitting, key=lambda c: (c.simulation.step_ms, c.simulation.peak_bytes(goal.budget_kind)))

    def _candidate(self, inner: int) -> Candidate | None:
        try:
            plan, solution = self._planner.solve(inner)
        except InfeasibleError:
            return None
        return self._verify(plan, solution)

    def _verify(self, plan: Plan, solution: TwoLevelSolution | None = None) -> Candidate:
        for known in self.verified:
            if known.plan.units == plan.units:
                return known
        self._progress("capturing the step under the plan")
        candidate = Candidate(plan=plan, simulation=self._verifier.under(plan), solution=solution)
        self.verified.append(candidate)
        return candidate

    def _infeasible(self, goal: Goal) -> InfeasibleError:
        """What the smallest budget would be: the verified peak of the plan with the least memory."""
        kind = goal.budget_kind
        smallest = self._verify(self._planner.smallest()).simulation
        least = min(c.simulation.peak_bytes(kind) for c in self.verified)
        report = smallest.memory.peak()
        return InfeasibleError(
            f"no plan meets {format_bytes(goal.budget_bytes)} {kind}: the smallest budget that would do is "
            f"{format_bytes(least)}; with all recomputed the peak is at {report.op or 'the start'} in the "
            f"{report.phase.name.lower()} of {report.module or 'the step'}"
        )

    def notes(self, goal: Goal, best: Candidate) -> tuple[str, ...]:
        """What is worth telling of the plan."""
        peak = best.simulation.peak_bytes(goal.budget_kind)
        report = best.simulation.memory.peak()
        count = len(self.verified)
        found = [
            f"the verified peak uses {peak / goal.budget_bytes:.1%} of the budget; "
            f"{count} {'plan was' if count == 1 else 'plans were'} simulated",
            f"the peak is at {report.op} in the {report.phase.name.lower()} of {report.module or 'the step'}",
        ]
        if best.solution is not None:
            gap = self._planner.gap(best.solution)
            found.append(f"recomputation is at most {gap:.1%} above the least possible at this peak (linear bound)")
            price_ms = best.solution.budgets.shadow_ms_per_gib
            if price_ms > 0:
                found.append(f"1 GiB more would save about {price_ms:.1f} ms of recomputation")
        return tuple(found + list(self._planner.policies.refusals))

"""The two-level method of AUTO-SAC (section 5.2.3): global budgets by the MILP, then a local policy for every unit.

The MILP's budgets are fractions of a curve, operators are whole: in a unit whose budget lies between two points of its
curve, a part of it is left over. `_fill` spends what is left: as long as any unit can save time with the bytes that all
peaks still allow it,

    allowed_u = min over points p with n_pu > 0 of (budget - peak_p) / n_pu

the one that saves most is solved again with that much more. The points of a budget's candidates suffice: the others stay
below them whatever is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autosac.solvers.global_milp import GlobalSolution, solve_global
from autosac.solvers.joint import check_items, recompute_ms
from autosac.solvers.local import LocalProblem, LocalSolution, local_solver
from autosac.solvers.problem import GlobalProblem, candidate_points


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelSolution:
    """Per unit its policy (None: not checkpointed); the highest peak; the step's recomputation; the MILP's solution."""

    policies: tuple[LocalSolution | None, ...]
    peak_bytes: int
    recompute_ms: float
    budgets: GlobalSolution

    @property
    def kept_bytes(self) -> tuple[int | None, ...]:
        """Bytes kept per unit."""
        return tuple(None if policy is None else policy.kept_bytes for policy in self.policies)

    @property
    def kept(self) -> tuple[tuple[int, ...] | None, ...]:
        """Items kept per unit."""
        return tuple(None if policy is None else policy.kept for policy in self.policies)


def solve_two_level(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    *,
    local: str = "knapsack",
    solver: str = "cbc",
    time_limit_s: float | None = 10.0,
    gap: float = 5e-3,
) -> TwoLevelSolution:
    """A plan under the budget; `items` are the operators' groups per unit. InfeasibleError, UsageError."""
    check_items(problem, items)
    policy_of = local_solver(local)
    budgets = solve_global(problem, budget_bytes, solver=solver, time_limit_s=time_limit_s, gap=gap)
    policies = [
        None if kept is None else policy_of(item, kept)
        for item, kept in zip(items, budgets.kept_bytes, strict=True)
    ]
    _fill(problem, items, budget_bytes, local, policies)
    kept_bytes = [None if policy is None else policy.kept_bytes for policy in policies]
    kept = [None if policy is None else policy.kept for policy in policies]
    return TwoLevelSolution(
        policies=tuple(policies),
        peak_bytes=int(problem.peaks_bytes(kept_bytes).max()),
        recompute_ms=recompute_ms(problem, items, kept),
        budgets=budgets,
    )


def _fill(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    local: str,
    policies: list[LocalSolution | None],
) -> None:
    """Spend what the local policies left of the budget; changes `policies`."""
    policy_of = local_solver(local)
    points = list(candidate_points(problem, budget_bytes))
    units = [u for u, policy in enumerate(policies) if policy is not None]
    if not points or not units:
        return
    counts = np.array([problem.counts(p)[units] for p in points])
    while True:
        kept_bytes = [None if policy is None else policy.kept_bytes for policy in policies]
        slack = budget_bytes - problem.peaks_bytes(kept_bytes)[points]
        room = np.where(counts > 0, slack[:, None] // np.maximum(counts, 1), np.iinfo(np.int64).max).min(axis=0)
        best, saved_ms = None, 0.0
        for u, more in zip(units, room.tolist(), strict=True):
            now = policies[u]
            if now is None or more <= 0:
                continue
            new = policy_of(items[u], min(now.kept_bytes + more, problem.units[u].highest_kept_bytes))
            gain_ms = (now.recompute_ms - new.recompute_ms) * problem.units[u].executions
            if gain_ms > saved_ms:
                best, saved_ms = (u, new), gain_ms
        if best is None:
            return
        policies[best[0]] = best[1]

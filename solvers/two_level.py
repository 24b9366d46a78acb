"""The two-level method of AUTO-SAC (section 5.2.3): global budgets by the MILP, then a local policy for every unit.

The MILP's budgets are fractions of a curve, operators are whole: in a unit whose budget lies between two points of its
curve, a part of it is left over. `fill_budget` spends what is left. Unit u may keep as much more as all peaks allow it,

    room_u = min over points p with n_pu > 0 of (budget - peak_p) / n_pu

and as long as any unit saves time by that, the one that saves most is solved again with so much more. The candidate
points of the budget suffice: the others stay below them whatever is decided.

Equal units then swap their policies, or come to have nearly the same (`arrange.py`): the caching allocator takes more than
what is active, and how much more depends on that.

A plan that is still more than POLISH_GAP above the MILP's bound is compared with what the joint problem (`joint.py`) finds
within `polish_s` seconds of processor time, and the better one is taken. (By the clock, a busy machine would find other
plans.)

Where the MILP finds nothing within its time limit, it is asked once more for a plan within RELAXED_GAP of the best, and then
`greedy_policies` decides without it: all units of one level are checkpointed, only what must be is kept in them, and
`fill_budget` spends what that leaves; of all levels whose peaks are within the budget, the one that costs least. `method` says
what made a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autosac.errors import InfeasibleError, TimeLimitError
from autosac.solvers.arrange import in_order, kept_by_units, levelled
from autosac.solvers.global_milp import GlobalSolution, solve_global
from autosac.solvers.joint import check_items, recompute_ms, relative_gap, solve_joint
from autosac.solvers.local import LocalProblem, LocalSolution, LocalSolver
from autosac.solvers.local_solvers import local_solver
from autosac.solvers.problem import GlobalProblem, candidate_points

POLISH_GAP = 0.005
POLISH_COLUMNS = 64
RELAXED_GAP = 0.1
BUDGET_TOLERANCE = 3e-7
"""Fraction of a unit's bytes by which its policy may exceed the budget that the MILP gave it; all of them together stay
within what the MILP holds back (`model.MARGIN`), or it is not granted."""
_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelSolution:
    """Per unit its policy (None: not checkpointed); the highest peak; the step's recomputation; the MILP's solution.

    `polished`: the policies are those of the joint problem; `unpolished`: that was asked and found none within its time.
    `method`: "milp", "milp with a relaxed gap" or "greedy". `level`: equal units keep nearly the same.
    """

    policies: tuple[LocalSolution | None, ...]
    peak_bytes: int
    recompute_ms: float
    budgets: GlobalSolution
    polished: bool = False
    unpolished: bool = False
    method: str = "milp"
    level: bool = False

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
    polish_s: float = 2.0,
    level: bool = False,
) -> TwoLevelSolution:
    """A plan under the budget: the global MILP gives each unit a byte budget, and a local solver chooses its operators.

    `items` are the groups of operators of each unit. `polish_s`: seconds of processor time for improving the plan by the
    joint problem.
    `level`: let equal units keep nearly the same operators, which costs some recomputation.

    Raises:
        InfeasibleError: no plan meets the budget, or none was found within the time limit (TimeLimitError).
        UsageError: a solver is unknown or not installed, or the problem contradicts itself.
    """
    check_items(problem, items)
    solve = local_solver(local)
    method = "milp"
    try:
        budgets = solve_global(problem, budget_bytes, solver=solver, time_limit_s=time_limit_s, gap=gap)
    except TimeLimitError as e:
        try:
            wide = max(gap, RELAXED_GAP)
            budgets = solve_global(problem, budget_bytes, solver=solver, time_limit_s=time_limit_s, gap=wide)
            method = "milp with a relaxed gap"
        except TimeLimitError:
            found = greedy_policies(problem, items, budget_bytes, solve)
            if found is None:
                raise e from None
            return found
    policies = local_policies(problem, items, budget_bytes, solve, budgets)
    if level:
        policies = levelled(problem, items, budget_bytes, solve, policies)
    fill_budget(problem, items, budget_bytes, solve, policies)
    ordered = in_order(problem, items, budget_bytes, policies)
    found = replace(_solution(problem, items, ordered, budgets), method=method, level=level)
    if level or polish_s <= 0 or relative_gap(found.recompute_ms, budgets.bound_ms) <= POLISH_GAP:
        return found
    joint = _polished(problem, items, budget_bytes, budgets, solver, polish_s)
    if joint is None:
        return replace(found, unpolished=True)
    return joint if joint.recompute_ms < found.recompute_ms else found


def local_policies(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    solve: LocalSolver,
    budgets: GlobalSolution,
) -> dict[int, LocalSolution]:
    """A policy for each unit within its budget, up to what the MILP's answer is rounded by.

    Most budgets are those of whole operators: a few bytes less would lose one of them.
    """
    for tolerance in (BUDGET_TOLERANCE, 0.0):
        policies = {
            u: solve(items[u], kept + math.ceil(tolerance * problem.units[u].discardable_bytes))
            for u, kept in enumerate(budgets.kept_bytes)
            if kept is not None
        }
        if int(problem.peaks_bytes(kept_by_units(problem, policies)).max()) <= budget_bytes:
            break
    return policies


def _solution(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    policies: Mapping[int, LocalSolution],
    budgets: GlobalSolution,
) -> TwoLevelSolution:
    kept = [policies[u].kept if u in policies else None for u in range(len(items))]
    return TwoLevelSolution(
        policies=tuple(policies.get(u) for u in range(len(items))),
        peak_bytes=int(problem.peaks_bytes(kept_by_units(problem, policies)).max()),
        recompute_ms=recompute_ms(problem, items, kept),
        budgets=budgets,
    )


def _polished(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    budgets: GlobalSolution,
    solver: str,
    polish_s: float,
) -> TwoLevelSolution | None:
    """The joint problem's plan, None if none was found in time."""
    try:
        joint = solve_joint(
            problem,
            items,
            budget_bytes,
            solver=solver,
            time_limit_s=polish_s,
            gap=POLISH_GAP / 2,
            columns=POLISH_COLUMNS,
        )
    except InfeasibleError:
        return None
    policies = {u: items[u].solution(kept) for u, kept in enumerate(joint.kept) if kept is not None}
    ordered = in_order(problem, items, budget_bytes, policies)
    return replace(_solution(problem, items, ordered, budgets), polished=True)


def greedy_policies(
    problem: GlobalProblem, items: Sequence[LocalProblem], budget_bytes: int, solve: LocalSolver
) -> TwoLevelSolution | None:
    """The best plan of those that checkpoint one level of the units; None if no level is within the budget."""
    found = []
    candidates = problem.candidates()
    for level in problem.levels():
        policies = {u: solve(items[u], problem.units[u].stored_bytes) for u in level if candidates[u]}
        kept = kept_by_units(problem, policies)
        if int(problem.peaks_bytes(kept).max()) > budget_bytes:
            continue
        fill_budget(problem, items, budget_bytes, solve, policies)
        kept = kept_by_units(problem, policies)
        budgets = GlobalSolution(
            discard_fraction=tuple(
                None if k is None else 1 - (k - unit.stored_bytes) / max(1, unit.discardable_bytes)
                for unit, k in zip(problem.units, kept, strict=True)
            ),
            kept_bytes=tuple(kept),
            peak_bytes=int(problem.peaks_bytes(kept).max()),
            recompute_ms=0.0,
            bound_ms=0.0,
            binding=(),
            shadow_ms_per_gib=0.0,
        )
        found.append(replace(_solution(problem, items, policies, budgets), method="greedy"))
    return min(found, key=lambda solution: solution.recompute_ms, default=None)


def fill_budget(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    solve: LocalSolver,
    policies: dict[int, LocalSolution],
) -> None:
    """Let the unit that saves most by it keep more, until none can; changes `policies`."""
    points = list(candidate_points(problem, budget_bytes))
    counts = problem.counts_at(points)
    while points and policies:
        kept = kept_by_units(problem, policies)
        slack = (budget_bytes - problem.peaks_bytes(kept)[points])[:, None]
        room = np.where(counts > 0, slack // np.maximum(counts, 1), _NO_LIMIT).min(axis=0).tolist()
        best_ms, step = 0.0, None
        for u, now in policies.items():
            unit = problem.units[u]
            # No more than it takes without checkpointing: then points that are no candidates stay below the budget.
            most = min(unit.highest_kept_bytes, unit.implicit_bytes - unit.boundary_bytes)
            new = solve(items[u], max(now.kept_bytes, min(now.kept_bytes + max(0, room[u]), most)))
            saved_ms = unit.cost_ms(now.recompute_ms) - unit.cost_ms(new.recompute_ms)
            if saved_ms > best_ms:
                best_ms, step = saved_ms, (u, new)
        if step is None:
            return
        policies[step[0]] = step[1]

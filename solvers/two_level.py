"""The two-level method of AUTO-SAC (section 5.2.3): global budgets by the MILP, then a local policy for every unit.

The MILP's budgets are fractions of a curve, operators are whole: in a unit whose budget lies between two points of its
curve, a part of it is left over. `_Refinement` spends what is left. Unit u may keep as much more as all peaks allow it,

    room_u = min over points p with n_pu > 0 of (budget - peak_p) / n_pu

and as long as any unit saves time by that, the one that saves most is solved again with so much more (`_fill`); if none
does, one unit gives up an operator or a few for another to keep a larger one (`_exchange`). The candidate points of the
budget suffice: the others stay below them whatever is decided.

A plan that is still more than POLISH_GAP above the MILP's bound is compared with what the joint problem (`joint.py`) finds
within `polish_s` seconds, and the better one is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autosac.errors import InfeasibleError
from autosac.solvers.global_milp import GlobalSolution, solve_global
from autosac.solvers.joint import check_items, recompute_ms, relative_gap, solve_joint
from autosac.solvers.local import LocalProblem, LocalSolution, LocalSolver, local_solver
from autosac.solvers.problem import GlobalProblem, candidate_points

IntArray = npt.NDArray[np.int64]

POLISH_GAP = 0.005
MAX_STEPS = 200
MAX_LOWERED = 6
TINY_MS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelSolution:
    """Per unit its policy (None: not checkpointed); the highest peak; the step's recomputation; the MILP's solution.

    `polished`: the policies are those of the joint problem.
    """

    policies: tuple[LocalSolution | None, ...]
    peak_bytes: int
    recompute_ms: float
    budgets: GlobalSolution
    polished: bool = False

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
) -> TwoLevelSolution:
    """A plan under the budget; `items` are the operators' groups per unit. InfeasibleError, UsageError.

    `polish_s`: 0 leaves the plan as the two levels made it.
    """
    check_items(problem, items)
    solve = local_solver(local)
    budgets = solve_global(problem, budget_bytes, solver=solver, time_limit_s=time_limit_s, gap=gap)
    policies = {u: solve(items[u], kept) for u, kept in enumerate(budgets.kept_bytes) if kept is not None}
    _Refinement(problem, items, budget_bytes, solve, policies).run()
    found = _solution(problem, items, policies, budgets, polished=False)
    if polish_s <= 0 or relative_gap(found.recompute_ms, budgets.bound_ms) <= POLISH_GAP:
        return found
    joint = _polished(problem, items, budget_bytes, budgets, solver, polish_s)
    return joint if joint is not None and joint.recompute_ms < found.recompute_ms else found


def _solution(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    policies: Mapping[int, LocalSolution],
    budgets: GlobalSolution,
    *,
    polished: bool,
) -> TwoLevelSolution:
    kept_bytes = [policies[u].kept_bytes if u in policies else None for u in range(len(items))]
    kept = [policies[u].kept if u in policies else None for u in range(len(items))]
    return TwoLevelSolution(
        policies=tuple(policies.get(u) for u in range(len(items))),
        peak_bytes=int(problem.peaks_bytes(kept_bytes).max()),
        recompute_ms=recompute_ms(problem, items, kept),
        budgets=budgets,
        polished=polished,
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
        joint = solve_joint(problem, items, budget_bytes, solver=solver, time_limit_s=polish_s, gap=POLISH_GAP / 5)
    except InfeasibleError:
        return None
    policies = {u: items[u].solution(kept) for u, kept in enumerate(joint.kept) if kept is not None}
    return _solution(problem, items, policies, budgets, polished=True)


class _Refinement:
    """Improves the policies of a solution one step at a time. Equal units (`_kinds`) are looked at once."""

    def __init__(
        self,
        problem: GlobalProblem,
        items: Sequence[LocalProblem],
        budget_bytes: int,
        solve: LocalSolver,
        policies: dict[int, LocalSolution],
    ) -> None:
        self.problem = problem
        self.items = items
        self.budget_bytes = budget_bytes
        self.solve = solve
        self.policies = policies
        self.points = list(candidate_points(problem, budget_bytes))
        self.counts = np.array([problem.counts(p) for p in self.points]).reshape(len(self.points), len(items))

    def run(self) -> None:
        """Until no step saves time."""
        for _ in range(MAX_STEPS if self.points else 0):
            kept = [self.policies[u].kept_bytes if u in self.policies else None for u in range(len(self.items))]
            slack = self.budget_bytes - self.problem.peaks_bytes(kept)[self.points]
            kinds = self._kinds()
            step = self._fill(kinds, slack) or self._exchange(kinds, slack)
            if not step:
                return
            self.policies.update(step)

    def _kinds(self) -> list[tuple[int, ...]]:
        """Checkpointed units that are alike in everything that matters here; of each kind the first two."""
        kinds: dict[Hashable, list[int]] = {}
        for u, policy in self.policies.items():
            key = (self.items[u], policy, self.problem.units[u].executions, self.counts[:, u].tobytes())
            kinds.setdefault(key, []).append(u)
        return [tuple(members[:2]) for members in kinds.values()]

    def _raised(self, u: int, slack: IntArray) -> tuple[float, LocalSolution]:
        """What unit u saves by keeping as much more as `slack` (bytes by point) allows, and its policy then."""
        now, held = self.policies[u], self.counts[:, u]
        room = int((slack[held > 0] // held[held > 0]).min(initial=2**62))
        if room <= 0:
            return 0.0, now
        new = self.solve(self.items[u], min(now.kept_bytes + room, self.problem.units[u].highest_kept_bytes))
        return (now.recompute_ms - new.recompute_ms) * self.problem.units[u].executions, new

    def _fill(self, kinds: list[tuple[int, ...]], slack: IntArray) -> dict[int, LocalSolution]:
        """The unit that saves most with what is left."""
        best_ms, step = TINY_MS, {}
        for u, *_ in kinds:
            saved_ms, new = self._raised(u, slack)
            if saved_ms > best_ms:
                best_ms, step = saved_ms, {u: new}
        return step

    def _exchange(self, kinds: list[tuple[int, ...]], slack: IntArray) -> dict[int, LocalSolution]:
        """The pair of units that saves most if one keeps less for the other to keep more."""
        best_ms, step = TINY_MS, {}
        for giver, *_ in kinds:
            now, executions = self.policies[giver], self.problem.units[giver].executions
            for less in self._lowered(giver):
                lost_ms = (less.recompute_ms - now.recompute_ms) * executions
                freed = slack + (now.kept_bytes - less.kept_bytes) * self.counts[:, giver]
                for kind in kinds:
                    taker = kind[-1] if kind[0] == giver else kind[0]
                    if taker == giver:
                        continue
                    saved_ms, more = self._raised(taker, freed)
                    if saved_ms - lost_ms > best_ms:
                        best_ms, step = saved_ms - lost_ms, {giver: less, taker: more}
        return step

    def _lowered(self, u: int) -> list[LocalSolution]:
        """The next policies of unit u that keep less."""
        found: list[LocalSolution] = []
        kept_bytes = self.policies[u].kept_bytes
        while kept_bytes > self.problem.units[u].stored_bytes and len(found) < MAX_LOWERED:
            found.append(self.solve(self.items[u], kept_bytes - 1))
            kept_bytes = found[-1].kept_bytes
        return found

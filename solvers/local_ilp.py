"""One unit by a MILP: section 5.5.3 of AUTO-SAC, with the closure of what runs again (`closure.py` states the problem).

Solvers count in doubles, with tolerances of about a millionth of the budget. Bytes are therefore scaled, and what comes back
is measured in whole bytes: a set of kept results that is too large by those is cut off,

    sum over s in the set of h_s <= size of the set - 1          h_s = 1 if result s is asked for and kept

and the MILP is solved again (`_cut_off`). That cuts off nothing that fits, so a set that fits exactly is found. The time limit
is for all of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autosac.errors import InfeasibleError
from autosac.solvers.backend import is_solved, make_backend
from autosac.solvers.local import LocalProblem, LocalSolution, greedy, knapsack

if TYPE_CHECKING:
    import pulp

TIME_LIMIT_S = 30.0
_TOTAL = 1e4
_CAPACITY = 2.0**16


def ilp(
    problem: LocalProblem, budget_bytes: int, *, solver: str = "cbc", time_limit_s: float | None = TIME_LIMIT_S
) -> LocalSolution:
    """The exact optimum, or after `time_limit_s` the best of greedy, knapsack and what the solver has found.

    Raises:
        InfeasibleError: the items that must be kept need more than the budget.
        UsageError: the back end is unknown or not installed, or the time limit is not positive.
    """
    make_backend(solver, time_limit_s=time_limit_s)
    began = time.monotonic()
    best = _heuristic(problem, budget_bytes)
    model = LocalModel(problem, budget_bytes)
    while True:
        left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - began)
        if left_s is not None and left_s <= 0:
            break
        found = model.solve(make_backend(solver, time_limit_s=left_s))
        if found is None:
            if best is None:
                raise InfeasibleError(f"what must be kept needs more than the module's budget of {budget_bytes} bytes")
            break
        if found.kept_bytes <= budget_bytes:
            return found if best is None else min(best, found, key=lambda s: s.recompute_ms)
        model.cut_off(found)
    if best is None:
        raise InfeasibleError(f"nothing was found within {time_limit_s} s for a budget of {budget_bytes} bytes")
    return best


def _heuristic(problem: LocalProblem, budget_bytes: int) -> LocalSolution | None:
    """What the fast solvers find; None if they find nothing, but there may be something. InfeasibleError."""
    try:
        found = (greedy(problem, budget_bytes), knapsack(problem, budget_bytes))
    except InfeasibleError:
        if problem.closure is None:
            raise
        return None  # of what must be kept, some may not be needed
    return min(found, key=lambda s: s.recompute_ms)


class LocalModel:
    """The MILP of one unit. All variables but those of the items are whole where these are."""

    def __init__(self, problem: LocalProblem, budget_bytes: int) -> None:
        import pulp

        self._problem = problem
        self._closure = closure = problem.demand
        scale = _CAPACITY / max(1, budget_bytes)
        total_ms = sum(operator.recompute_ms for operator in closure.operators) or 1.0
        self.keep: list[Any] = [
            pulp.LpVariable(f"k{i}", cat=pulp.LpBinary) if item.forced is None else int(item.forced)
            for i, item in enumerate(problem.items)
        ]
        self.run = [pulp.LpVariable(f"r{c}", 0, 1) for c in range(len(closure.operators))]
        self.held = [pulp.LpVariable(f"h{s}", 0, 1) for s in range(len(closure.results))]
        self.model = pulp.LpProblem("local", pulp.LpMinimize)
        times = zip(closure.operators, self.run, strict=True)
        self.model += pulp.lpSum(_TOTAL / total_ms * operator.recompute_ms * r for operator, r in times)
        for s in closure.asked:
            self._ask(1, s, len(closure.operators))
        for c, operator in enumerate(closure.operators):
            for s in operator.reads:
                self._ask(self.run[c], s, c)
        sizes = zip(closure.results, self.held, strict=True)
        self.model += pulp.lpSum(result.memory_bytes * scale * h for result, h in sizes) <= budget_bytes * scale

    def _ask(self, asking: Any, s: int, before: int) -> None:
        """Where `asking` is 1, result s is held or its makers run."""
        result = self._closure.results[s]
        keep = self.keep[result.item]
        self.model += self.held[s] >= asking + keep - 1
        for c in result.makers:
            if c < before:
                self.model += self.run[c] >= asking - keep

    def solve(self, backend: pulp.LpSolver) -> LocalSolution | None:
        """What the solver chooses, measured; None if there is nothing."""
        if not is_solved(self.model, backend):
            return None
        values = [keep if isinstance(keep, int) else keep.value() or 0.0 for keep in self.keep]
        kept = {i for i, value in enumerate(values) if value > 0.5}
        return self._without_idle(kept | set(self._problem.settled()))

    def _without_idle(self, kept: set[int]) -> LocalSolution:
        """The policy without the items that save nothing."""
        found = self._problem.keeping(kept)
        for i in self._problem.free_items():
            less = self._problem.keeping(set(found.kept) - {i})
            if i in self._problem.settled() or less.recompute_ms > found.recompute_ms:
                continue
            if less.kept_bytes <= found.kept_bytes:  # without a small result, a large one may be needed
                found = less
        return found

    def cut_off(self, found: LocalSolution) -> None:
        """Leave out the sets that hold all that this one does, which is too much."""
        import pulp

        _, serving = self._closure.needed(frozenset(found.kept))
        self.model += pulp.lpSum(self.held[s] for s in sorted(serving)) <= len(serving) - 1

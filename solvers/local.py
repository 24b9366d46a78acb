"""Local policies: which operators of one checkpointed module are kept, given the bytes that it may keep.

The items are groups of operators that are kept or recomputed as one, with memory a_j and recomputation time
t_j. The paper's problem is additive:

    minimise   sum_j t_j (1 - x_j)                       x_j in {0, 1}, 1 = keep
    subject to sum_j a_j x_j <= B                        the byte budget, forced keeps included
               x_j = 1 / x_j = 0                         for forced items

`greedy` is Algorithm 7 of AUTO-SAC (section 5.5.1): discard in descending MSPS = a_j / t_j until the rest
fits. `knapsack` is Algorithm 8 (section 5.5.2): dynamic programming over a discretised budget, here as one
numpy operation per item. Both decide as if every item that is not kept runs again. Where a `closure` says what really does
(`closure.py`), the answers are measured by it, and two more solvers decide by it: `pareto` (`frontier.py`) and `ilp`
(`local_ilp.py`, section 5.5.3).

An item without time is recomputed (keeping it saves nothing), one with time and without memory is kept (it costs nothing).

Bound of `knapsack`: bytes are counted in units of `delta_bytes` (`knapsack_resolution`), rounded up. Any
choice of k items that fits into B - k * delta_bytes still fits after rounding, so the result is never slower
than the optimum of the additive problem for that smaller budget; where delta_bytes divides all sizes (it is their greatest
common divisor whenever that is coarse enough) the result is optimal. Nor is it ever slower than `greedy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autosac.errors import InfeasibleError, UsageError
from autosac.solvers.closure import Closure, additive

KNAPSACK_CELLS = 1 << 24
"""Size of the largest table that `knapsack` fills: items times units of the budget (16 MiB, some 20 ms)."""


class LocalItem(NamedTuple):
    """A group of operators decided as one. `forced`: True always kept, False always recomputed, None free."""

    memory_bytes: int
    recompute_ms: float
    forced: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProblem:
    """The groups of one module, in the module's order; answers refer to them by position.

    `closure`: what runs again when some of them are kept; without one, every item that is not kept does.
    """

    items: tuple[LocalItem, ...]
    closure: Closure | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.items, self.closure)))
        if self.closure is not None and any(not 0 <= r.item < len(self.items) for r in self.closure.results):
            raise UsageError("a result belongs to an item that is not there")
        for i, item in enumerate(self.items):
            if item.memory_bytes < 0 or not (item.recompute_ms >= 0 and math.isfinite(item.recompute_ms)):
                raise UsageError(f"item {i} has a negative or infinite memory or time: {item}")

    def __hash__(self) -> int:
        return self._hash  # asked for as often as there are units

    @property
    def demand(self) -> Closure:
        """What runs again, as a closure in any case."""
        return self.closure if self.closure is not None else additive(self.items)

    def additive(self) -> LocalProblem:
        """The problem as the paper states it: every item that is not kept runs again."""
        return self if self.closure is None else LocalProblem(items=self.items)

    @property
    def stored_bytes(self) -> int:
        """Bytes of what must be kept."""
        return sum(item.memory_bytes for item in self.items if item.forced)

    def settled(self) -> tuple[int, ...]:
        """Items kept at any budget: the forced ones, and those that cost no memory but save time."""
        return tuple(
            i
            for i, (memory, ms, forced) in enumerate(self.items)
            if forced or (forced is None and memory == 0 and ms > 0)
        )

    def free_items(self) -> tuple[int, ...]:
        """Items that are not forced."""
        return tuple(i for i, item in enumerate(self.items) if item.forced is None)

    def free(self) -> tuple[int, ...]:
        """Items with something to decide: not forced, with both memory and time."""
        return tuple(i for i, (memory, ms, forced) in enumerate(self.items) if forced is None and memory > 0 and ms > 0)

    def solution(self, chosen: tuple[int, ...]) -> LocalSolution:
        """The solution that keeps `chosen` of the free items beside the settled ones."""
        return self.keeping({*self.settled(), *chosen})

    def keeping(self, items: Collection[int]) -> LocalSolution:
        """What keeping these items and no others holds and costs."""
        kept = tuple(sorted(items))
        if self.closure is not None:
            held_bytes, spent_ms = self.closure.measured(frozenset(kept))
            return LocalSolution(kept=kept, kept_bytes=held_bytes, recompute_ms=spent_ms)
        return LocalSolution(
            kept=kept,
            kept_bytes=sum(self.items[i].memory_bytes for i in kept),
            recompute_ms=math.fsum(ms for i, (_, ms, _) in enumerate(self.items) if i not in items),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSolution:
    """Positions of the kept items, their bytes, and the time to recompute what is needed besides."""

    kept: tuple[int, ...]
    kept_bytes: int
    recompute_ms: float


LocalSolver = Callable[[LocalProblem, int], LocalSolution]


def _capacity(problem: LocalProblem, budget_bytes: int) -> int:
    """What the budget leaves for free items. InfeasibleError if the forced ones do not fit."""
    left = budget_bytes - problem.stored_bytes
    if left < 0:
        raise InfeasibleError(
            f"the operators that must be kept need {problem.stored_bytes} bytes, "
            f"{-left} more than the module's budget of {budget_bytes}"
        )
    return left


def greedy(problem: LocalProblem, budget_bytes: int) -> LocalSolution:
    """Algorithm 7: discard by descending memory per unit of time until the rest fits.

    Raises:
        InfeasibleError: the items that must be kept need more than the budget.
    """
    left = _capacity(problem, budget_bytes)
    items = problem.items
    keep = list(problem.free())
    keep.sort(key=lambda i: (items[i].memory_bytes / items[i].recompute_ms, -i))  # the last is discarded first
    total = sum(items[i].memory_bytes for i in keep)
    while total > left:
        total -= items[keep.pop()].memory_bytes
    return problem.solution(tuple(keep))


def knapsack_resolution(problem: LocalProblem, cells: int = KNAPSACK_CELLS) -> int:
    """Bytes per unit of `knapsack`: the sizes' common divisor, or what keeps the table in `cells`."""
    sizes = [problem.items[i].memory_bytes for i in problem.free()]
    return max(math.gcd(*sizes), math.ceil(sum(sizes) * len(sizes) / cells), 1)


def knapsack(problem: LocalProblem, budget_bytes: int, *, cells: int = KNAPSACK_CELLS) -> LocalSolution:
    """Algorithm 8: dynamic programming, optimal up to the resolution stated above. InfeasibleError."""
    if cells < 1:
        raise UsageError(f"the knapsack's table needs at least one cell, not {cells}")
    delta_bytes = knapsack_resolution(problem, cells)
    free = problem.free()
    weights = [-(-problem.items[i].memory_bytes // delta_bytes) for i in free]
    capacity = min(_capacity(problem, budget_bytes) // delta_bytes, sum(weights))
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(free), capacity + 1), dtype=bool)
    for row, (i, weight) in enumerate(zip(free, weights, strict=True)):
        if weight <= capacity:
            with_item = best[: capacity + 1 - weight] + problem.items[i].recompute_ms
            np.greater(with_item, best[weight:], out=taken[row, weight:])
            best[weight:] = np.maximum(best[weight:], with_item)
    chosen = []
    for row in range(len(free) - 1, -1, -1):
        if taken[row, capacity]:
            chosen.append(free[row])
            capacity -= weights[row]
    found = problem.solution(tuple(chosen))
    return min(found, greedy(problem, budget_bytes), key=lambda solution: solution.recompute_ms)

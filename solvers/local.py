"""Local policies: which operators of one checkpointed module are kept, given the bytes that it may keep.

The items are groups of operators that are kept or recomputed as one, with memory a_j and recomputation time
t_j:

    minimise   sum_j t_j (1 - x_j)                       x_j in {0, 1}, 1 = keep
    subject to sum_j a_j x_j <= B                        the byte budget, forced keeps included
               x_j = 1 / x_j = 0                         for forced items

`greedy` is Algorithm 7 of AUTO-SAC (section 5.5.1): discard in descending MSPS = a_j / t_j until the rest
fits. `knapsack` is Algorithm 8 (section 5.5.2): dynamic programming over a discretised budget, here as one
numpy operation per item. `ilp` is section 5.5.3 in PuLP, exact. All three agree on two trivial cases,
whatever the budget: an item without time is recomputed (keeping it saves nothing), one with time and without
memory is kept (it costs nothing).

Bound of `knapsack`: bytes are counted in units of `delta_bytes` (`knapsack_resolution`), rounded up. Any
choice of k items that fits into B - k * delta_bytes still fits after rounding, so the result is never slower
than the optimum for that smaller budget; where delta_bytes divides all sizes (it is their greatest common
divisor whenever that is coarse enough) the result is optimal. Nor is it ever slower than `greedy`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autosac.errors import InfeasibleError, UsageError
from autosac.solvers.backend import make_backend

KNAPSACK_CELLS = 1 << 24
"""Size of the largest table that `knapsack` fills: items times units of the budget (16 MiB, some 20 ms)."""


class LocalItem(NamedTuple):
    """A group of operators decided as one. `forced`: True always kept, False always recomputed, None free."""

    memory_bytes: int
    recompute_ms: float
    forced: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProblem:
    """The groups of one module, in the module's order; answers refer to them by position."""

    items: tuple[LocalItem, ...]

    def __post_init__(self) -> None:
        for i, item in enumerate(self.items):
            if item.memory_bytes < 0 or not (item.recompute_ms >= 0 and math.isfinite(item.recompute_ms)):
                raise UsageError(f"item {i} has a negative or infinite memory or time: {item}")

    @property
    def stored_bytes(self) -> int:
        """Bytes of what must be kept: the smallest feasible budget."""
        return sum(item.memory_bytes for item in self.items if item.forced)

    def settled(self) -> tuple[int, ...]:
        """Items kept at any budget: the forced ones, and those that cost no memory but save time."""
        return tuple(
            i
            for i, (memory, ms, forced) in enumerate(self.items)
            if forced or (forced is None and memory == 0 and ms > 0)
        )

    def free(self) -> tuple[int, ...]:
        """Items with something to decide: not forced, with both memory and time."""
        return tuple(i for i, (memory, ms, forced) in enumerate(self.items) if forced is None and memory > 0 and ms > 0)

    def solution(self, chosen: tuple[int, ...]) -> LocalSolution:
        """The solution that keeps `chosen` of the free items beside the settled ones."""
        kept = tuple(sorted({*self.settled(), *chosen}))
        keep = set(kept)
        return LocalSolution(
            kept=kept,
            kept_bytes=sum(self.items[i].memory_bytes for i in kept),
            recompute_ms=math.fsum(ms for i, (_, ms, _) in enumerate(self.items) if i not in keep),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSolution:
    """Positions of the kept items, their bytes, and the time to recompute all others."""

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
    """Algorithm 7: discard by descending memory per unit of time until the rest fits. InfeasibleError."""
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


def ilp(
    problem: LocalProblem, budget_bytes: int, *, solver: str = "cbc", time_limit_s: float | None = None
) -> LocalSolution:
    """Section 5.5.3: the exact optimum by a MILP. InfeasibleError, UsageError (back end, limit).

    With a time limit, the better of greedy and what the solver had found by then.
    """
    import pulp

    backend = make_backend(solver, time_limit_s=time_limit_s)
    best = greedy(problem, budget_bytes)
    free = problem.free()
    unit = math.gcd(*(problem.items[i].memory_bytes for i in free)) or 1
    weights = [problem.items[i].memory_bytes // unit for i in free]
    capacity = limit = _capacity(problem, budget_bytes) // unit
    if sum(weights) <= limit:
        return problem.solution(free)
    scale = 1e4 / sum(problem.items[i].recompute_ms for i in free)
    while capacity >= 0:
        model = pulp.LpProblem("local", pulp.LpMaximize)
        x = [pulp.LpVariable(f"x{i}", cat=pulp.LpBinary) for i in free]
        model += pulp.lpSum(scale * problem.items[i].recompute_ms * v for i, v in zip(free, x, strict=True))
        model += pulp.lpSum(w * v for w, v in zip(weights, x, strict=True)) <= capacity
        model.solve(backend)
        chosen = [k for k, v in enumerate(x) if v.value() is not None and v.value() > 0.5]
        excess = sum(weights[k] for k in chosen) - limit
        if excess <= 0:
            found = problem.solution(tuple(free[k] for k in chosen))
            return min(best, found, key=lambda s: s.recompute_ms)
        capacity -= excess  # the solver's integrality tolerance, magnified by large weights
    return best


LOCAL_SOLVERS: dict[str, LocalSolver] = {"greedy": greedy, "knapsack": knapsack, "ilp": ilp}


def local_solver(name: str) -> LocalSolver:
    """The solver of that name; equal calls of one process are answered once. UsageError if there is none."""
    if name not in LOCAL_SOLVERS:
        raise UsageError(f"unknown local solver {name!r}: choose one of {', '.join(LOCAL_SOLVERS)}")
    return _cached(name)


@functools.cache
def _cached(name: str) -> LocalSolver:
    return functools.lru_cache(maxsize=4096)(LOCAL_SOLVERS[name])


def pareto(problem: LocalProblem, *, limit: int = 200_000) -> tuple[tuple[int, float], ...] | None:
    """All undominated (kept bytes, recompute ms), by ascending bytes; None if there are more than `limit`.

    Nemhauser-Ullmann: extend the list item by item, dropping what is not better than a smaller one.
    """
    base = problem.solution(())
    sizes, times = np.array([base.kept_bytes]), np.array([base.recompute_ms])
    for i in problem.free():
        sizes = np.concatenate([sizes, sizes + problem.items[i].memory_bytes])
        times = np.concatenate([times, times - problem.items[i].recompute_ms])
        order = np.lexsort((times, sizes))
        sizes, times = sizes[order], times[order]
        better = np.ones(len(times), dtype=bool)
        better[1:] = times[1:] < np.minimum.accumulate(times)[:-1]
        sizes, times = sizes[better], times[better]
        if len(sizes) > limit:
            return None
    return tuple((int(size), float(ms)) for size, ms in zip(sizes, times, strict=True))

"""References that the solvers' tests compare with: brute force, and an independent linear program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy.optimize import linprog

from autosac.solvers import GlobalProblem, LocalProblem

Plan = tuple[tuple[int, ...] | None, ...]


def best_ms(problem: LocalProblem, budget_bytes: int) -> float:
    """The least recomputation of all policies that fit, by trying them all; inf if none does."""
    free = [i for i, item in enumerate(problem.items) if item.forced is None]
    stored = [i for i, item in enumerate(problem.items) if item.forced]
    best = math.inf
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            keep = {*chosen, *stored}
            if sum(problem.items[i].memory_bytes for i in keep) <= budget_bytes:
                best = min(best, math.fsum(x.recompute_ms for i, x in enumerate(problem.items) if i not in keep))
    return best


def ancestors(problem: GlobalProblem, unit: int) -> set[int]:
    """All units above one."""
    found: set[int] = set()
    while problem.units[unit].parent >= 0:
        unit = problem.units[unit].parent
        found.add(unit)
    return found


def choices(problem: GlobalProblem) -> Iterator[frozenset[int]]:
    """All sets of units that may be checkpointed together."""
    allowed = [u for u, unit in enumerate(problem.units) if unit.allowed]
    for size in range(len(allowed) + 1):
        for chosen in itertools.combinations(allowed, size):
            if all(not ancestors(problem, u) & set(chosen) for u in chosen):
                yield frozenset(chosen)


def best_relaxed_ms(problem: GlobalProblem, budget_bytes: int) -> float:
    """The global optimum by one linear program per set of units, over all points, without any of the tricks."""
    best = math.inf
    for chosen in choices(problem):
        units = sorted(chosen)
        n = len(units)
        rows, limits = [], []
        for p, point in enumerate(problem.points):
            counts = problem.counts(p)
            extra = sum(e for u, e in point.extras if u in chosen)
            fixed = sum(counts[u] * problem.units[u].change_bytes(problem.units[u].highest_kept_bytes) for u in units)
            rows.append([0.0] * n + [-float(counts[u]) * problem.units[u].discardable_bytes for u in units])
            limits.append(float(budget_bytes - point.base_bytes - extra - fixed))
        for k, u in enumerate(units):
            scale = problem.units[u].recompute_ms * problem.units[u].executions
            for slope, intercept in problem.units[u].segments:
                row = [0.0] * (2 * n)
                row[k], row[n + k] = -1.0, scale * slope
                rows.append(row)
                limits.append(-scale * intercept)
        if not n:
            best = min(best, 0.0 if min(limits) >= 0 else math.inf)
            continue
        cost = np.array([1.0] * n + [0.0] * n)
        found = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=[(0, None)] * n + [(0, 1)] * n)
        if found.status == 0:
            best = min(best, float(found.fun))
    return best


def all_plans(problem: GlobalProblem, items: tuple[LocalProblem, ...]) -> Iterator[Plan]:
    """Every plan: a set of units, and every policy of each of them."""
    for chosen in choices(problem):
        policies: list[list[tuple[int, ...] | None]] = []
        for u, local in enumerate(items):
            if u not in chosen:
                policies.append([None])
                continue
            stored = tuple(i for i, item in enumerate(local.items) if item.forced)
            free = [i for i, item in enumerate(local.items) if item.forced is None]
            sets = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
            policies.append([tuple(sorted((*stored, *kept))) for kept in sets])
        yield from itertools.product(*policies)


def kept_bytes(items: tuple[LocalProblem, ...], plan: Plan) -> list[int | None]:
    """Bytes kept per unit by a plan."""
    return [
        None if kept is None else sum(local.items[i].memory_bytes for i in kept)
        for local, kept in zip(items, plan, strict=True)
    ]


@pytest.fixture
def brute_force() -> Callable[[LocalProblem, int], float]:
    """The optimum of a local problem."""
    return best_ms


@pytest.fixture
def reference() -> Callable[[GlobalProblem, int], float]:
    """The optimum of a global problem."""
    return best_relaxed_ms


@pytest.fixture
def plans() -> Callable[[GlobalProblem, tuple[LocalProblem, ...]], Iterator[tuple[Plan, list[int | None]]]]:
    """All plans of a joint problem with their bytes."""
    return lambda problem, items: ((plan, kept_bytes(items, plan)) for plan in all_plans(problem, items))

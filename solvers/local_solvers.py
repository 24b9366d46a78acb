"""The local solvers by name."""

from __future__ import annotations

import functools

from autosac.errors import UsageError
from autosac.solvers.frontier import pareto
from autosac.solvers.local import LocalSolver, greedy, knapsack
from autosac.solvers.local_ilp import ilp

LOCAL_SOLVERS: dict[str, LocalSolver] = {"pareto": pareto, "greedy": greedy, "knapsack": knapsack, "ilp": ilp}


def local_solver(name: str) -> LocalSolver:
    """The solver of that name; equal calls of one process are answered once. UsageError if there is none."""
    if name not in LOCAL_SOLVERS:
        raise UsageError(f"unknown local solver {name!r}: choose one of {', '.join(LOCAL_SOLVERS)}")
    return _cached(name)


@functools.cache
def _cached(name: str) -> LocalSolver:
    return functools.lru_cache(maxsize=4096)(LOCAL_SOLVERS[name])

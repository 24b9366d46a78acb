"""The solvers on equal terms: one inner budget, the same global budgets, every local solver (AUTO-SAC Figure 5.7)."""

from __future__ import annotations

import time
from typing import NamedTuple

from autosac.bench.policies import JOINT
from autosac.errors import InfeasibleError
from autosac.planning.planner import Goal, Planner
from autosac.simulation import Simulation
from autosac.solvers import LOCAL_SOLVERS, relative_gap, solve_global, solve_joint, solve_two_level

LOCAL = ("pareto", "greedy", "knapsack", "ilp")


class SolverTiming(NamedTuple):
    """One way to solve the same problem: time, recomputation by the model, distance to the linear bound of the whole.

    `filled_ms`: recomputation once what the local policies leave of the budget is given to others (not in `seconds`).
    """

    solver: str
    seconds: float
    recompute_ms: float
    gap: float | None
    filled_ms: float | None = None


def time_solvers(base: Simulation, goal: Goal, inner_bytes: int) -> list[SolverTiming]:
    """Figure 5.7 on equal terms: the global budgets of one inner budget, then every unit's policy by each local solver.

    Nothing is polished; the joint MILP, and the global MILP alone, stand beside. Empty if it is infeasible.
    """
    planner = Planner(base, goal)
    problem, items = planner.priced()
    began = time.perf_counter()
    try:
        budgets = solve_global(problem, inner_bytes, gap=goal.gap, solver=goal.milp, time_limit_s=goal.time_limit_s)
    except InfeasibleError:
        return []
    global_s = time.perf_counter() - began
    began = time.perf_counter()
    joint = solve_joint(problem, items, inner_bytes, gap=goal.gap / 5, solver=goal.milp, time_limit_s=goal.time_limit_s)
    joint_s = time.perf_counter() - began
    found = [SolverTiming("global MILP", global_s, budgets.recompute_ms, None)]
    for name in LOCAL:
        solve = LOCAL_SOLVERS[name]  # without the memory of earlier answers
        began = time.perf_counter()
        recompute_ms = sum(
            solve(items[u], kept).recompute_ms * problem.units[u].executions
            for u, kept in enumerate(budgets.kept_bytes)
            if kept is not None
        )
        seconds = time.perf_counter() - began
        filled = solve_two_level(
            problem,
            items,
            inner_bytes,
            local=name,
            solver=goal.milp,
            time_limit_s=goal.time_limit_s,
            gap=goal.gap,
            polish_s=0,
        ).recompute_ms
        found.append(SolverTiming(name, seconds, recompute_ms, relative_gap(filled, joint.bound_ms), filled))
    gap = relative_gap(joint.recompute_ms, joint.bound_ms)
    return [*found, SolverTiming(JOINT, joint_s, joint.recompute_ms, gap)]

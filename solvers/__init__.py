"""Decisions from numbers: the global MILP over checkpointable modules, and the local policies of one module.

Everything here takes plain values and returns plain values; neither torch nor a trace is needed. Memory in
bytes, time in milliseconds.
"""

from autosac.solvers.backend import BACKENDS, check_backend
from autosac.solvers.global_milp import GlobalSolution, solve_global
from autosac.solvers.joint import JointSolution, joint_bound_ms, recompute_ms, relative_gap, solve_joint
from autosac.solvers.local import (
    LOCAL_SOLVERS,
    LocalItem,
    LocalProblem,
    LocalSolution,
    LocalSolver,
    greedy,
    ilp,
    knapsack,
    knapsack_resolution,
    local_solver,
    pareto,
)
from autosac.solvers.problem import GlobalProblem, PeakPoint, Segment, Unit, candidate_points
from autosac.solvers.two_level import TwoLevelSolution, solve_two_level

__all__ = [
    "BACKENDS",
    "LOCAL_SOLVERS",
    "GlobalProblem",
    "GlobalSolution",
    "JointSolution",
    "LocalItem",
    "LocalProblem",
    "LocalSolution",
    "LocalSolver",
    "PeakPoint",
    "Segment",
    "TwoLevelSolution",
    "Unit",
    "candidate_points",
    "check_backend",
    "greedy",
    "ilp",
    "joint_bound_ms",
    "knapsack",
    "knapsack_resolution",
    "local_solver",
    "pareto",
    "recompute_ms",
    "relative_gap",
    "solve_global",
    "solve_joint",
    "solve_two_level",
]

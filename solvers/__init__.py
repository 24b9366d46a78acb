"""Decisions from numbers: the global MILP over checkpointable modules, and the local policies of one module.

Everything here takes plain values and returns plain values; neither torch nor a trace is needed. Memory in
bytes, time in milliseconds.
"""

from autosac.solvers.backend import BACKENDS, check_backend
from autosac.solvers.closure import Closure, Operator, UnitResult
from autosac.solvers.frontier import Frontier, UnitCurve, frontier, pareto, unit_curve
from autosac.solvers.global_milp import GlobalSolution, solve_global
from autosac.solvers.joint import JointSolution, joint_bound_ms, recompute_ms, relative_gap, solve_joint
from autosac.solvers.local import (
    LocalItem,
    LocalProblem,
    LocalSolution,
    LocalSolver,
    greedy,
    knapsack,
    knapsack_resolution,
)
from autosac.solvers.local_ilp import ilp
from autosac.solvers.local_solvers import LOCAL_SOLVERS, local_solver
from autosac.solvers.min_cut import min_cut_hull
from autosac.solvers.problem import CurveSegment, GlobalProblem, GlobalUnit, PeakPoint, candidate_points
from autosac.solvers.two_level import TwoLevelSolution, solve_two_level

__all__ = [
    "BACKENDS",
    "LOCAL_SOLVERS",
    "Closure",
    "CurveSegment",
    "Frontier",
    "GlobalProblem",
    "GlobalSolution",
    "GlobalUnit",
    "JointSolution",
    "LocalItem",
    "LocalProblem",
    "LocalSolution",
    "LocalSolver",
    "Operator",
    "PeakPoint",
    "TwoLevelSolution",
    "UnitCurve",
    "UnitResult",
    "candidate_points",
    "check_backend",
    "frontier",
    "greedy",
    "ilp",
    "joint_bound_ms",
    "knapsack",
    "knapsack_resolution",
    "local_solver",
    "min_cut_hull",
    "pareto",
    "recompute_ms",
    "relative_gap",
    "solve_global",
    "solve_joint",
    "solve_two_level",
    "unit_curve",
]

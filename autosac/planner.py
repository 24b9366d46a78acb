"""Plans for given peaks: the global problem of one captured step, solved as often as asked (see `autosac.planning`)."""

from __future__ import annotations

from dataclasses import dataclass

from autosac.errors import UsageError
from autosac.plans import MadeFor, Plan, Settings, Unit
from autosac.policies import UnitPolicies
from autosac.problem import build_problem
from autosac.simulation import Simulation
from autosac.solvers import LocalProblem, TwoLevelSolution, joint_bound_ms, relative_gap, solve_two_level

SOLVERS = ("greedy", "knapsack", "ilp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked for. `utilisation` is the share of the budget from which on a verified plan is good enough."""

    budget_bytes: int
    budget_kind: str = "reserved"
    solver: str = "knapsack"
    milp: str = "cbc"
    time_limit_s: float = 30.0
    gap: float = 5e-3
    rounds: int = 6
    utilisation: float = 0.98

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise UsageError("the budget must be more than zero")
        if self.budget_kind not in ("reserved", "active"):
            raise UsageError(f"budget kind {self.budget_kind!r}: expected 'reserved' or 'active'")
        if self.solver not in SOLVERS:
            raise UsageError(f"solver {self.solver!r}: expected one of {', '.join(SOLVERS)}")
        if self.time_limit_s <= 0:
            raise UsageError("the time limit must be more than zero seconds")


def full_plan(base: Simulation, goal: Goal | None = None) -> Plan:
    """Full checkpointing: see `Planner.smallest`."""
    return Planner(base, goal or Goal(budget_bytes=1)).smallest()


def plan_of(base: Simulation, goal: Goal, units: tuple[Unit, ...]) -> Plan:
    """A plan with these units, made for the captured job and the goal."""
    info = base.trace.info
    degrees = info.get("parallelism") or {}
    return Plan(
        made_for=MadeFor(
            job_fingerprint=str(info.get("job_fingerprint", "")),
            model=str(info.get("model", "")),
            torch_version=str(info.get("torch_version", "")),
            torchtitan_version=str(info.get("torchtitan_version", "")),
            gpu=base.target.hardware.name,
            world_size=int(info.get("world_size", 1)),
            budget_bytes=goal.budget_bytes,
            budget_kind=goal.budget_kind,
            pipeline_stages=int(degrees.get("pp", 1)),
            job_settings=dict(info.get("job_settings", {})),
            parameters=tuple((name, tuple(shape)) for name, shape in info.get("parameter_shapes", {}).items()),
        ),
        units=units,
        settings=Settings(
            preserve_rng_state=bool(info.get("preserve_rng_state", True)), early_stop=bool(info.get("early_stop", True))
        ),
    )


class Planner:
    """Plans for inner budgets: the global problem of one captured step, solved as often as asked."""

    def __init__(self, base: Simulation, goal: Goal) -> None:
        self.base = base
        self.goal = goal
        self.policies = UnitPolicies(base)
        self.problem = build_problem(base.trace, base.memory, self.policies.statistics(), self.policies.allowed())

    def solve(self, inner_bytes: int) -> tuple[Plan, TwoLevelSolution]:
        """The plan with the least recomputation whose active peak, by the problem, is within `inner_bytes`.

        InfeasibleError if there is none.
        """
        goal = self.goal
        solution = solve_two_level(
            self.problem.problem,
            self._items(),
            inner_bytes,
            local=goal.solver,
            solver=goal.milp,
            time_limit_s=goal.time_limit_s,
            gap=goal.gap,
        )
        chosen = [
            self.policies.of_module(module).unit(policy)
            for module, policy in zip(self.problem.modules, solution.policies, strict=True)
            if policy is not None
        ]
        return plan_of(self.base, self.goal, tuple(chosen)), solution

    def gap(self, solution: TwoLevelSolution) -> float:
        """By how much a solution's recomputation is above the least possible at its own peak, at the most (0.01: 1 %).

        The reference is the relaxation of the joint problem over all operators of all units.
        """
        # A little more than the peak, for the solver's tolerances: the bound stays one.
        limit = solution.peak_bytes + solution.peak_bytes // 10**6 + 4096
        bound_ms = joint_bound_ms(self.problem.problem, self._items(), limit, solver=self.goal.milp)
        return relative_gap(solution.recompute_ms, bound_ms)

    def _items(self) -> list[LocalProblem]:
        return [self.policies.of_module(module).sac.problem for module in self.problem.modules]

    def smallest(self) -> Plan:
        """The plan with the least memory of those that recompute everything in all units of one level of the module tree.

        Not always the outermost: to recompute a whole network at once takes as much as never to have checkpointed it.
        """
        units = self.problem.problem.units
        depth = [0] * len(units)
        for u, unit in enumerate(units):
            if unit.parent >= 0:
                depth[u] = depth[unit.parent] + 1
        parents = {unit.parent for unit in units}
        levels = [
            [u for u in range(len(units)) if depth[u] == level or (depth[u] < level and u not in parents)]
            for level in range(max(depth, default=-1) + 1)
        ]
        chosen = min(levels, key=self._peak_bytes, default=[])
        policies = (self.policies.of_module(self.problem.modules[u]) for u in chosen)
        return plan_of(self.base, self.goal, tuple(policy.recompute_all() for policy in policies))

    def _peak_bytes(self, chosen: list[int]) -> int:
        """The peak if these units keep only what they must."""
        problem = self.problem.problem
        wanted = set(chosen)
        kept = [unit.stored_bytes if u in wanted else None for u, unit in enumerate(problem.units)]
        return int(problem.peaks_bytes(kept).max())

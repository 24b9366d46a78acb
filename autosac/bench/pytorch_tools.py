"""The plan of PyTorch's own planner, `torch.distributed._tools`, for comparison with AutoSAC's.

PyTorch's planner gets what AutoSAC's gets: times and bytes of operators, and the active memory of the step. It has its own fit
of each module's trade-off curve (two segments), its own MILP over modules (`sac_milp`) and over one module's operators
(`get_optimal_checkpointing_policy_per_module`). It knows no allocator and does not simulate its plan. So the harness looks
for the memory budget whose plan, simulated, fits (`Bracket`), as it does for AutoSAC's solvers; nothing else is changed.

What `sac_milp` assumes limits where there is such a plan: each module runs once in a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from autosac.errors import InfeasibleError, UsageError
from autosac.estimator.sac_rules import OperatorGroup
from autosac.estimator.sac_stats import SACModStats, SACOperator
from autosac.planning.planner import Planner
from autosac.plans import Plan
from autosac.solvers import GlobalProblem

_GIB = 2**30
_ROOT = "model"  # names below it: PyTorch takes "1.0" for a part of "1", and of "11", too


def plan_within(planner: Planner, budget_bytes: int) -> Plan:
    """The plan of PyTorch's planner whose peak, as it counts it, is within `budget_bytes` of active memory.

    InfeasibleError if it finds none; UsageError for a step that it does not understand.
    """
    from torch.distributed._tools import sac_ilp

    sac_ilp.logger.setLevel(logging.CRITICAL)
    problem = planner.problem.problem
    repeated = next((unit.name for unit in problem.units if unit.executions > 1), None)
    if repeated is not None:
        raise UsageError(
            f"torch.distributed._tools plans for modules that run once in a step; {repeated} runs more often"
        )
    statistics = [planner.policies.of_module(module).sac.stats for module in planner.problem.modules]
    discarded = solve(problem, statistics, budget_bytes)
    kept: list[tuple[int, ...] | None] = []
    for unit, stats in zip(problem.units, statistics, strict=True):
        fraction = discarded.get(unit.name)
        kept.append(None if fraction is None else kept_groups(stats, 1 - fraction))
    return planner.plan(kept)


def solve(problem: GlobalProblem, statistics: Sequence[SACModStats], budget_bytes: int) -> dict[str, float]:
    """The modules that are checkpointed, and which fraction of its results' bytes each of them discards. InfeasibleError."""
    from torch.distributed._tools import sac_ilp

    decisions, _, peak_bytes = sac_ilp.sac_milp(module_graph(problem, statistics), budget_bytes / _GIB)
    if peak_bytes < 0:
        raise InfeasibleError("torch.distributed._tools finds no plan within the budget")
    return {name.removeprefix(f"{_ROOT}."): fraction for name, fraction in decisions.items()}


def kept_groups(stats: SACModStats, fraction: float) -> tuple[int, ...]:
    """The groups of operators that PyTorch's per-module MILP keeps within a fraction of the results' bytes."""
    saved = _saved(stats.operators, stats.groups, min(1.0, max(0.0, fraction)))
    return tuple(
        g
        for g, group in enumerate(stats.groups)
        if group.forced is None and all(member in saved for member in group.members)
    )


@functools.lru_cache(4096)
def _saved(operators: tuple[SACOperator, ...], groups: tuple[OperatorGroup, ...], fraction: float) -> frozenset[int]:
    from torch.distributed._tools import sac_ilp

    policy = sac_ilp.get_optimal_checkpointing_policy_per_module(_statistics(operators, groups), fraction)
    return frozenset(i for i, keep in enumerate(policy) if keep)


@functools.lru_cache(4096)
def curve_of(operators: tuple[SACOperator, ...], groups: tuple[OperatorGroup, ...]) -> Any:
    """PyTorch's fit of a module's trade-off curve, a `SACTradeOffStats`."""
    from torch.distributed._tools.sac_estimator import SACEstimator

    estimator, stats = SACEstimator(), _statistics(operators, groups)
    return estimator._get_sac_tradeoff_pwlf_stats(stats, estimator._get_greedy_order_meta(stats))


def _statistics(operators: Sequence[SACOperator], groups: Sequence[OperatorGroup]) -> Any:
    """A module's operators as PyTorch states them. What runs again anyway, or never, it can only take for a view."""
    from torch.distributed._tools.sac_estimator import SACStats

    settled = {member for group in groups if group.forced is not None for member in group.members}
    joined = {member: group.members[0] for group in groups if group.forced is None for member in group.members[1:]}
    return SACStats(
        func_names=[operator.name for operator in operators],
        runtimes=[0.0 if i in settled else operator.runtime_ms for i, operator in enumerate(operators)],
        memory=[0 if i in settled else operator.memory_bytes for i, operator in enumerate(operators)],
        view_like_ops=[i for i, operator in enumerate(operators) if operator.view_like or i in settled],
        rand_ops=[],  # they are among the groups
        saved_autograd_ops=[],
        inplace_ops=list(joined.items()),
        force_store_random=False,
    )


def module_graph(problem: GlobalProblem, statistics: Sequence[SACModStats]) -> Any:
    """The units below one root, in PyTorch's format (`ilp_utils.Graph`).

    To PyTorch, the memory at a module, in its backward, is `act_total` less what the modules before it have discarded. So
    `act_total` is the highest memory without checkpointing from where the backward of the module begins to where that of the
    next does; the root's is that of the whole step.
    """
    from torch.distributed._tools.ilp_utils import parse_module_info

    bases = [point.base_bytes for point in problem.points]
    begins = _begins(problem)
    rows = [_row(_ROOT, max(bases))]
    for u, stats in enumerate(statistics):
        last = min((begin for begin in begins.values() if begin > begins[u]), default=len(bases)) if u in begins else 0
        held = max(bases[begins[u] : last]) if u in begins else 0
        rows.append(_row(f"{_ROOT}.{problem.units[u].name}", held, problem, u, stats))
    order = [_ROOT, *(f"{_ROOT}.{problem.units[u].name}" for u in _tree_order(problem))]
    after = [*(f"{_ROOT}.{problem.units[u].name}" for u in _forward_order(problem)), _ROOT]
    rows.sort(key=lambda row: order.index(row["fqn"]))
    modules = {"fw_pre_order": order, "bw_pre_order": order, "fw_post_order": after, "bw_post_order": after}
    return parse_module_info({"mod_order": modules, "mod_stats": rows})  # type: ignore[typeddict-item]


def _row(
    name: str, held_bytes: int, problem: GlobalProblem | None = None, u: int = -1, stats: SACModStats | None = None
) -> dict[str, Any]:
    """A node of the graph; without statistics, or with nothing to decide, one that is never checkpointed."""
    memory = dict.fromkeys(("param", "grad", "act_bw", "act_grad", "input", "output"), 0)
    row: dict[str, Any] = {f"{kind}_per_module": nbytes for kind, nbytes in memory.items()}
    row |= {"fqn": name, "grad_total": 0, "act_total": held_bytes, "act_fw_per_module": 0, "is_leaf": True}
    row |= {"fw_runtime_per_module": 0.0, "bw_runtime_per_module": 0.0, "sac_runtime": 0.0, "sac_memory": 0}
    row |= {"n_segments": 0, "slopes": [], "intercepts": [], "breakpoints": [], "tradeoff_curve": {}}
    if problem is None or stats is None or not problem.candidates()[u]:
        return row
    unit = problem.units[u]
    free = _statistics(stats.operators, stats.groups)
    if not sum(free.memory) or not sum(free.runtimes):
        return row
    curve = curve_of(stats.operators, stats.groups)
    row |= {
        "is_leaf": False,
        "act_fw_per_module": max(0, unit.implicit_bytes - unit.boundary_bytes - unit.stored_bytes),
        "fw_runtime_per_module": curve.sac_runtime,
        "sac_runtime": curve.sac_runtime,
        "sac_memory": curve.sac_memory,
        "n_segments": curve.n_segments,
        "slopes": curve.slopes,
        "intercepts": curve.intercepts,
        "breakpoints": curve.fit_breaks,
        "tradeoff_curve": curve.tradeoff_curve,
    }
    return row


def _begins(problem: GlobalProblem) -> dict[int, int]:
    """The point at which each unit's backward begins, of those that hold something."""
    return {u: p for p, point in enumerate(problem.points) for u, step in point.deltas if step < 0}


def _tree_order(problem: GlobalProblem) -> list[int]:
    """The units, each followed by those inside of it."""
    inside: dict[int, list[int]] = {}
    for u, unit in enumerate(problem.units):
        inside.setdefault(unit.parent, []).append(u)
    order: list[int] = []
    waiting = inside.get(-1, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += inside.get(order[-1], [])[::-1]
    return order


def _forward_order(problem: GlobalProblem) -> list[int]:
    """The units by the end of their forward, those inside of another before it."""
    ends = {u: p for p, point in reversed(list(enumerate(problem.points))) for u, step in point.deltas if step > 0}
    return sorted(range(len(problem.units)), key=lambda u: (ends.get(u, len(problem.points)), -u))

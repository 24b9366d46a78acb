"""The joint problem: every operator of every unit in one MILP, the reference for two-level plans.

Points, nesting and the choice of no checkpointing are those of `global_milp.py`; instead of a curve, unit u
has the items of its `LocalProblem`, with x_ui = 1 if item i is kept (a_i bytes, t_i ms):

    minimise    sum_u cost_u (sum_i t_i (y_u - x_ui) + always_u y_u)         always_u: what is recomputed anyway
    subject to  x_ui <= y_u
                c_u = lowest_u y_u + sum_i a_i x_ui <= 0

The cost is the time itself, times the executions, or what the step pays of it (`Unit.cost_ms`: a variable above two lines).
Equal items of one unit and interchangeable units share variables: cost and memory are sums over them, so only
the number of kept copies counts, and any choice of copies has the same value. The linear relaxation bounds
every plan from below.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autosac.errors import UsageError
from autosac.solvers.backend import make_backend
from autosac.solvers.global_milp import infeasible
from autosac.solvers.local import LocalItem, LocalProblem
from autosac.solvers.model import TOTAL, PeakModel
from autosac.solvers.problem import GlobalProblem, Unit, candidate_points
from autosac.solvers.symmetry import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSolution:
    """Per unit the kept items (None: not checkpointed) and bytes; the highest peak; the recomputation."""

    kept: tuple[tuple[int, ...] | None, ...]
    kept_bytes: tuple[int | None, ...]
    peak_bytes: int
    recompute_ms: float
    bound_ms: float


class JointModel(PeakModel):
    """Units by their operators."""

    def __init__(
        self,
        problem: GlobalProblem,
        items: Sequence[LocalProblem],
        points: tuple[int, ...],
        budget_bytes: int | None,
    ) -> None:
        self.items = items
        self.kept: list[dict[LocalItem, Any]] = []
        super().__init__(problem, points, budget_bytes, items)

    def _decide(self, c: int, unit: Unit, copies: int) -> Any:
        import pulp

        local = self.items[self.classes[c].representative]
        counts = Counter(local.items[i] for i in local.free())
        y = self.y[c]
        kept = {
            item: pulp.LpVariable(f"x{c}_{i}", 0, copies * counts[item], pulp.LpInteger)
            for i, item in enumerate(counts)
        }
        self.kept.append(kept)
        for item, x in kept.items():
            self.model += x <= counts[item] * y
        bytes_kept = pulp.lpSum(item.memory_bytes / self.unit_bytes * x for item, x in kept.items())
        self.model += self.change[c] == unit.lowest_change_bytes / self.unit_bytes * y + bytes_kept
        all_ms = local.solution(()).recompute_ms
        time = all_ms * y - pulp.lpSum(item.recompute_ms * x for item, x in kept.items())
        if not unit.hidden_weight:
            return unit.executions * time
        paid = pulp.LpVariable(f"t{c}", 0)
        self.model += paid >= time - unit.hidden_ms * y
        self.model += paid >= unit.floor_ms * y
        return unit.executions * (paid + unit.hidden_weight * time)

    def policies(self) -> tuple[tuple[int, ...] | None, ...]:
        """Kept items per unit in the present solution; the first copies keep most, unless some time is hidden in each."""
        chosen: dict[int, tuple[int, ...]] = {}
        counts = [round(y.value()) for y in self.y]
        for units, kept in zip(choose(self.problem, self.classes, counts), self.kept, strict=True):
            if not units:
                continue
            local, evenly = self.items[units[0]], self.problem.units[units[0]].hidden_weight > 0
            keep = {u: list(local.settled()) for u in units}
            saved_ms = dict.fromkeys(units, 0.0)
            for item, x in kept.items():
                positions = [i for i in local.free() if local.items[i] == item]
                for _ in range(round(x.value())):
                    open_ = [u for u in units if not set(positions) <= set(keep[u])]
                    u = min(open_, key=saved_ms.__getitem__) if evenly else open_[0]
                    keep[u].append(next(i for i in positions if i not in keep[u]))
                    saved_ms[u] += item.recompute_ms
            chosen |= {u: tuple(sorted(items)) for u, items in keep.items()}
        return tuple(chosen.get(u) for u in range(len(self.problem.units)))

    def kept_bytes(self) -> tuple[int | None, ...]:
        """Bytes kept per unit (None: not checkpointed) by the present solution."""
        return tuple(
            None if kept is None else sum(local.items[i].memory_bytes for i in kept)
            for local, kept in zip(self.items, self.policies(), strict=True)
        )


def joint_bound_ms(
    problem: GlobalProblem, items: Sequence[LocalProblem], budget_bytes: int, *, solver: str = "cbc"
) -> float:
    """A lower bound of the recomputation of every plan under the budget: the relaxation. InfeasibleError."""
    check_items(problem, items)
    points = candidate_points(problem, budget_bytes)
    if not points:
        return 0.0
    relaxed = make_backend(solver, relaxed=True)
    model = JointModel(problem, items, points, budget_bytes)
    if not model.solve(relaxed):
        raise infeasible(_lowest(problem, items), budget_bytes, make_backend(solver))
    return model.value_ms


def solve_joint(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    *,
    solver: str = "cbc",
    time_limit_s: float | None = 60.0,
    gap: float = 0.0,
) -> JointSolution:
    """The best plan there is, or the best found within the limit. InfeasibleError, UsageError.

    It may miss the optimum by `gap` of it, or by a tenth of `gap` of the time to recompute everything.
    """
    bound_ms = joint_bound_ms(problem, items, budget_bytes, solver=solver)
    points = candidate_points(problem, budget_bytes)
    nothing = (None,) * len(problem.units)
    if not points:
        return JointSolution(
            kept=nothing,
            kept_bytes=nothing,
            peak_bytes=int(problem.peaks_bytes(nothing).max()),
            recompute_ms=0.0,
            bound_ms=0.0,
        )
    exact = make_backend(solver, time_limit_s=time_limit_s, relative_gap=gap, absolute_gap=TOTAL * gap / 10)
    model = JointModel(problem, items, points, budget_bytes)
    if not model.solve(exact):
        raise infeasible(_lowest(problem, items), budget_bytes, exact)
    kept = model.policies()
    return JointSolution(
        kept=kept,
        kept_bytes=model.kept_bytes(),
        peak_bytes=int(problem.peaks_bytes(model.kept_bytes()).max()),
        recompute_ms=recompute_ms(problem, items, kept),
        bound_ms=bound_ms,
    )


def recompute_ms(problem: GlobalProblem, items: Sequence[LocalProblem], kept: Sequence[Sequence[int] | None]) -> float:
    """What recomputation costs the step, for the items kept in each unit (None: not checkpointed)."""
    return math.fsum(
        unit.cost_ms(math.fsum(ms for i, (_, ms, _) in enumerate(local.items) if i not in keep))
        for unit, local, keep in zip(problem.units, items, kept, strict=True)
        if keep is not None
    )


def relative_gap(recompute_ms: float, bound_ms: float) -> float:
    """By which fraction a plan lies above a lower bound; 0 if both are 0."""
    if recompute_ms <= bound_ms:
        return 0.0
    return recompute_ms / bound_ms - 1 if bound_ms > 0 else math.inf


def _lowest(problem: GlobalProblem, items: Sequence[LocalProblem]) -> JointModel:
    return JointModel(problem, items, candidate_points(problem), None)


def check_items(problem: GlobalProblem, items: Sequence[LocalProblem]) -> None:
    """UsageError unless the items of every unit add up to its bytes."""
    for unit, local in zip(problem.units, items, strict=True):
        free = sum(local.items[i].memory_bytes for i in local.free())
        if unit.allowed and (unit.stored_bytes, unit.discardable_bytes) != (local.stored_bytes, free):
            raise UsageError(f"the items of unit {unit.name!r} do not add up to its stored and discardable bytes")

"""The joint problem: every operator of every unit in one MILP, the reference for two-level plans.

Points, nesting and the choice of no checkpointing are those of `global_milp.py`. Where all that is not kept runs again, unit u
has, instead of a curve, the items of its `LocalProblem`, with x_ui = 1 if item i is kept (a_i bytes, t_i ms):

    minimise    sum_u cost_u (sum_i t_i (y_u - x_ui) + always_u y_u)         always_u: what is recomputed anyway
    subject to  x_ui <= y_u
                c_u = lowest_u y_u + sum_i a_i x_ui <= 0

The cost is the time itself, times the executions, or what the step pays of it (`GlobalUnit.cost_ms`: a variable above two
lines).
Where recomputation follows a closure (`closure.py`), unit u chooses one policy f of its undominated ones (`frontier.py`: b_f
bytes, t_f ms; Dantzig-Wolfe's form of the same problem, whose relaxation is the convex hull), with z_uf = 1 if it does:

    minimise    sum_u sum_f cost_u(t_f) z_uf
    subject to  sum_f z_uf = y_u
                c_u = lowest_u y_u + sum_f (b_f - stored_u) z_uf <= 0

Equal items of one unit and interchangeable units share variables: cost and memory are sums over them, so only
the number of kept copies counts, and any choice of copies has the same value. The linear relaxation bounds
every plan from below (`joint_bound_ms`); for closures it is that of `global_milp.py` with every corner of the hulls, which
also holds where a curve was too long to be listed.

A long frontier makes a large program, of which an optimum uses little. By the relaxation's prices of memory pi_p, policy f
of unit u costs

    cost_u(t_f) + sum_p pi_p n_pu (b_f - stored_u)

and an optimum's policies are near the least of these. `solve_joint` takes only the `columns` cheapest of each unit if asked to
(price and branch): the plan may then be a little worse than the best, its bound is that of all policies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from autosac.errors import UsageError
from autosac.solvers.backend import make_backend
from autosac.solvers.frontier import frontier, unit_curve
from autosac.solvers.global_milp import CurveModel, infeasible, lowest_peak, out_of_time
from autosac.solvers.local import LocalProblem, LocalSolution
from autosac.solvers.model import TOTAL, PeakModel, exceeded_points, some_points
from autosac.solvers.problem import GlobalProblem, GlobalUnit, candidate_points
from autosac.solvers.symmetry import choose

if TYPE_CHECKING:
    import pulp


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSolution:
    """Per unit the kept items (None: not checkpointed) and bytes; the highest peak; the recomputation."""

    kept: tuple[tuple[int, ...] | None, ...]
    kept_bytes: tuple[int | None, ...]
    peak_bytes: int
    recompute_ms: float
    bound_ms: float


class _Choices(ABC):
    """The variables of one class of units: how many of them choose what."""

    change: Any
    cost_ms: Any

    @abstractmethod
    def policies(self, copies: int) -> list[LocalSolution]:
        """The policies of so many checkpointed units in the present solution."""


class _Items(_Choices):
    """Item by item."""

    def __init__(self, model: PeakModel, c: int, unit: GlobalUnit, local: LocalProblem, copies: int) -> None:
        import pulp

        self._local, self._evenly = local, unit.hidden_weight > 0
        counts = Counter(local.items[i] for i in local.free())
        y = model.y[c]
        self._kept = {
            item: pulp.LpVariable(f"x{c}_{i}", 0, copies * counts[item], pulp.LpInteger)
            for i, item in enumerate(counts)
        }
        for item, x in self._kept.items():
            model.model += x <= counts[item] * y
        self.change = unit.lowest_change_bytes / model.unit_bytes * y
        self.change += pulp.lpSum(item.memory_bytes / model.unit_bytes * x for item, x in self._kept.items())
        all_ms = local.solution(()).recompute_ms
        time = all_ms * y - pulp.lpSum(item.recompute_ms * x for item, x in self._kept.items())
        self.cost_ms = unit.executions * time
        if unit.hidden_weight:
            paid = pulp.LpVariable(f"t{c}", 0)
            model.model += paid >= time - unit.hidden_ms * y
            model.model += paid >= unit.floor_ms * y
            self.cost_ms = unit.executions * (paid + unit.hidden_weight * time)

    def policies(self, copies: int) -> list[LocalSolution]:
        """The first copies keep most, unless some time is hidden in each."""
        local = self._local
        keep = [list(local.settled()) for _ in range(copies)]
        saved_ms = [0.0] * copies
        for item, x in self._kept.items():
            positions = [i for i in local.free() if local.items[i] == item]
            for _ in range(round(x.value())):
                open_ = [k for k in range(copies) if not set(positions) <= set(keep[k])]
                k = min(open_, key=saved_ms.__getitem__) if self._evenly else open_[0]
                keep[k].append(next(i for i in positions if i not in keep[k]))
                saved_ms[k] += item.recompute_ms
        return [local.keeping(items) for items in keep]


class _Columns(_Choices):
    """Policy by policy of the unit's curve."""

    def __init__(
        self, model: PeakModel, c: int, unit: GlobalUnit, policies: Sequence[LocalSolution], copies: int
    ) -> None:
        import pulp

        self._policies = policies
        self._chosen = [pulp.LpVariable(f"z{c}_{f}", 0, copies, pulp.LpInteger) for f in range(len(self._policies))]
        model.model += pulp.lpSum(self._chosen) == model.y[c]
        pairs = list(zip(self._policies, self._chosen, strict=True))
        # From pairs: a sum of products copies every term several times.
        self.change = pulp.LpAffineExpression(
            (z, unit.change_bytes(policy.kept_bytes) / model.unit_bytes) for policy, z in pairs
        )
        self.cost_ms = pulp.LpAffineExpression((z, unit.cost_ms(policy.recompute_ms)) for policy, z in pairs)

    def policies(self, copies: int) -> list[LocalSolution]:
        """Those that keep most first."""
        pairs = zip(reversed(self._policies), reversed(self._chosen), strict=True)
        return [policy for policy, z in pairs for _ in range(round(z.value()))][:copies]


class _Cheapest:
    """Of each unit the `count` policies that cost least by the prices of memory in a solved relaxation."""

    def __init__(self, problem: GlobalProblem, relaxed: PeakModel, count: int) -> None:
        prices = np.array([max(0.0, -(row.pi or 0.0)) for row in relaxed.rows.values()])
        per_byte_ms = prices / relaxed.unit_bytes / relaxed.ms_scale
        self._held_ms = (
            per_byte_ms @ problem.counts_at(tuple(relaxed.rows)) if len(prices) else np.zeros(len(problem.units))
        )
        self._problem, self._count = problem, count

    def of(self, u: int, policies: Sequence[LocalSolution]) -> Sequence[LocalSolution]:
        """Those of unit u, in the order given."""
        unit, held_ms = self._problem.units[u], float(self._held_ms[u])
        costs_ms = [unit.cost_ms(policy.recompute_ms) + held_ms * policy.kept_bytes for policy in policies]
        cheapest = sorted(range(len(policies)), key=costs_ms.__getitem__)[: self._count]
        return [policies[f] for f in sorted(cheapest)]


class JointModel(PeakModel):
    """Units by their operators."""

    def __init__(
        self,
        problem: GlobalProblem,
        items: Sequence[LocalProblem],
        points: tuple[int, ...],
        budget_bytes: int | None,
        cheapest: _Cheapest | None = None,
    ) -> None:
        self.items = items
        self.choices: list[_Choices] = []
        self._cheapest = cheapest
        super().__init__(problem, points, budget_bytes, items)

    def _decide(self, c: int, unit: GlobalUnit, copies: int) -> Any:
        u = self.classes[c].representative
        local = self.items[u]
        choices: _Choices
        if local.closure is None:
            choices = _Items(self, c, unit, local, copies)
        else:
            policies = frontier(local).policies
            some = policies if self._cheapest is None else self._cheapest.of(u, policies)
            choices = _Columns(self, c, unit, some, copies)
        self.choices.append(choices)
        self.model += self.change[c] == choices.change
        return choices.cost_ms

    def policies(self) -> tuple[tuple[int, ...] | None, ...]:
        """Kept items per unit in the present solution."""
        return tuple(None if policy is None else policy.kept for policy in self.solutions())

    def solutions(self) -> tuple[LocalSolution | None, ...]:
        """The policies per unit in the present solution (None: not checkpointed, or it would save nothing).

        A class saves memory as a whole; points that cannot decide are left out if each of its units does (`candidate_points`).
        """
        chosen: dict[int, LocalSolution] = {}
        counts = [round(y.value()) for y in self.y]
        for units, choices in zip(choose(self.problem, self.classes, counts), self.choices, strict=True):
            chosen |= {
                u: policy
                for u, policy in zip(units, choices.policies(len(units)), strict=True)
                if self.problem.units[u].change_bytes(policy.kept_bytes) < 0
            }
        return tuple(chosen.get(u) for u in range(len(self.problem.units)))

    def kept_bytes(self) -> tuple[int | None, ...]:
        """Bytes kept per unit (None: not checkpointed) by the present solution."""
        return tuple(None if policy is None else policy.kept_bytes for policy in self.solutions())


def joint_bound_ms(
    problem: GlobalProblem, items: Sequence[LocalProblem], budget_bytes: int, *, solver: str = "cbc"
) -> float:
    """A lower bound of the recomputation of every plan under the budget: the relaxation. InfeasibleError."""
    relaxed = _relaxation(problem, items, budget_bytes, solver)
    return 0.0 if relaxed is None else relaxed.value_ms


def _relaxation(
    problem: GlobalProblem, items: Sequence[LocalProblem], budget_bytes: int, solver: str
) -> PeakModel | None:
    """The solved relaxation; None if its value is zero, at no price of memory. InfeasibleError."""
    check_items(problem, items)
    points = candidate_points(problem, budget_bytes)
    if not points:
        return None
    relaxed = make_backend(solver, relaxed=True)
    build: Callable[[tuple[int, ...]], PeakModel]
    if any(local.closure is not None for local in items):
        hulls = _with_hulls(problem, items)
        build = partial(CurveModel, hulls, budget_bytes=budget_bytes)
    else:
        build = partial(JointModel, problem, items, budget_bytes=budget_bytes)
    active = some_points(problem, points)
    while True:
        model = build(active)
        if not model.solve(relaxed):
            backend = make_backend(solver)
            lowest = _lowest(problem, items, backend)
            if lowest is not None and problem.peaks_bytes(lowest.kept_bytes()).max() <= budget_bytes:
                return None  # it fits, but not with what is held back for tolerances
            raise infeasible(problem, lowest, budget_bytes)
        more = set(model.exceeded(points)) - set(active)
        if not more:
            return model
        active = tuple(sorted({*active, *more}))


def solve_joint(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    *,
    solver: str = "cbc",
    time_limit_s: float | None = 60.0,
    gap: float = 0.0,
    columns: int | None = None,
) -> JointSolution:
    """The best plan over all operators, or the best one found within `time_limit_s` of processor time.

    It may be above the optimum by `gap` of it, or by a tenth of `gap` of the time to recompute everything. With `columns`,
    only that many policies of each unit are considered.

    Raises:
        InfeasibleError: no plan meets the budget.
        TimeLimitError: none was found within the limit, or with so few policies.
        UsageError: the problem contradicts itself, or the back end is unknown or not installed.
    """
    relaxed = _relaxation(problem, items, budget_bytes, solver)
    bound_ms = 0.0 if relaxed is None else relaxed.value_ms
    cheapest = None if relaxed is None or columns is None else _Cheapest(problem, relaxed, columns)
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
    exact = make_backend(
        solver,
        time_limit_s=time_limit_s,
        relative_gap=gap,
        absolute_gap=TOTAL * gap / 10,
        counts_processor_time=True,
    )
    active = some_points(problem, points)
    while True:
        model = JointModel(problem, items, active, budget_bytes, cheapest)
        if not model.solve(exact):
            if cheapest is not None:
                raise out_of_time()
            lowest = _lowest(problem, items, exact)
            if lowest is None or problem.peaks_bytes(lowest.kept_bytes()).max() > budget_bytes:
                raise infeasible(problem, lowest, budget_bytes)
            if bound_ms > 0:
                raise out_of_time()
            model = lowest
            break
        more = set(exceeded_points(problem, points, model.kept_bytes(), budget_bytes)) - set(active)
        if not more:
            break
        active = tuple(sorted({*active, *more}))
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
        unit.cost_ms(local.keeping(keep).recompute_ms)
        for unit, local, keep in zip(problem.units, items, kept, strict=True)
        if keep is not None
    )


def relative_gap(recompute_ms: float, bound_ms: float) -> float:
    """By which fraction a plan lies above a lower bound; 0 if both are 0."""
    if recompute_ms <= bound_ms:
        return 0.0
    return recompute_ms / bound_ms - 1 if bound_ms > 0 else math.inf


def _lowest(problem: GlobalProblem, items: Sequence[LocalProblem], backend: pulp.LpSolver) -> JointModel | None:
    return lowest_peak(problem, lambda points: JointModel(problem, items, points, None), backend)


def _with_hulls(problem: GlobalProblem, items: Sequence[LocalProblem]) -> GlobalProblem:
    """The problem whose units have all lines of their curves' hulls."""
    units = []
    for unit, local in zip(problem.units, items, strict=True):
        curve = unit_curve(local)
        lines = replace(unit, recompute_ms=curve.recompute_ms, segments=curve.segments)
        units.append(lines.paying(unit.hidden_ms, unit.floor_ms) if unit.allowed else unit)
    return replace(problem, units=tuple(units))


def check_items(problem: GlobalProblem, items: Sequence[LocalProblem]) -> None:
    """UsageError unless the items of every unit add up to its bytes."""
    for unit, local in zip(problem.units, items, strict=True):
        if local.closure is not None:
            curve = unit_curve(local)
            stored, free = curve.stored_bytes, curve.discardable_bytes
        else:
            stored, free = local.stored_bytes, sum(local.items[i].memory_bytes for i in local.free())
        if unit.allowed and (unit.stored_bytes, unit.discardable_bytes) != (stored, free):
            raise UsageError(f"the items of unit {unit.name!r} do not add up to its stored and discardable bytes")

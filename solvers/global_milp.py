"""The global MILP of AUTO-SAC section 5.4: which units are checkpointed, and how much each of them discards.

Notation of `problem.py`; y_u = 1 if unit u is checkpointed, r_u the discarded fraction, c_u its change of
memory, t_u its recomputation time in the step (T_u: that of recomputing all of it). Interchangeable units
share one set of variables, with y_u an integer up to their number (`symmetry.py`); the formulas are for
single ones.

    minimise    sum_u t_u                                                        5.4.1
    subject to  t_u >= T_u (slope_s r_u + intercept_s y_u)     every segment s   5.4.2 (5), `_decide`
                0 <= r_u <= y_u, y_u in {0, 1}                                   5.4.2 (6)
                c_u = lowest_u y_u + discardable_u (y_u - r_u) <= 0              5.4.2 (1), `_decide`
                sum of y over each path to the root <= 1       no nesting        5.4.2 (6), `_add_chains`
                h_p = h_q + sum_u (n_pu - n_qu) c_u            q before p        5.4.2 (2), `_add_points`
                base_p + h_p + sum_u e_pu y_u <= budget        every point p     5.4.2 (3, 4)

Two changes to the paper, both exact. The curve is bounded by y as well as by r (the perspective of a convex
function), so that no big-M is needed and the relaxation is as tight as the curves are; and the constraint
holds at points of the simulated step with all that lives outside of the modules, not at modules. The running
sums h_p keep the number of terms linear in units and points; `problem.candidate_points` drops most points
beforehand.

After the integer decisions are found, the linear program with y fixed gives the final r and, by its duals,
the shadow price: by how many ms less would be recomputed for one more GiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from autosac.errors import InfeasibleError, SimulationError, TimeLimitError
from autosac.solvers.backend import make_backend
from autosac.solvers.model import ABSOLUTE_GAP, MARGIN, TOTAL, PeakModel, exceeded_points, some_points
from autosac.solvers.problem import GlobalProblem, GlobalUnit, candidate_points
from autosac.solvers.symmetry import choose, spread

if TYPE_CHECKING:
    import pulp


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSolution:
    """Per unit: whether it is checkpointed, the discarded fraction, the bytes kept (None: not checkpointed).

    `kept_bytes` includes what must be stored: it is the byte budget of the unit's local policy. `peak_bytes`
    is the highest memory over all points, `recompute_ms` the step's recomputation by the curves, `bound_ms` a
    lower bound of it (linear relaxation). `binding`: points that hold the decision back, `binding_ms_per_gib` what
    one GiB more at each of them alone would save; `shadow_ms_per_gib`: what one GiB more would save.
    """

    discard_fraction: tuple[float | None, ...]
    kept_bytes: tuple[int | None, ...]
    peak_bytes: int
    recompute_ms: float
    bound_ms: float
    binding: tuple[int, ...]
    shadow_ms_per_gib: float
    binding_ms_per_gib: tuple[float, ...] = ()

    @property
    def checkpointed(self) -> tuple[bool, ...]:
        """Whether each unit is checkpointed."""
        return tuple(kept is not None for kept in self.kept_bytes)


class CurveModel(PeakModel):
    """Units by their trade-off curves. `r`: per class, the discarded fractions of its units, summed."""

    def __init__(
        self, problem: GlobalProblem, points: tuple[int, ...], budget_bytes: int | None, margin: float = MARGIN
    ) -> None:
        self.r: list[Any] = []
        super().__init__(problem, points, budget_bytes, margin=margin)

    def _decide(self, c: int, unit: GlobalUnit, copies: int) -> Any:
        import pulp

        y, r, time = self.y[c], pulp.LpVariable(f"r{c}", 0, copies), pulp.LpVariable(f"t{c}", 0)
        self.r.append(r)
        self.model += r <= y
        discardable = unit.discardable_bytes / self.unit_bytes
        lowest = unit.lowest_change_bytes / self.unit_bytes
        self.model += self.change[c] == (lowest + discardable) * y - discardable * r
        total_ms = unit.recompute_ms * unit.executions
        for slope, intercept in unit.segments:
            self.model += time >= total_ms * slope * r + total_ms * intercept * y
        return time

    def fractions(self) -> tuple[float | None, ...]:
        """Discarded fraction per unit in the present solution (None: not checkpointed, or it would save nothing)."""
        counts = [round(y.value()) for y in self.y]
        chosen: dict[int, float] = {}
        for group, units, r in zip(self.classes, choose(self.problem, self.classes, counts), self.r, strict=True):
            if units:
                unit = self.problem.units[group.representative]
                fractions = spread(r.value(), len(units), unit.segments)
                chosen |= {
                    u: fraction
                    for u, fraction in zip(units, fractions, strict=True)
                    if unit.change_bytes(unit.kept_bytes(fraction)) < 0
                }
        return tuple(chosen.get(u) for u in range(len(self.problem.units)))

    def kept_bytes(self) -> tuple[int | None, ...]:
        """Bytes kept per unit (None: not checkpointed) by the present solution."""
        pairs = zip(self.problem.units, self.fractions(), strict=True)
        return tuple(None if fraction is None else unit.kept_bytes(fraction) for unit, fraction in pairs)


def solve_global(
    problem: GlobalProblem,
    budget_bytes: int,
    *,
    solver: str = "cbc",
    time_limit_s: float | None = 10.0,
    gap: float = 5e-3,
) -> GlobalSolution:
    """The decision with the least recomputation (ms) under the budget, up to a relative `gap` or ABSOLUTE_GAP.

    Raises:
        InfeasibleError: no decision meets the budget. The message names the smallest budget that works and the point of the
            step that needs it.
        TimeLimitError: none was found within `time_limit_s`.
        UsageError: the back end `solver` is unknown or not installed.
    """
    exact = make_backend(solver, time_limit_s=time_limit_s, relative_gap=gap, absolute_gap=TOTAL * ABSOLUTE_GAP)
    relaxed = make_backend(solver, time_limit_s=time_limit_s, relaxed=True)
    points = candidate_points(problem, budget_bytes)
    if not points:
        return _result(problem, (None,) * len(problem.units), 0.0, {})
    found = _solved(problem, points, budget_bytes, relaxed, exact)
    if isinstance(found, GlobalSolution):
        return found
    model, bound_ms = found
    model.fix()
    if not model.solve(relaxed):
        raise SimulationError("the MILP solver contradicts itself: its own decisions are infeasible")
    scale = 2**30 / model.unit_bytes / model.ms_scale
    prices = {p: -row.pi * scale for p, row in model.rows.items() if abs(row.pi or 0.0) > 1e-9}
    return _result(problem, model.fractions(), bound_ms, prices)


def _solved(
    problem: GlobalProblem, points: tuple[int, ...], budget_bytes: int, relaxed: pulp.LpSolver, exact: pulp.LpSolver
) -> tuple[CurveModel, float] | GlobalSolution:
    """The solved model and its linear bound; the plan with the lowest peak if none but that is found. InfeasibleError.

    What fits to the byte is found without what is held back for tolerances.
    """
    found = _solved_with(problem, points, budget_bytes, relaxed, exact, MARGIN)
    if found is not None:
        return found
    lowest = lowest_peak(problem, lambda some: CurveModel(problem, some, None), exact)
    if lowest is None or problem.peaks_bytes(lowest.kept_bytes()).max() > budget_bytes:
        raise infeasible(problem, lowest, budget_bytes)
    found = _solved_with(problem, points, budget_bytes, relaxed, exact, 0.0)
    if found is not None and problem.peaks_bytes(found[0].kept_bytes()).max() <= budget_bytes:
        return found[0], 0.0
    return _result(problem, lowest.fractions(), 0.0, {})


def _solved_with(
    problem: GlobalProblem,
    points: tuple[int, ...],
    budget_bytes: int,
    relaxed: pulp.LpSolver,
    exact: pulp.LpSolver,
    margin: float,
) -> tuple[CurveModel, float] | None:
    """The solved model and its linear bound; None if nothing fits. TimeLimitError.

    Points are added as long as the solution exceeds the budget at one that the model has not got (row generation): what is
    left out neither loosens the plan nor makes the bound wrong.
    """
    active = some_points(problem, points)
    while True:
        model = CurveModel(problem, active, budget_bytes, margin=margin)
        if not model.solve(relaxed):
            return None
        bound_ms = model.value_ms
        if not model.solve(exact):
            if margin and _fits(problem, exact, budget_bytes * (1 - 2 * margin)):
                raise out_of_time()
            return None
        more = set(exceeded_points(problem, points, model.kept_bytes(), budget_bytes)) - set(active)
        if not more:
            return model, bound_ms
        active = tuple(sorted({*active, *more}))


def _fits(problem: GlobalProblem, backend: pulp.LpSolver, budget_bytes: float) -> bool:
    lowest = lowest_peak(problem, lambda some: CurveModel(problem, some, None), backend)
    return lowest is None or bool(problem.peaks_bytes(lowest.kept_bytes()).max() <= budget_bytes)


def _result(
    problem: GlobalProblem,
    discard: tuple[float | None, ...],
    bound_ms: float,
    prices_ms: Mapping[int, float],
) -> GlobalSolution:
    kept = tuple(
        None if fraction is None else unit.kept_bytes(fraction)
        for unit, fraction in zip(problem.units, discard, strict=True)
    )
    recompute_ms = problem.recompute_ms(discard)
    return GlobalSolution(
        discard_fraction=discard,
        kept_bytes=kept,
        peak_bytes=int(problem.peaks_bytes(kept).max()),
        recompute_ms=recompute_ms,
        bound_ms=min(bound_ms, recompute_ms),  # what is held back for tolerances may lift it a little
        binding=tuple(prices_ms),
        shadow_ms_per_gib=math.fsum(prices_ms.values()),
        binding_ms_per_gib=tuple(prices_ms.values()),
    )


Model = TypeVar("Model", bound=PeakModel)


def lowest_peak(
    problem: GlobalProblem, build: Callable[[tuple[int, ...]], Model], backend: pulp.LpSolver
) -> Model | None:
    """The solved model with the lowest peak over all points (`build` makes it from some); None if there is none in time."""
    points = candidate_points(problem)
    active = some_points(problem, points)
    while True:
        model = build(active)
        if not model.solve(backend):
            return None
        kept = model.kept_bytes()
        limit = int(problem.peaks_bytes(kept)[list(active)].max())
        more = set(exceeded_points(problem, points, kept, limit)) - set(active)
        if not more:
            return model
        active = tuple(sorted({*active, *more}))


def infeasible(problem: GlobalProblem, lowest: PeakModel | None, budget_bytes: int) -> InfeasibleError:
    """The error for a budget without a solution, from the model with the lowest peak."""
    if lowest is None:
        return out_of_time()
    peaks = problem.peaks_bytes(lowest.kept_bytes())
    needed = int(peaks.max())
    # Of equal peaks the last: discarding more would lower the earlier ones.
    last = max(range(len(peaks)), key=lambda p: (int(peaks[p]), p))
    return InfeasibleError(
        f"no checkpointing plan fits {budget_bytes / 2**30:.2f} GiB: the smallest budget that does is "
        f"{needed / 2**30:.2f} GiB ({(needed - budget_bytes) / 2**20:.0f} MiB more), needed at "
        f"{problem.points[last].label}"
    )


def out_of_time() -> TimeLimitError:
    """Nothing was found in time."""
    return TimeLimitError(
        "no checkpointing plan was found within the solver's time limit: allow more time or a larger gap"
    )

"""The global MILP of AUTO-SAC section 5.4: which units are checkpointed, and how much each of them discards.

Notation of `problem.py`; y_u = 1 if unit u is checkpointed, r_u the discarded fraction, c_u its change of
memory, t_u its recomputation time in the step (T_u: that of recomputing all of it). Interchangeable units
share one set of variables, with y_u an integer up to their number (`symmetry.py`); the formulas are for
single ones.

    minimise    sum_u t_u                                                        5.4.1
    subject to  t_u >= T_u (slope_s r_u + intercept_s y_u)     every segment s   5.4.2 (5), `_add_units`
                0 <= r_u <= y_u, y_u in {0, 1}                                   5.4.2 (6)
                c_u = lowest_u y_u + discardable_u (y_u - r_u) <= 0              5.4.2 (1)
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosac.errors import InfeasibleError, SimulationError
from autosac.solvers.backend import make_backend
from autosac.solvers.problem import GlobalProblem, candidate_points
from autosac.solvers.symmetry import choose, classes

if TYPE_CHECKING:
    import pulp

MARGIN = 1e-8
"""Fraction of the budget held back for the solver's tolerances (700 bytes of 68 GiB)."""

ABSOLUTE_GAP = 2e-4
"""What the optimum is allowed to be missed by, as a fraction of the time to recompute everything once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSolution:
    """Per unit: whether it is checkpointed, the discarded fraction, the bytes kept (None: not checkpointed).

    `kept_bytes` includes what must be stored: it is the byte budget of the unit's local policy. `peak_bytes`
    is the highest memory over all points, `recompute_ms` the step's recomputation by the curves, `bound_ms` a
    lower bound of it (linear relaxation). `binding`: points that hold the decision back; `shadow_ms_per_gib`:
    what one GiB more would save.
    """

    discard_fraction: tuple[float | None, ...]
    kept_bytes: tuple[int | None, ...]
    peak_bytes: int
    recompute_ms: float
    bound_ms: float
    binding: tuple[int, ...]
    shadow_ms_per_gib: float

    @property
    def checkpointed(self) -> tuple[bool, ...]:
        """Whether each unit is checkpointed."""
        return tuple(kept is not None for kept in self.kept_bytes)


class GlobalModel:
    """The PuLP model over the candidate points. Memory counts in `unit_bytes`, all recomputation is 1000."""

    def __init__(self, problem: GlobalProblem, points: tuple[int, ...], budget_bytes: int | None) -> None:
        import pulp

        self.problem = problem
        self.points = points
        self.classes = classes(problem, points)
        scale = budget_bytes or max(problem.points[p].base_bytes for p in points)
        self.unit_bytes = max(scale, 1) / 2**16
        self.model = pulp.LpProblem("global", pulp.LpMinimize)
        self.y: list[Any] = []
        self.r: list[Any] = []
        self.change: list[Any] = []
        outer = [problem.units[u] for g in self.classes if g.parent < 0 for u in g.members]
        total_ms = sum(unit.recompute_ms * unit.executions for unit in outer)
        self.ms_scale = 1000 / total_ms if total_ms > 0 else 1.0
        self.cost = self._add_units()
        self._add_chains()
        if budget_bytes is None:
            self.peak: Any = pulp.LpVariable("peak")
            self.model += self.peak
        else:
            self.peak = budget_bytes * (1 - MARGIN) / self.unit_bytes
            self.model += self.cost
        self._add_points()

    def _add_units(self) -> pulp.LpAffineExpression:
        import pulp

        times = []
        for c, group in enumerate(self.classes):
            unit, copies = self.problem.units[group.representative], len(group.members)
            y = pulp.LpVariable(f"y{c}", 0, copies, pulp.LpInteger)
            r = pulp.LpVariable(f"r{c}", 0, copies)
            change = pulp.LpVariable(f"c{c}", None, 0)
            time = pulp.LpVariable(f"t{c}", 0)
            self.y.append(y)
            self.r.append(r)
            self.change.append(change)
            times.append(time)
            self.model += r <= y
            discardable = unit.discardable_bytes / self.unit_bytes
            lowest = unit.lowest_change_bytes / self.unit_bytes
            self.model += change == (lowest + discardable) * y - discardable * r
            scaled = unit.recompute_ms * unit.executions * self.ms_scale
            for slope, intercept in unit.segments:
                self.model += time >= scaled * slope * r + scaled * intercept * y
        return pulp.lpSum(times)

    def _add_chains(self) -> None:
        import pulp

        inner = {group.parent for group in self.classes}
        for c, group in enumerate(self.classes):
            if c in inner or group.parent < 0:
                continue
            path, above = [c], group.parent
            while above >= 0:
                path.append(above)
                above = self.classes[above].parent
            copies = len(group.members)
            self.model += (
                pulp.lpSum(copies / len(self.classes[k].members) * self.y[k] for k in path) <= copies
            )

    def _add_points(self) -> None:
        import pulp

        self.rows: dict[int, Any] = {}
        of_unit = {group.representative: c for c, group in enumerate(self.classes)}
        running: Any = 0
        wanted = set(self.points)
        moved: dict[int, int] = {}
        for p, point in enumerate(self.problem.points):
            for u, step in point.deltas:
                if u in of_unit:
                    moved[of_unit[u]] = moved.get(of_unit[u], 0) + step
            if p not in wanted:
                continue
            here = pulp.LpVariable(f"h{p}")
            self.model += here == running + pulp.lpSum(n * self.change[c] for c, n in moved.items() if n)
            running, moved = here, {}
            extras = [(of_unit[u], e / self.unit_bytes) for u, e in point.extras if u in of_unit]
            extra = pulp.lpSum(e * self.y[c] for c, e in extras)
            row = here + extra - self.peak <= -point.base_bytes / self.unit_bytes
            self.model += row, f"peak{p}"
            self.rows[p] = row

    def solve(self, backend: pulp.LpSolver) -> bool:
        """Whether a solution was found. SimulationError if the solver itself failed."""
        import pulp

        try:
            self.model.solve(backend)
        except pulp.PulpSolverError as e:
            raise SimulationError(f"the MILP solver failed: {e}") from e
        return self.model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)

    def fix(self) -> None:
        """Hold every y at its rounded value."""
        for y in self.y:
            value = round(y.value())
            y.lowBound = y.upBound = value
            y.cat = "Continuous"

    def decisions(self) -> dict[int, float]:
        """The present solution as unit: discarded fraction."""
        counts = [round(y.value()) for y in self.y]
        return choose(self.classes, counts, [r.value() for r in self.r], self.problem)

    @property
    def value_ms(self) -> float:
        """Value of the cost at the present solution, in ms."""
        return float(self.cost.value() or 0.0) / self.ms_scale


def solve_global(
    problem: GlobalProblem,
    budget_bytes: int,
    *,
    solver: str = "cbc",
    time_limit_s: float | None = 10.0,
    gap: float = 5e-3,
) -> GlobalSolution:
    """Fewest milliseconds of recomputation under the budget, up to a relative `gap` or ABSOLUTE_GAP.

    InfeasibleError if there is no solution: it names the smallest budget that has one and the point that
    needs it, or says that the time limit was too short. UsageError for a back end that is unknown or not
    installed.
    """
    exact = make_backend(
        solver, time_limit_s=time_limit_s, relative_gap=gap, absolute_gap=1000 * ABSOLUTE_GAP
    )
    relaxed = make_backend(solver, time_limit_s=time_limit_s, relaxed=True)
    points = candidate_points(problem, budget_bytes)
    if not points:
        return _result(problem, {}, 0.0, (), 0.0)
    model = GlobalModel(problem, points, budget_bytes)
    if not model.solve(relaxed):
        raise _infeasible(problem, budget_bytes, exact)
    bound_ms = model.value_ms
    if not model.solve(exact):
        raise _infeasible(problem, budget_bytes, exact)
    model.fix()
    if not model.solve(relaxed):
        raise SimulationError("the MILP solver contradicts itself: its own decisions are infeasible")
    price = -math.fsum(row.pi or 0.0 for row in model.rows.values())
    binding = tuple(p for p, row in model.rows.items() if abs(row.pi or 0.0) > 1e-9)
    return _result(
        problem, model.decisions(), bound_ms, binding, price * 2**30 / model.unit_bytes / model.ms_scale
    )


def _result(
    problem: GlobalProblem, chosen: dict[int, float], bound_ms: float, binding: tuple[int, ...], price: float
) -> GlobalSolution:
    discard = tuple(chosen.get(u) for u in range(len(problem.units)))
    kept = _kept(problem, chosen)
    return GlobalSolution(
        discard_fraction=discard,
        kept_bytes=kept,
        peak_bytes=int(problem.peaks_bytes(kept).max()),
        recompute_ms=problem.recompute_ms(discard),
        bound_ms=bound_ms,
        binding=binding,
        shadow_ms_per_gib=price,
    )


def _kept(problem: GlobalProblem, chosen: dict[int, float]) -> tuple[int | None, ...]:
    return tuple(unit.kept_bytes(chosen[u]) if u in chosen else None for u, unit in enumerate(problem.units))


def smallest_peak(problem: GlobalProblem, backend: pulp.LpSolver) -> tuple[int, int]:
    """The smallest budget in bytes that has a solution, and the point that needs it. InfeasibleError."""
    model = GlobalModel(problem, candidate_points(problem), None)
    if not model.solve(backend):
        raise InfeasibleError(
            "no checkpointing plan was found within the solver's time limit: allow more time"
        )
    kept = _kept(problem, model.decisions())
    peaks = problem.peaks_bytes(kept)
    return math.ceil(int(peaks.max()) * (1 + 2 * MARGIN)), int(peaks.argmax())


def _infeasible(problem: GlobalProblem, budget_bytes: int, backend: pulp.LpSolver) -> InfeasibleError:
    needed, point = smallest_peak(problem, backend)
    if needed <= budget_bytes:
        return InfeasibleError(
            "no checkpointing plan was found within the solver's time limit: allow more time or a larger gap"
        )
    return InfeasibleError(
        f"no checkpointing plan fits {budget_bytes / 2**30:.2f} GiB: the smallest budget that does is "
        f"{needed / 2**30:.2f} GiB ({(needed - budget_bytes) / 2**20:.0f} MiB more), needed at "
        f"{problem.points[point].label}"
    )

"""The part of a global model that does not depend on how a unit's policy is described: units, nesting, peaks.

See `global_milp.py` for the notation and the formulas. `PeakModel` is abstract; `CurveModel` (trade-off
curves) and `JointModel` (single operators) are its leaves. Interchangeable units share their variables
(`symmetry.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autosac.solvers.backend import is_solved
from autosac.solvers.problem import GlobalProblem, GlobalUnit
from autosac.solvers.symmetry import classes

if TYPE_CHECKING:
    import pulp

MARGIN = 1e-6
"""Fraction of the budget held back for tolerances, of which the 8 digits of CBC's answers are the largest."""

ABSOLUTE_GAP = 2e-4
"""What the optimum may be missed by, as a fraction of the time to recompute everything once."""

TOTAL = 1000.0
"""The time to recompute everything once, in the units of the models."""


MANY_POINTS = 24
"""Beyond so many candidate points a model begins with some and takes on those that its solution exceeds."""


def some_points(problem: GlobalProblem, points: tuple[int, ...]) -> tuple[int, ...]:
    """Points to begin with: all if they are few, else the highest ones and some of the others, evenly spread."""
    if len(points) <= MANY_POINTS:
        return points
    highest = sorted(points, key=lambda p: -problem.points[p].base_bytes)[: MANY_POINTS // 3]
    return tuple(sorted({*highest, *points[:: len(points) // (MANY_POINTS // 3)]}))


def exceeded_points(
    problem: GlobalProblem, points: tuple[int, ...], kept_bytes: Sequence[int | None], limit_bytes: int
) -> tuple[int, ...]:
    """Those of the points at which a decision exceeds a limit; if they are many, the worst ones and some of the others."""
    peaks = problem.peaks_bytes(kept_bytes)
    over = tuple(p for p in points if peaks[p] > limit_bytes)
    if len(over) <= MANY_POINTS:
        return over
    worst = sorted(over, key=lambda p: -int(peaks[p]))[: MANY_POINTS // 2]
    return tuple(sorted({*worst, *over[:: len(over) // (MANY_POINTS // 2)]}))


class PeakModel(ABC):
    """A PuLP model over the candidate points. Memory counts in `unit_bytes`, time in parts of TOTAL.

    Without a budget it minimises the peak, else the recomputation. `details`: what else must be equal for two
    units to be interchangeable, per unit.
    """

    def __init__(
        self,
        problem: GlobalProblem,
        points: tuple[int, ...],
        budget_bytes: int | None,
        details: Sequence[Hashable] = (),
        margin: float = MARGIN,
    ) -> None:
        import pulp

        self.problem = problem
        self.points = points
        self.rows: dict[int, Any] = {}
        self.classes = classes(problem, points, details)
        scale = budget_bytes or max(problem.points[p].base_bytes for p in points)
        self.unit_bytes = max(scale, 1) / 2**16
        self.model = pulp.LpProblem("peaks", pulp.LpMinimize)
        self.y: list[Any] = []
        self.change: list[Any] = []
        outer = [problem.units[u] for g in self.classes if g.parent < 0 for u in g.members]
        total_ms = sum(unit.recompute_ms * unit.executions for unit in outer)
        self.ms_scale = TOTAL / total_ms if total_ms > 0 else 1.0
        self.cost = self._add_units()
        self._add_chains()
        if budget_bytes is None:
            self.peak: Any = pulp.LpVariable("peak")
            self.model += self.peak
        else:
            self.peak = budget_bytes * (1 - margin) / self.unit_bytes
            self.model += self.cost
        self._add_points()

    @abstractmethod
    def _decide(self, c: int, unit: GlobalUnit, copies: int) -> Any:
        """Add what class c discards, with `self.y[c]` and `self.change[c]`; returns its recomputation in ms."""

    @abstractmethod
    def kept_bytes(self) -> tuple[int | None, ...]:
        """Bytes kept per unit (None: not checkpointed) by the present solution."""

    def _add_units(self) -> pulp.LpAffineExpression:
        import pulp

        times = []
        for c, group in enumerate(self.classes):
            copies = len(group.members)
            self.y.append(pulp.LpVariable(f"y{c}", 0, copies, pulp.LpInteger))
            self.change.append(pulp.LpVariable(f"c{c}", None, 0))
            times.append(self._decide(c, self.problem.units[group.representative], copies))
        return self.ms_scale * pulp.lpSum(times)

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
            self.model += pulp.lpSum(copies / len(self.classes[k].members) * self.y[k] for k in path) <= copies

    def _add_points(self) -> None:
        import pulp

        self.rows = {}
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
        return is_solved(self.model, backend)

    def fix(self) -> None:
        """Hold every y at its rounded value, so that what remains is a linear program."""
        for y in self.y:
            value = round(y.value())
            y.lowBound = y.upBound = value
            y.cat = "Continuous"

    def exceeded(self, points: tuple[int, ...]) -> tuple[int, ...]:
        """Those of some points at which the present solution, whole or not, exceeds the budget, each class evenly."""
        change = np.zeros(len(self.problem.units))
        chosen = np.zeros(len(self.problem.units))
        for c, group in enumerate(self.classes):
            members = list(group.members)
            change[members] = float(self.change[c].value() or 0.0) / len(members)
            chosen[members] = float(self.y[c].value() or 0.0) / len(members)
        counts = self.problem.counts_at(points)
        base = np.array([self.problem.points[p].base_bytes for p in points]) / self.unit_bytes
        extra = [sum(e * chosen[u] for u, e in self.problem.points[p].extras) / self.unit_bytes for p in points]
        over = base + counts @ change + np.array(extra) - float(self.peak)
        return tuple(p for p, excess in zip(points, over, strict=True) if excess > 1e-3)

    @property
    def value_ms(self) -> float:
        """Value of the cost at the present solution, in ms."""
        return float(self.cost.value() or 0.0) / self.ms_scale

"""The global problem as numbers: checkpointable units, and the points of the step where memory could peak.

All memory is stated against the step *without* checkpointing. Checkpointing unit u and keeping `kept` bytes
of what its policy decides changes the memory of one of its executions, between its forward and its backward,
by

    change_u = boundary_u + kept_u - implicit_u,     stored_u <= kept_u <= stored_u + discardable_u

(`implicit_u`: what autograd alone would hold, freed by checkpointing; `boundary_u`: inputs that would have
died; `stored_u`: outputs that must be kept). At point p of the step, n_pu executions of u are in that state,
so

    peak_p = base_p + sum_u n_pu change_u + sum_u e_pu y_u

with base_p from the simulated step, and extras e_pu for what exists only while u is recomputed and run
backward. The n_pu are given as `deltas` from point to point: a unit enters and leaves once per execution,
whatever the number of points, so the problem is linear in its units.

Points that can never decide are dropped (`candidate_points`): a unit whose change would be positive is never
worth checkpointing, so lo_u <= change_u <= 0 with lo_u = min(0, boundary_u + stored_u - implicit_u), and
point p is dominated by point q if, whatever is decided,

    peak_q - peak_p >= base_q - base_p + sum_u lo_u max(0, n_qu - n_pu) - sum_u max(0, e_pu - e_qu) >= 0.

What a unit's recomputation of t milliseconds costs the step need not be t: `hidden_ms` of it may run while the step waits
for something else anyway, and `floor_ms` is what checkpointing the unit costs whatever it recomputes (`GlobalUnit.cost_ms`):

    cost = executions (max(floor, t - hidden) + HIDDEN_WEIGHT t)        the last term only where either is not zero

It is convex in t, so the trade-off curve stays one: `GlobalUnit.paying` replaces its lines by those of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autosac.errors import UsageError

HIDDEN_WEIGHT = 0.01
"""What hidden recomputation counts for, so that the least of it is chosen among plans that take equally long."""


class CurveSegment(NamedTuple):
    """A line of a trade-off curve: fraction of time >= slope * discarded fraction of bytes + intercept."""

    slope: float
    intercept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalUnit:
    """A module that could be checkpointed. Bytes are those of one execution of its forward in the step.

    `parent` is the position of the closest enclosing unit, -1 if none; `allowed` is False where checkpointing
    is ruled out. `recompute_ms` is the time to run its forward once more, `segments` the convex trade-off
    curve (of the cost, as fractions of `recompute_ms`). `hidden_ms`, `floor_ms`: see the module's docstring.
    """

    name: str
    implicit_bytes: int
    boundary_bytes: int
    stored_bytes: int
    discardable_bytes: int
    recompute_ms: float
    segments: tuple[CurveSegment, ...]
    parent: int = -1
    executions: int = 1
    allowed: bool = True
    hidden_ms: float = 0.0
    floor_ms: float = 0.0

    @property
    def lowest_change_bytes(self) -> int:
        """Change of memory between forward and backward if all is discarded (negative: what can be saved)."""
        return self.boundary_bytes + self.stored_bytes - self.implicit_bytes

    @property
    def highest_kept_bytes(self) -> int:
        """What there is to keep."""
        return self.stored_bytes + self.discardable_bytes

    def change_bytes(self, kept_bytes: int) -> int:
        """Change of memory if checkpointed with `kept_bytes`, the stored ones included."""
        return self.boundary_bytes + kept_bytes - self.implicit_bytes

    def kept_bytes(self, discard_fraction: float) -> int:
        """Bytes kept, the stored ones included, at a discarded fraction of the discardable ones, to the nearest byte.

        Rounding down would lose a whole operator wherever the fraction is that of a point of the curve.
        """
        return self.stored_bytes + round((1 - discard_fraction) * self.discardable_bytes)

    def step_ms(self, discard_fraction: float) -> float:
        """What recomputation costs the whole step, by the curve, at a discarded fraction."""
        fraction = max((s.slope * discard_fraction + s.intercept for s in self.segments), default=1.0)
        return self.executions * self.recompute_ms * fraction

    @property
    def hidden_weight(self) -> float:
        """What hidden recomputation of this unit counts for."""
        return HIDDEN_WEIGHT if self.hidden_ms or self.floor_ms else 0.0

    def cost_ms(self, recompute_ms: float) -> float:
        """What the whole step pays if each execution recomputes so much."""
        paid_ms = max(self.floor_ms, recompute_ms - self.hidden_ms) + self.hidden_weight * recompute_ms
        return self.executions * paid_ms

    def paying(self, hidden_ms: float, floor_ms: float) -> GlobalUnit:
        """The unit with the cost of its recomputation, which its `segments` still describe."""
        unit = replace(self, hidden_ms=max(0.0, hidden_ms), floor_ms=max(0.0, floor_ms))
        if not unit.hidden_weight or self.recompute_ms <= 0:
            return replace(unit, hidden_ms=0.0, floor_ms=0.0)
        hidden, floor, weight = unit.hidden_ms / self.recompute_ms, unit.floor_ms / self.recompute_ms, HIDDEN_WEIGHT
        lines = [CurveSegment((1 + weight) * s.slope, (1 + weight) * s.intercept - hidden) for s in self.segments]
        lines += [CurveSegment(weight * s.slope, weight * s.intercept + floor) for s in self.segments]
        return replace(unit, segments=upper_envelope(lines))


def upper_envelope(lines: Sequence[CurveSegment]) -> tuple[CurveSegment, ...]:
    """Those of the lines that are the highest somewhere in (0, 1), by ascending slope."""
    found: list[tuple[float, CurveSegment]] = []  # with where each of them becomes the highest
    for line in sorted(lines):
        start = 0.0
        while found:
            since, last = found[-1]
            rise = line.slope - last.slope
            cross = (last.intercept - line.intercept) / rise if rise > 0 else -math.inf
            if rise <= 0 and line.intercept <= last.intercept:
                cross = math.inf
            start = max(0.0, cross)
            if cross > since:
                break
            found.pop()
        if start < 1.0:
            found.append((start, line))
    return tuple(line for _, line in found)


class PeakPoint(NamedTuple):
    """A point of the step where memory could peak, in time order.

    `base_bytes`: live bytes there without checkpointing. `deltas`: (unit, by how many executions n_pu differs
    from the previous point). `extras`: (unit, bytes e_pu >= 0 here if it is checkpointed). `label` says where
    it is, for people.
    """

    label: str
    base_bytes: int
    deltas: tuple[tuple[int, int], ...] = ()
    extras: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalProblem:
    """Units (parents before children) and peak points in time order."""

    units: tuple[GlobalUnit, ...]
    points: tuple[PeakPoint, ...]
    _counts: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.points:
            raise UsageError("the global problem needs at least one point of the step")
        for i, unit in enumerate(self.units):
            sizes = (unit.implicit_bytes, unit.boundary_bytes, unit.stored_bytes, unit.discardable_bytes)
            if min(sizes) < 0 or unit.executions < 1 or not -1 <= unit.parent < i:
                raise UsageError(f"unit {unit.name!r} has negative bytes, no execution, or a parent after it")
            if not (unit.recompute_ms >= 0 and math.isfinite(unit.recompute_ms)):
                raise UsageError(f"unit {unit.name!r} has an impossible recomputation time {unit.recompute_ms}")
        if any(extra < 0 for point in self.points for _, extra in point.extras):
            raise UsageError("what checkpointing adds at a point of the step cannot be negative")
        object.__setattr__(self, "_counts", self._delta_rows())

    def _delta_rows(self) -> np.ndarray:
        """Rows (point, unit, n before, n after), one per delta."""
        alive = [0] * len(self.units)
        rows = []
        for p, point in enumerate(self.points):
            for u, step in point.deltas:
                rows.append((p, u, alive[u], alive[u] + step))
                alive[u] += step
                if alive[u] < 0:
                    raise UsageError(f"unit {self.units[u].name!r} leaves more often than it enters")
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    def counts(self, point: int) -> np.ndarray:
        """n_pu for all units at a point."""
        result = np.zeros(len(self.units), dtype=np.int64)
        before = self._counts[self._counts[:, 0] <= point]
        np.add.at(result, before[:, 1], before[:, 3] - before[:, 2])
        return result

    def counts_at(self, points: Sequence[int]) -> np.ndarray:
        """n_pu as rows for these points."""
        order = np.argsort(points, kind="stable")
        result = np.zeros((len(points), len(self.units)), dtype=np.int64)
        running, done = np.zeros(len(self.units), dtype=np.int64), 0
        for k in order:
            upto = int(np.searchsorted(self._counts[:, 0], points[k], side="right"))
            rows = self._counts[done:upto]
            np.add.at(running, rows[:, 1], rows[:, 3] - rows[:, 2])
            result[k], done = running, upto
        return result

    def peaks_bytes(self, kept_bytes: Sequence[int | None]) -> np.ndarray:
        """Memory at each point for a decision: bytes kept per unit, None where it is not checkpointed."""
        change = [0 if kept is None else u.change_bytes(kept) for u, kept in zip(self.units, kept_bytes, strict=True)]
        rows = self._counts
        moved = np.zeros(len(self.points), dtype=np.int64)
        np.add.at(moved, rows[:, 0], np.array(change, dtype=np.int64)[rows[:, 1]] * (rows[:, 3] - rows[:, 2]))
        extra = [sum(e for u, e in p.extras if kept_bytes[u] is not None) for p in self.points]
        return np.asarray(np.array([p.base_bytes for p in self.points]) + np.cumsum(moved) + np.array(extra))

    def recompute_ms(self, discard_fraction: Sequence[float | None]) -> float:
        """Recomputation by the curves for a decision: fraction discarded, None where not checkpointed."""
        pairs = zip(self.units, discard_fraction, strict=True)
        return math.fsum(unit.step_ms(fraction) for unit, fraction in pairs if fraction is not None)

    def levels(self) -> list[list[int]]:
        """The units at each depth of the module tree, with those less deep that have none below them."""
        units = self.units
        depth = [0] * len(units)
        for u, unit in enumerate(units):
            if unit.parent >= 0:
                depth[u] = depth[unit.parent] + 1
        parents = {unit.parent for unit in units}
        return [
            [u for u in range(len(units)) if depth[u] == level or (depth[u] < level and u not in parents)]
            for level in range(max(depth, default=-1) + 1)
        ]

    def candidates(self) -> tuple[bool, ...]:
        """Units that may be checkpointed and would save memory."""
        return tuple(u.allowed and u.lowest_change_bytes < 0 for u in self.units)


def candidate_points(problem: GlobalProblem, budget_bytes: int | None = None) -> tuple[int, ...]:
    """Points that could decide, in time order; with a budget, only those that could exceed it."""
    active = np.array(problem.candidates(), dtype=bool)
    low = np.array([u.lowest_change_bytes for u in problem.units], dtype=np.int64) * active
    base = np.array([p.base_bytes for p in problem.points])
    extras = [{u: e for u, e in p.extras if active[u]} for p in problem.points]
    highest = base + np.array([sum(e.values()) for e in extras])
    rows = problem._counts
    open_ = np.ones(len(base), dtype=bool) if budget_bytes is None else highest > budget_bytes
    kept = []
    for q in np.argsort(-highest, kind="stable"):
        if not open_[q]:
            continue
        kept.append(int(q))
        least = base[q] - base
        if len(rows):
            u, here = rows[:, 1], problem.counts(int(q))
            change = np.maximum(0, here[u] - rows[:, 3]) - np.maximum(0, here[u] - rows[:, 2])
            moved = np.zeros(len(base), dtype=np.int64)
            np.add.at(moved, rows[:, 0], low[u] * change)
            least = least + np.cumsum(moved) + int(np.sum(low * np.maximum(0, here)))
        for p in np.flatnonzero(open_ & (least >= 0)):
            over = sum(max(0, e - extras[q].get(u, 0)) for u, e in extras[p].items())
            if least[p] >= over:
                open_[p] = False
    return tuple(sorted(kept))

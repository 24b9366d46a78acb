"""Interchangeable units: a model's identical blocks as one class with a count.

Two units belong to one class if their numbers, their columns at the points that count (n_pu and e_pu) and all
units below them are the same, and their parents belong to one class too. Any solution can then permute the
copies, so that a class with N copies needs one integer Y (how many are checkpointed) and one real R (the sum
of their discarded fractions) instead of N of each: by convexity of the curve, equal fractions are optimal
among Y copies, and

    no unit is nested in another     <=>     sum over each path of Y_c / N_c <= 1

since copies below a checkpointed copy are the only ones lost to its children. `spread` turns Y and R back
into decisions.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autosac.solvers.problem import CurveSegment, GlobalProblem, GlobalUnit


@dataclass(frozen=True, slots=True)
class UnitClass:
    """Interchangeable candidates: `members` (units, ascending); the closest enclosing class or -1."""

    members: tuple[int, ...]
    parent: int

    @property
    def representative(self) -> int:
        """Any member."""
        return self.members[0]


def classes(problem: GlobalProblem, points: tuple[int, ...], details: Sequence[Hashable] = ()) -> tuple[UnitClass, ...]:
    """The candidates that are held at any of the points, by class, parents first.

    `details`: what else must be equal, per unit.
    """
    columns = _columns(problem, points)
    candidate = tuple(
        wanted and any(step for _, step, _ in column)
        for wanted, column in zip(problem.candidates(), columns, strict=True)
    )
    above = _closest(problem, candidate)
    children: dict[int, list[int]] = defaultdict(list)
    shape: dict[int, int] = {}
    names: dict[object, int] = {}
    for u in range(len(problem.units) - 1, -1, -1):
        if candidate[u]:
            unit = problem.units[u]
            key = (_numbers(unit), details[u] if details else None, columns[u], tuple(sorted(children[u])))
            shape[u] = names.setdefault(key, len(names))
            children[above[u]].append(shape[u])
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    place: dict[tuple[int, int], int] = {}
    of_unit = {-1: -1}
    for u in sorted(shape):
        key2 = (of_unit[above[u]], shape[u])
        of_unit[u] = place.setdefault(key2, len(place))
        found[key2].append(u)
    return tuple(UnitClass(tuple(members), parent) for (parent, _), members in found.items())


def _numbers(unit: GlobalUnit) -> tuple[object, ...]:
    return (
        unit.implicit_bytes,
        unit.boundary_bytes,
        unit.stored_bytes,
        unit.discardable_bytes,
        unit.recompute_ms,
        unit.segments,
        unit.executions,
        unit.hidden_ms,
        unit.floor_ms,
    )


def _closest(problem: GlobalProblem, candidate: Sequence[bool]) -> list[int]:
    """For every unit the closest candidate above it, or -1."""
    above: list[int] = []
    for unit in problem.units:
        parent = unit.parent
        above.append(-1 if parent < 0 else parent if candidate[parent] else above[parent])
    return above


def _columns(problem: GlobalProblem, points: tuple[int, ...]) -> list[tuple[tuple[int, int, int], ...]]:
    """Per unit, its changes over the points that count: (point, step of n since the one before, extra)."""
    step: list[dict[int, int]] = [defaultdict(int) for _ in problem.units]
    extra: list[dict[int, int]] = [defaultdict(int) for _ in problem.units]
    wanted = iter([*points, -1])
    next_point = next(wanted)
    for p, point in enumerate(problem.points):
        if next_point < 0:
            break
        for u, count in point.deltas:
            step[u][next_point] += count
        if p == next_point:
            for u, size in point.extras:
                extra[u][p] += size
            next_point = next(wanted)
    return [tuple((p, s[p], e[p]) for p in sorted({*s, *e}) if s[p] or e[p]) for s, e in zip(step, extra, strict=True)]


def spread(total: float, copies: int, segments: tuple[CurveSegment, ...]) -> list[float]:
    """Fractions of `copies` units with this sum that cost what equal ones cost, most of them at breakpoints.

    Whole operators can be discarded exactly at breakpoints of a tight curve, so this leaves one unit in
    between.
    """
    mean = min(1.0, max(0.0, total / copies))
    low, high = 0.0, 1.0
    ordered = sorted(segments)
    for a, b in itertools.pairwise(ordered):
        if b.slope > a.slope:
            corner = (a.intercept - b.intercept) / (b.slope - a.slope)
            if low < corner <= mean and corner < high:
                low = corner
            elif mean < corner < high:
                high = corner
    above = (mean - low) / (high - low) * copies
    whole = min(copies, int(above + 1e-9))
    rest = copies - whole
    if not rest:
        return [high] * copies
    between = low + max(0.0, above - whole) * (high - low)
    return [high] * whole + [between] + [low] * (rest - 1)


def choose(problem: GlobalProblem, groups: tuple[UnitClass, ...], counts: Sequence[int]) -> list[list[int]]:
    """The units to checkpoint, by class, from the counts Y; earlier members first."""
    members = {u for group in groups for u in group.members}
    above = _closest(problem, [u in members for u in range(len(problem.units))])
    lost: set[int] = set()  # checkpointed units and all below them
    chosen = []
    for group, count in zip(groups, counts, strict=True):
        lost.update(u for u in group.members if above[u] in lost)
        units = [u for u in group.members if u not in lost][:count]
        assert len(units) == count, "the path constraints leave room for every count"
        lost.update(units)
        chosen.append(units)
    return chosen

"""The trade-off curve of one unit: every policy that no other one beats in both bytes and recomputation, by a Pareto sweep.

`frontier` walks the operators of the unit's closure (`closure.py`) from the last to the first and extends partial policies
(Nemhauser and Ullmann 1969, for a graph in place of a list). When it comes to operator c, all that could ask for c's results
is decided; so if one of them is asked for, its item is kept or made, and where it is made, c runs and asks for what it
reads. Two partial policies that ask for the same results and have decided alike about items that still matter go on alike:
of those, only the undominated stay. The number of such states follows the width of the graph, not its length.

Times are counted in whole ticks, 2^-46 of the unit's, so that sums in another order compare equal. Beyond `limit` partial
policies the sweep keeps one of each `CELLS`-th part of the unit's bytes: policies stay real ones, but some may be missing,
and `exact` is False. Beyond `STATES` states it takes the corners of the hull (`min_cut.py`), which the curve always holds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autosac.errors import InfeasibleError
from autosac.solvers.local import LocalProblem, LocalSolution, knapsack
from autosac.solvers.min_cut import lower_hull, min_cut_hull
from autosac.solvers.problem import CurveSegment

LIMIT = 30_000
STATES = 600
CELLS = 512
_TICKS = 2.0**46
_WORD = 62

Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """A unit's undominated policies by ascending bytes and descending time, and the lower convex hull of all policies.

    `exact`: no undominated policy is missing. `hull`: (bytes, ms), a lower bound of every policy's time between its corners.
    """

    policies: tuple[LocalSolution, ...]
    hull: tuple[tuple[int, float], ...]
    exact: bool

    def within(self, budget_bytes: int) -> LocalSolution | None:
        """The fastest policy within a budget; None if none is."""
        at = bisect.bisect_right(self.policies, budget_bytes, key=lambda policy: policy.kept_bytes)
        return self.policies[at - 1] if at else None


class _State(NamedTuple):
    """What a partial policy asks for below here (results), and the items it has kept or made that still matter: bit sets."""

    asked: int
    kept: int
    made: int


class _Labels(NamedTuple):
    """Partial policies of one state: bytes, ticks, and the kept items as rows of words of 62 bits."""

    sizes: Array
    ticks: Array
    items: Array


@functools.lru_cache(maxsize=1024)
def frontier(problem: LocalProblem, limit: int = LIMIT) -> Frontier:
    """The curve of a unit, exact unless it takes more than `limit` partial policies. Equal problems share one."""
    sweep = _Sweep(problem, limit)
    labels = sweep.run()
    kept: list[tuple[int, ...]] = [] if labels is None else [sweep.chosen(row) for row in labels.items]
    exact = labels is not None and sweep.exact
    points: tuple[tuple[int, float], ...] = ()
    if not exact:
        corners = min_cut_hull(problem)
        points = tuple((corner.memory_bytes, corner.recompute_ms) for corner in corners)
        kept += [corner.kept for corner in corners]
    policies = _undominated(problem.solution(chosen) for chosen in kept)
    if exact:
        points = lower_hull((policy.kept_bytes, policy.recompute_ms) for policy in policies)
    return Frontier(policies=policies, hull=points, exact=exact)


def pareto(problem: LocalProblem, budget_bytes: int) -> LocalSolution:
    """The fastest policy of the unit's curve within the budget.

    Raises:
        InfeasibleError: the operators that must be kept need more than the budget.
    """
    curve = frontier(problem)
    found = curve.within(budget_bytes)
    if found is None:
        least = curve.policies[0].kept_bytes
        raise InfeasibleError(
            f"the operators that must be kept need {least} bytes, {least - budget_bytes} more than the module's budget of "
            f"{budget_bytes}"
        )
    if not curve.exact and problem.closure is None:
        return min(found, knapsack(problem, budget_bytes), key=lambda policy: policy.recompute_ms)
    return found


class UnitCurve(NamedTuple):
    """The hull of a unit's curve as a `GlobalUnit` has it (see there): `segments` and `corners` are
    fractions of bytes discarded and of `recompute_ms`.
    """

    stored_bytes: int
    discardable_bytes: int
    recompute_ms: float
    segments: tuple[CurveSegment, ...]
    corners: tuple[tuple[float, float], ...] = ()


@functools.lru_cache(maxsize=1024)
def unit_curve(problem: LocalProblem) -> UnitCurve:
    """The lines of the hull, all of them; `recompute_ms` is what a unit recomputes that keeps nothing at all."""
    hull = frontier(problem).hull
    plain_ms = problem.demand.measured(frozenset())[1]
    stored_bytes, discardable_bytes = hull[0][0], hull[-1][0] - hull[0][0]
    if not discardable_bytes or plain_ms <= 0:
        return UnitCurve(
            stored_bytes, 0, plain_ms, (CurveSegment(0.0, hull[0][1] / plain_ms if plain_ms > 0 else 0.0),)
        )
    found = []
    for (less, slow_ms), (more, fast_ms) in itertools.pairwise(hull):
        slope = (slow_ms - fast_ms) / (more - less) * (discardable_bytes / plain_ms)
        start = (hull[-1][0] - more) / discardable_bytes
        found.append(CurveSegment(slope, fast_ms / plain_ms - slope * start))
    corners = tuple(((hull[-1][0] - kept) / discardable_bytes, ms / plain_ms) for kept, ms in reversed(hull))
    return UnitCurve(stored_bytes, discardable_bytes, plain_ms, tuple(sorted(found)), corners)


def _undominated(policies: Iterable[LocalSolution]) -> tuple[LocalSolution, ...]:
    found: list[LocalSolution] = []
    for policy in sorted(policies, key=lambda p: (p.kept_bytes, p.recompute_ms, p.kept)):
        if not found or policy.recompute_ms < found[-1].recompute_ms:
            found.append(policy)
    return tuple(found)


class _Sweep:
    """See the module's docstring."""

    def __init__(self, problem: LocalProblem, limit: int) -> None:
        self.exact = True
        self._problem = problem
        self._limit = limit
        self._closure = closure = problem.demand
        self._words = len(problem.items) // _WORD + 1
        total_ms = sum(operator.recompute_ms for operator in closure.operators)
        self._scale = _TICKS / total_ms if total_ms > 0 else 0.0
        self._made_by: list[list[int]] = [[] for _ in closure.operators]
        first_maker: dict[int, int] = {}  # of an item: nothing about it matters below that operator
        for s, result in enumerate(closure.results):
            for c in result.makers:
                self._made_by[c].append(s)
            first_maker[result.item] = min(first_maker.get(result.item, result.makers[0]), result.makers[0])
        self._ends: list[int] = [0] * len(closure.operators)
        for item, c in first_maker.items():
            self._ends[c] |= 1 << item
        self._cell_bytes = max(1, sum(result.memory_bytes for result in closure.results) // CELLS)

    def chosen(self, row: Array) -> tuple[int, ...]:
        """The items that a label keeps."""
        return tuple(
            word * _WORD + bit for word, bits in enumerate(row.tolist()) for bit in range(_WORD) if bits >> bit & 1
        )

    def run(self) -> _Labels | None:
        """All undominated policies; None if there are too many states."""
        start = _Labels(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, self._words), np.int64))
        asked = _bits(self._closure.asked)
        states = {_State(asked, 0, 0): start}
        for c in range(len(self._closure.operators) - 1, -1, -1):
            if not self._made_by[c]:
                continue
            gathered: dict[_State, list[_Labels]] = {}
            for state, labels in states.items():
                for after, extended in self._step(c, state, labels):
                    gathered.setdefault(after, []).append(extended)
            if len(gathered) > STATES:
                return None
            states = {state: _pruned(parts) for state, parts in gathered.items()}
            if sum(len(labels.sizes) for labels in states.values()) > self._limit:
                self.exact = False
                states = {state: _thinned(labels, self._cell_bytes) for state, labels in states.items()}
        return _pruned(list(states.values()))

    def _step(self, c: int, state: _State, labels: _Labels) -> Iterable[tuple[_State, _Labels]]:
        """What a state becomes at operator c, for every choice about the items of which something is asked for."""
        results = self._closure.results
        here = [s for s in self._made_by[c] if state.asked >> s & 1]
        if not here:
            yield self._left(c, state), labels
            return
        items = sorted({results[s].item for s in here})
        for choice in itertools.product(*(self._choices(item, state) for item in items)):
            kept = state.kept | _bits(item for item, keep in zip(items, choice, strict=True) if keep)
            made = state.made | _bits(item for item, keep in zip(items, choice, strict=True) if not keep)
            asked, ticks, nbytes = state.asked, 0, 0
            if not all(choice):
                operator = self._closure.operators[c]
                ticks = round(operator.recompute_ms * self._scale)
                asked |= _bits(operator.reads)
            for s in here:
                if results[s].makers[0] == c and kept >> results[s].item & 1:
                    nbytes += results[s].memory_bytes
            new = [item for item in items if kept >> item & 1 and not state.kept >> item & 1]
            yield self._left(c, _State(asked, kept, made)), self._added(labels, nbytes, ticks, new)

    def _choices(self, item: int, state: _State) -> tuple[bool, ...]:
        forced = self._problem.items[item].forced
        if forced is not None:
            return (forced,)
        if state.kept >> item & 1:
            return (True,)
        return (False,) if state.made >> item & 1 else (False, True)

    def _left(self, c: int, state: _State) -> _State:
        """The state without what does not matter below operator c."""
        gone = _bits(s for s in self._made_by[c] if self._closure.results[s].makers[0] == c)
        return _State(state.asked & ~gone, state.kept & ~self._ends[c], state.made & ~self._ends[c])

    def _added(self, labels: _Labels, nbytes: int, ticks: int, kept: list[int]) -> _Labels:
        items = labels.items
        if kept:
            items = items.copy()
            for item in kept:
                items[:, item // _WORD] |= 1 << item % _WORD
        return _Labels(labels.sizes + nbytes, labels.ticks + ticks, items)


def _bits(positions: Iterable[int]) -> int:
    found = 0
    for position in positions:
        found |= 1 << position
    return found


def _pruned(parts: list[_Labels]) -> _Labels:
    """The undominated of some labels of one state, by ascending bytes."""
    if len(parts) == 1:
        return parts[0]
    sizes, ticks, items = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((ticks, sizes))
    sizes, ticks, items = sizes[order], ticks[order], items[order]
    better = np.ones(len(ticks), dtype=bool)
    better[1:] = ticks[1:] < np.minimum.accumulate(ticks)[:-1]
    return _Labels(sizes[better], ticks[better], items[better])


def _thinned(labels: _Labels, cell_bytes: int) -> _Labels:
    """Of the labels in each cell of bytes, the fastest."""
    cells = labels.sizes // cell_bytes
    last = np.ones(len(cells), dtype=bool)
    last[:-1] = cells[1:] != cells[:-1]
    return _Labels(labels.sizes[last], labels.ticks[last], labels.items[last])

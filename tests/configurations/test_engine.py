"""Best-first search against exhaustive search."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.running.engine import Bound, PendingWork, SearchState, Value, best_first

VALUES = st.lists(
    st.tuples(st.one_of(st.floats(0.1, 100), st.just(math.inf)), st.floats(0, 1), st.floats(0, 1), st.integers(0, 4)),
    min_size=1,
    max_size=25,
)


class Toy:
    """Candidates with a value, a loose and a tighter bound; work of the same group serves all of it."""

    def __init__(self, rows: list[tuple[float, float, float, int]]) -> None:
        self.rows = rows
        self.groups: set[int] = set()
        self.worked: set[int] = set()
        self.stopped: dict[int, float] = {}

    def loose(self, i: int) -> float:
        value, a, b, _ = self.rows[i]
        return min(value, 100.0) * a * b

    def step(self, i: int, bound: float, best: float) -> Bound | Value | PendingWork:
        value, a, _, group = self.rows[i]
        tight = min(value, 100.0) * a
        if group not in self.groups:
            return PendingWork(("group", group), ("group", group))
        if bound < tight:
            return Bound(tight)
        if i in self.worked:
            return Value(value)
        return PendingWork(("value", i), ("value", i))

    def finished(self, work: PendingWork, future: Future[object]) -> None:
        kind, which = work.content
        (self.groups if kind == "group" else self.worked).add(which)


def done(_: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(None)
    return future


@given(VALUES, st.integers(1, 4), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1.0, -1.0]))
def test_the_best_is_the_least_within_the_gap(
    rows: list[tuple[float, float, float, int]], at_once: int, gap: float, later: float
) -> None:
    """Nothing that was left out is better than the best by more than the gap; with no gap it is exhaustive search's,
    in whatever order candidates are taken.
    """
    toy = Toy(rows)
    found = best_first(
        [(i, toy.loose(i)) for i in range(len(rows))],
        toy,
        done,
        at_once=at_once,
        gap=gap,
        priority=lambda i, bound: bound * (1 + later * rows[i][3]),
    )
    least = min(row[0] for row in rows)
    assert found.proven
    assert set(found.values) | set(found.pruned) == set(range(len(rows)))
    if math.isinf(least):
        assert found.best_candidate is None
    else:
        assert found.best_candidate is not None and rows[found.best_candidate][0] == found.best
        assert (1 - gap) * found.best <= least <= found.best


def test_what_takes_long_may_be_put_off() -> None:
    """The second candidate has the smaller bound, and a value above the first one's: taken later, it is never worked out."""
    toy = Toy([(2.0, 1.0, 1.0, 0), (3.0, 0.8, 0.8, 0)])
    candidates = [(i, toy.loose(i)) for i in range(2)]
    assert best_first(candidates, toy, done, priority=lambda i, bound: i).best == 2.0
    assert toy.worked == {0}


def test_bounds_above_the_best_are_never_worked_out() -> None:
    """Of candidates with exact bounds only the best is worked out."""
    toy = Toy([(float(i + 1), 1.0, 1.0, 0) for i in range(10)])
    found = best_first([(i, toy.loose(i)) for i in range(10)], toy, done)
    assert toy.worked == {0}
    assert found.best == 1.0
    assert found.pruned == {i: float(i + 1) for i in range(1, 10)}


def test_the_closest_of_the_others_is_known() -> None:
    """Of what bounds ruled out, the one with the least bound; infinite bounds are no rivals."""
    outcome: SearchState[str] = SearchState()
    assert outcome.closest is None
    outcome.pruned = {"a": 7.0, "b": 3.0, "c": math.inf}
    assert outcome.closest == ("b", 3.0)


def test_an_interrupted_search_leaves_what_it_found() -> None:
    """What was found before an interrupt is in the outcome that was given, and what that rules out; it is not proven."""
    toy = Toy([(5.0, 0.1, 1.0, 0), (4.0, 0.5, 1.0, 1), (9.0, 1.0, 1.0, 2)])
    outcome: SearchState[int] = SearchState()

    def submit(content: tuple[str, int]) -> Future[object]:
        if content == ("group", 1):
            raise KeyboardInterrupt
        return done(content)

    with contextlib.suppress(KeyboardInterrupt):
        best_first([(i, toy.loose(i)) for i in range(3)], toy, submit, outcome=outcome)
    assert outcome.best == 5.0 and outcome.best_candidate == 0 and not outcome.proven
    assert outcome.pruned == {2: 9.0}

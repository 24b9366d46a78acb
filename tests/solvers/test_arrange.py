"""Which of several equal units keeps what."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.solvers import (
    CurveSegment,
    GlobalProblem,
    GlobalUnit,
    LocalItem,
    LocalProblem,
    LocalSolution,
    PeakPoint,
    knapsack,
)
from autosac.solvers.arrange import in_order, levelled

LOCAL = LocalProblem(items=(LocalItem(60, 6.0, None), LocalItem(30, 2.0, None), LocalItem(10, 0.5, None)))
NAMES = "abcd"


def problem(*points: PeakPoint, local: LocalProblem = LOCAL) -> GlobalProblem:
    """Four equal units that hold 100 bytes each without checkpointing."""
    unit = {
        "implicit_bytes": sum(item.memory_bytes for item in local.items),
        "boundary_bytes": 0,
        "stored_bytes": 0,
        "discardable_bytes": sum(item.memory_bytes for item in local.items),
        "recompute_ms": 8.5,
        "segments": (CurveSegment(8.5, 0.0),),
        "parent": -1,
    }
    return GlobalProblem(units=tuple(GlobalUnit(name=name, **unit) for name in NAMES), points=points)  # type: ignore[arg-type]


def held(base_bytes: int, units: str, but: str = "") -> PeakPoint:
    """A point at which these units are held that were not before, and some are no more."""
    changes = [(NAMES.index(name), 1) for name in units] + [(NAMES.index(name), -1) for name in but]
    return PeakPoint(units, base_bytes, tuple(changes))


def keep(*kept: tuple[int, ...]) -> dict[int, LocalSolution]:
    """A policy for each of the first units."""
    return {u: LOCAL.solution(items) for u, items in enumerate(kept)}


def test_the_first_keep_the_most() -> None:
    """Units that keep 0, 90, 10 and 60 bytes: afterwards 90, 60, 10 and 0; the same policies."""
    policies = keep((), (0, 1), (2,), (0,))
    found = in_order(problem(held(400, NAMES)), [LOCAL] * 4, 160, policies)
    assert [found[u].kept_bytes for u in range(4)] == [90, 60, 10, 0]


def test_the_least_first_where_the_most_first_exceed() -> None:
    """At an earlier point only the first two units are held and may keep 60 bytes together: 10 + 0, not 90 + 60."""
    points = held(300, "ab"), held(400, "cd")
    policies = keep((), (0, 1), (2,), (0,))
    found = in_order(problem(*points), [LOCAL] * 4, 160, policies)
    assert [found[u].kept_bytes for u in range(4)] == [0, 10, 60, 90]


def test_left_where_both_orders_exceed() -> None:
    """The first two units and the last two may keep 95 bytes together: 90 + 0 and 60 + 10, neither 90 + 60 nor 60 + 90."""
    points = held(265, "ab"), held(400, "cd"), held(265, "", but="ab")
    policies = keep((), (0, 1), (2,), (0,))
    found = in_order(problem(*points), [LOCAL] * 4, 160, policies)
    assert [found[u].kept_bytes for u in range(4)] == [0, 90, 10, 60]


def test_units_that_differ_stay_apart() -> None:
    """Units with other operators swap nothing."""
    other = LocalProblem(items=(LocalItem(60, 6.0, None), LocalItem(40, 2.5, None)))
    policies = {0: LOCAL.solution(()), 1: other.solution((0,))}
    assert in_order(problem(held(400, NAMES)), [LOCAL, other, LOCAL, LOCAL], 400, policies) == policies


def test_level() -> None:
    """200 bytes in all, 50 for each: 30 + 10 in all four, and with the 40 that are left two keep the next set, of 60.

    Of 50 bytes the best set is {30, 10} (2.5 ms), the next larger one that saves more is {60}.
    """
    policies = keep((0, 1, 2), (0, 1, 2), (), ())
    found = levelled(problem(held(400, NAMES)), [LOCAL] * 4, 200, knapsack, policies)
    assert [found[u].kept_bytes for u in range(4)] == [60, 60, 40, 40]


def test_level_within_every_peak() -> None:
    """The first two units may keep 50 bytes together, so they do not get 60 each: nothing is levelled."""
    policies = keep((), (), (0, 1, 2), (0, 1, 2))
    found = levelled(problem(held(350, "ab"), held(400, "cd")), [LOCAL] * 4, 200, knapsack, policies)
    assert found == policies


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 4)), min_size=4, max_size=4),
)
def test_what_is_kept_in_all_does_not_grow(rows: list[tuple[int, int]], chosen: list[set[int]]) -> None:
    """Levelled units keep together at most what they kept before, and differ by one step of the trade-off at the most."""
    local = LocalProblem(items=tuple(LocalItem(size, float(ms), None) for size, ms in rows))
    policies = {u: local.solution(tuple(sorted(i for i in kept if i < len(rows)))) for u, kept in enumerate(chosen)}
    before = sum(policy.kept_bytes for policy in policies.values())
    whole = problem(held(4 * sum(size for size, _ in rows), NAMES), local=local)
    found = levelled(whole, [local] * 4, 10**6, knapsack, policies)
    assert sum(policy.kept_bytes for policy in found.values()) <= before
    assert len({policy.kept for policy in found.values()}) <= 2


def test_no_units() -> None:
    """Nothing to arrange is nothing arranged."""
    assert in_order(problem(held(400, NAMES)), [LOCAL] * 4, 400, {}) == {}
    assert levelled(problem(held(400, NAMES)), [LOCAL] * 4, 400, knapsack, {}) == {}

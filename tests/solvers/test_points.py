"""Which points of the step a global model begins with, and which it takes on: worked out by hand."""

from __future__ import annotations

import pytest

from autosac.solvers import CurveSegment, GlobalProblem, GlobalUnit, PeakPoint
from autosac.solvers.model import MANY_POINTS, exceeded_points, some_points


def problem(*base_bytes: int) -> GlobalProblem:
    """A unit that holds 100 bytes at every point, beside these."""
    line = (CurveSegment(1.0, 0.0),)
    unit = GlobalUnit(
        name="u",
        implicit_bytes=100,
        boundary_bytes=0,
        stored_bytes=0,
        discardable_bytes=100,
        recompute_ms=1.0,
        segments=line,
    )
    points = [PeakPoint(str(p), nbytes, ((0, 1),) if p == 0 else ()) for p, nbytes in enumerate(base_bytes)]
    return GlobalProblem(units=(unit,), points=tuple(points))


def test_few_points_are_all_there_from_the_beginning() -> None:
    """24 are few."""
    few = tuple(range(MANY_POINTS))
    assert MANY_POINTS == 24 and some_points(problem(*range(24)), few) == few


@pytest.mark.parametrize(("count", "step"), [(25, 3), (48, 6), (80, 10)])
def test_many_points_begin_with_the_highest_and_some_evenly_spread(count: int, step: int) -> None:
    """The eight highest ones, and every third, sixth or tenth."""
    points = tuple(range(count))
    rising = some_points(problem(*points), points)
    assert rising == tuple(sorted({*range(0, count, step), *range(count - 8, count)}))
    falling = some_points(problem(*reversed(points)), points)
    assert falling == tuple(sorted({*range(0, count, step), *range(8)}))


def test_only_some_of_the_points_given_are_looked_at() -> None:
    """The highest of those given, not of the problem."""
    points = tuple(range(0, 60, 2))
    found = some_points(problem(*range(60)), points)
    assert found == tuple(sorted({*points[::3], *points[-8:]}))


def test_points_that_exceed_a_limit() -> None:
    """With all kept, a point takes what is there without checkpointing; with nothing kept, 100 bytes less."""
    what = problem(*range(0, 500, 10))
    points = tuple(range(50))
    assert exceeded_points(what, points, [None], 470) == (48, 49)
    assert exceeded_points(what, points, [100], 469) == (47, 48, 49)
    assert exceeded_points(what, points, [0], 389) == (49,)
    assert exceeded_points(what, points[:49], [0], 389) == ()


def test_of_many_points_the_worst_are_taken_on_and_some_evenly_spread() -> None:
    """24 at most are taken as they are; of 48 the twelve worst, and every fourth."""
    what = problem(*range(48))
    points = tuple(range(48))
    assert exceeded_points(what, points, [None], 23) == points[24:]
    assert exceeded_points(what, points, [None], -1) == tuple(sorted({*range(0, 48, 4), *range(36, 48)}))
    turned = problem(*reversed(range(48)))
    assert exceeded_points(turned, points, [None], -1) == tuple(sorted({*range(0, 48, 4), *range(12)}))

"""Trade-off curves as few lines: upper bound, convexity, tightness."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import UsageError
from autosac.estimator.sac_curves import Points, evaluate, tight_chords, upper_bound


@st.composite
def curves(draw: st.DrawFn) -> Points:
    """A module's curve: groups of random sizes and times, accumulated in MSPS order from what is always recomputed."""
    groups = draw(
        st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 10.0, allow_nan=False)), min_size=1, max_size=40)
    )
    groups.sort(key=lambda group: group[1] / group[0])
    always = draw(st.floats(0.0, 5.0))
    x = np.cumsum([0.0, *(size for size, _ in groups)])
    y = always + np.cumsum([0.0, *(ms for _, ms in groups)])
    return tuple(zip((x / x[-1]).tolist(), (y / y[-1]).tolist(), strict=True))


def staircase(points: Points, x: float) -> float:
    """Time fraction of the greedy policy: whole groups, as many as it takes to discard x."""
    return next((y for end, y in points if end >= x - 1e-12), points[-1][1])


@settings(deadline=None, max_examples=150)
@given(curves(), st.integers(1, 6))
def test_upper_bound_bounds_the_staircase(points: Points, segments: int) -> None:
    """At every corner and in between, the maximum of the lines is not below the greedy policy's time."""
    lines = upper_bound(points, segments)
    assert 1 <= len(lines) <= segments
    for (start, _), (_, y) in pairwise(points):
        assert evaluate(lines, start) >= y - 1e-9  # the corner: just beyond `start` the next group is gone
    for x in np.linspace(0, 1, 33).tolist():
        assert evaluate(lines, x) >= staircase(points, x) - 1e-9


@settings(deadline=None, max_examples=150)
@given(curves(), st.integers(1, 6), st.sampled_from([upper_bound, tight_chords]))
def test_lines_ascend_and_are_convex(
    points: Points, segments: int, fit: Callable[[Points, int], tuple[tuple[float, float], ...]]
) -> None:
    """Slopes are not negative and do not fall, and each line is the highest somewhere: their maximum is the model."""
    lines = fit(points, segments)
    assert all(slope >= 0 for slope, _ in lines)
    assert all(a[0] <= b[0] + 1e-9 for a, b in pairwise(lines))
    for a, b in ((0.0, 0.5), (0.1, 0.9), (0.4, 1.0)):
        assert evaluate(lines, (a + b) / 2) <= (evaluate(lines, a) + evaluate(lines, b)) / 2 + 1e-12


@settings(deadline=None, max_examples=150)
@given(curves(), st.integers(1, 6))
def test_chords_lie_between_the_points_and_the_staircase(points: Points, segments: int) -> None:
    """Never below the chain of points, exact at both ends; with a line for each pair of points exact at all of them."""
    lines = tight_chords(points, segments)
    assert len(lines) <= segments
    assert all(evaluate(lines, x) >= y - 1e-9 for x, y in points)
    for x, y in (points[0], points[-1]):
        assert evaluate(lines, x) == pytest.approx(y, abs=1e-9)
    full = tight_chords(points, len(points))
    assert all(evaluate(full, x) == pytest.approx(y, abs=1e-8) for x, y in points)
    assert all(evaluate(full, x) <= staircase(points, x) + 1e-8 for x in np.linspace(0, 1, 33).tolist())


def test_equal_groups() -> None:
    """Four equal groups: the chords are the diagonal, the bound is the diagonal lifted by one group."""
    points = ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0))
    assert tight_chords(points) == ((1.0, 0.0),)
    lines = upper_bound(points)
    for x, y in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        assert evaluate(lines, x) == pytest.approx(y)


def test_fewer_lines_drop_the_point_that_matters_least() -> None:
    """Without (0.5, 0.26) the chain rises by 0.01 there, without (0.25, 0.1) by 0.03."""
    points = ((0.0, 0.0), (0.25, 0.1), (0.5, 0.26), (0.75, 0.44), (1.0, 1.0))
    lines = tight_chords(points, 3)
    assert evaluate(lines, 0.25) == pytest.approx(0.1)
    assert evaluate(lines, 0.5) == pytest.approx(0.27)
    assert evaluate(lines, 0.75) == pytest.approx(0.44)


def test_nothing_to_discard_is_a_constant() -> None:
    """One point (0, 0.3): that fraction is recomputed in any case."""
    assert tight_chords(((0.0, 0.3),)) == upper_bound(((0.0, 0.3),)) == ((0.0, 0.3),)


@pytest.mark.parametrize(
    ("points", "segments", "message"),
    [
        (((0.0, 0.0), (1.0, 1.0)), 0, "at least one segment, not 0"),
        ((), 5, "must ascend"),
        (((0.0, 0.0), (0.0, 1.0)), 5, "must ascend"),
        (((0.0, 0.5), (1.0, 0.4)), 5, "must ascend"),
        (((0.0, 0.0), (0.5, 0.9), (1.0, 1.0)), 5, "must be in MSPS order"),
    ],
)
def test_wrong_curves_are_named(points: Points, segments: int, message: str) -> None:
    """Points that are no trade-off curve end in a clear error, for both models."""
    for fit in (tight_chords, upper_bound):
        with pytest.raises(UsageError, match=message):
            fit(points, segments)


def test_rounding_of_a_tiny_step_is_no_disorder() -> None:
    """A group with 1e-8 of the memory, on one line with its neighbours but for rounding, is accepted."""
    third = 0.3 + 1e-8
    points = ((0.0, 0.0), (0.3, 0.1), (third, float(np.nextafter(third / 3, 0))), (0.6, 0.2), (1.0, 0.9))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert slopes[1] < slopes[0] - 1e-9  # what rounding makes of equal slopes
    assert max(s.slope + s.intercept for s in tight_chords(points)) == pytest.approx(0.9)

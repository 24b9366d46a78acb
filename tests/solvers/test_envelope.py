"""The upper envelope of lines, and what a unit's recomputation costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.problem import CurveSegment, GlobalUnit, upper_envelope

LINES = st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6)), min_size=1, max_size=6)


@given(LINES)
def test_the_envelope_is_the_highest_line(rows: list[tuple[int, int]]) -> None:
    """Everywhere, by no more lines than are the highest somewhere, by ascending slope."""
    lines = [CurveSegment(float(slope), float(intercept)) for slope, intercept in rows]
    found = upper_envelope(lines)
    places = [k / 1000 for k in range(1, 1000)]
    highest = [max(line.slope * x + line.intercept for line in lines) for x in places]
    assert [max(line.slope * x + line.intercept for line in found) for x in places] == highest
    assert [line.slope for line in found] == sorted({line.slope for line in found})
    for line in found:
        rest = [other for other in found if other != line]
        if rest:
            assert any(line.slope * x + line.intercept > max(o.slope * x + o.intercept for o in rest) for x in places)


def test_a_line_through_the_others_crossing_is_left_out() -> None:
    """It is nowhere higher than both."""
    lines = [CurveSegment(0.0, 0.0), CurveSegment(1.0, -0.5), CurveSegment(2.0, -1.0)]
    assert upper_envelope(lines) == (lines[0], lines[2])


def test_of_parallel_lines_the_higher_one_counts() -> None:
    """Whatever their order; equal ones are one."""
    low, high = CurveSegment(1.0, 0.0), CurveSegment(1.0, 0.5)
    assert upper_envelope([low, high]) == upper_envelope([high, low]) == upper_envelope([high, high]) == (high,)


def test_lines_that_are_highest_only_at_the_ends_are_left_out() -> None:
    """The open interval counts."""
    flat = CurveSegment(0.0, 1.0)
    assert upper_envelope([flat, CurveSegment(1.0, 0.0)]) == (flat,)
    assert upper_envelope([flat, CurveSegment(-1.0, 1.0)]) == (flat,)


@pytest.mark.parametrize(
    ("hidden_ms", "floor_ms", "costs"),
    [
        (0.0, 0.0, {0.0: 0.0, 4.0: 8.0}),
        (1.0, 0.0, {0.5: 0.0, 1.0: 0.0, 4.0: 6.0}),
        (0.0, 2.0, {0.0: 4.0, 1.0: 4.0, 4.0: 8.0}),
        (1.0, 2.0, {1.0: 4.0, 3.0: 4.0, 4.0: 6.0}),
    ],
)
def test_what_recomputation_costs_the_step(hidden_ms: float, floor_ms: float, costs: dict[float, float]) -> None:
    """Two executions: what exceeds the hidden part, at least the floor; a hidden millisecond counts for a little."""
    plain = GlobalUnit(
        name="u",
        implicit_bytes=100,
        boundary_bytes=0,
        recompute_ms=4.0,
        stored_bytes=0,
        discardable_bytes=100,
        executions=2,
        segments=(CurveSegment(1.0, 0.0),),
    )
    unit = plain.paying(hidden_ms, floor_ms)
    for recompute_ms, cost_ms in costs.items():
        extra = 2 * unit.hidden_weight * recompute_ms
        assert unit.cost_ms(recompute_ms) == pytest.approx(cost_ms + extra)
        assert unit.step_ms(recompute_ms / 4.0) == pytest.approx(cost_ms + extra)
    assert (unit.hidden_weight > 0) == bool(hidden_ms or floor_ms) and unit.hidden_weight <= 0.01
    assert plain.paying(-1.0, -1.0) == plain

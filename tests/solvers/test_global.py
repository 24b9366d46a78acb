"""The global MILP: cases worked out by hand, an independent reference, what it says when nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autosac.errors import InfeasibleError, UsageError
from autosac.solvers import (
    CurveSegment,
    GlobalProblem,
    GlobalSolution,
    GlobalUnit,
    PeakPoint,
    candidate_points,
    solve_global,
)
from autosac.solvers.global_milp import CurveModel
from autosac.solvers.symmetry import classes, spread

Reference = Callable[[GlobalProblem, int], float]
FEW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
CURVES = (
    (CurveSegment(1.0, 0.0),),
    (CurveSegment(0.5, 0.0), CurveSegment(1.5, -0.5)),
    (CurveSegment(0.25, 0.25), CurveSegment(0.75, 0.0)),
    (CurveSegment(0.0, 0.5),),
)
LINE = CURVES[0]


def unit(name: str = "u", **values: object) -> GlobalUnit:
    """A unit of 100 implicit and 100 discardable bytes, 10 ms, and the diagonal as its curve."""
    defaults: dict[str, object] = {
        "implicit_bytes": 100,
        "boundary_bytes": 0,
        "stored_bytes": 0,
        "discardable_bytes": 100,
        "recompute_ms": 10.0,
        "segments": LINE,
    }
    return GlobalUnit(name=name, **(defaults | values))  # type: ignore[arg-type]


def problem(units: list[GlobalUnit], points: list[PeakPoint]) -> GlobalProblem:
    """A problem from lists."""
    return GlobalProblem(units=tuple(units), points=tuple(points))


def exact(what: GlobalProblem, budget_bytes: int) -> GlobalSolution:
    """The solution without any gap."""
    return solve_global(what, budget_bytes, gap=0.0)


@st.composite
def problems(draw: st.DrawFn) -> GlobalProblem:
    """Up to four units in a random tree, each held for a stretch of up to seven points, recomputed at its end."""
    count = draw(st.integers(1, 4))
    units, stretches = [], []
    last = draw(st.integers(2, 6))
    for u in range(count):
        discardable = draw(st.integers(0, 12)) * 10
        units.append(
            GlobalUnit(
                name=f"u{u}",
                parent=draw(st.integers(-1, u - 1)),
                implicit_bytes=draw(st.integers(0, 12)) * 10,
                boundary_bytes=draw(st.integers(0, 3)) * 10,
                stored_bytes=draw(st.integers(0, 3)) * 10,
                discardable_bytes=discardable,
                recompute_ms=float(draw(st.integers(1, 20))),
                segments=draw(st.sampled_from(CURVES)),
                allowed=draw(st.sampled_from([True, True, True, False])),
            )
        )
        first = draw(st.integers(0, last - 1))
        stretches.append((first, draw(st.integers(first + 1, last)), draw(st.integers(0, 4)) * 10))
    points = []
    for p in range(last + 1):
        enter = [(u, 1) for u, (a, _, _) in enumerate(stretches) if a == p]
        leave = [(u, -1) for u, (_, b, _) in enumerate(stretches) if b == p]
        extras = tuple((u, e) for u, (_, b, e) in enumerate(stretches) if b == p)
        points.append(PeakPoint(f"p{p}", draw(st.integers(0, 40)) * 10, tuple(enter + leave), extras))
    return GlobalProblem(units=tuple(units), points=tuple(points))


def test_budget_above_the_peak_leaves_everything() -> None:
    """Nothing is checkpointed, at no cost."""
    solution = solve_global(problem([unit()], [PeakPoint("p", 300, ((0, 1),))]), 300)
    assert solution.checkpointed == (False,)
    assert (solution.peak_bytes, solution.recompute_ms, solution.shadow_ms_per_gib) == (300, 0.0, 0.0)


def test_cheapest_unit_is_discarded_first() -> None:
    """150 bytes are too many: the unit at 10 ms per 100 bytes goes, and half of the one at 20 ms: 10 + 10 ms.

    One byte more would save 20 ms / 100 bytes.
    """
    points = [PeakPoint("p", 300, ((0, 1), (1, 1)))]
    solution = exact(problem([unit("slow", recompute_ms=20.0), unit("fast")], points), 150)
    assert solution.discard_fraction == (pytest.approx(0.5, abs=1e-5), pytest.approx(1.0, abs=1e-5))
    assert solution.recompute_ms == pytest.approx(20.0, rel=1e-4)
    assert solution.bound_ms == pytest.approx(20.0, rel=1e-4)
    assert solution.shadow_ms_per_gib == pytest.approx(0.2 * 2**30)
    assert solution.binding == (0,)
    assert solution.peak_bytes <= 150


def test_saving_everything_costs_more_than_no_checkpointing() -> None:
    """A policy could hold 184 bytes where autograd holds 100 (trap 6): to save 1 byte, 85 must be discarded."""
    solution = exact(problem([unit(discardable_bytes=184)], [PeakPoint("p", 200, ((0, 1),))]), 199)
    assert solution.kept_bytes == (99,)
    assert solution.recompute_ms == pytest.approx(10.0 * 85 / 184, rel=1e-4)


def test_what_checkpointing_holds_counts() -> None:
    """Of 100 bytes, 30 of input and 20 of stored outputs stay: at most 50 can be saved."""
    what = problem([unit(boundary_bytes=30, stored_bytes=20, discardable_bytes=60)], [PeakPoint("p", 200, ((0, 1),))])
    assert exact(what, 151).kept_bytes == (21,)
    with pytest.raises(InfeasibleError):
        exact(what, 149)


def test_no_nested_units() -> None:
    """Either the parent (20 ms for 200 bytes) or its children: both children for 150 bytes, 6 + 3 ms."""
    units = [
        unit("block", implicit_bytes=200, discardable_bytes=200, recompute_ms=20.0),
        unit("block.a", parent=0, recompute_ms=6.0),
        unit("block.b", parent=0, recompute_ms=6.0),
    ]
    points = [PeakPoint("p", 300, ((0, 1), (1, 1), (2, 1)))]
    solution = exact(problem(units, points), 150)
    assert not solution.checkpointed[0]
    assert solution.recompute_ms == pytest.approx(9.0, rel=1e-4)
    only_parent = [units[0], replace(units[1], allowed=False), units[2]]
    solution = exact(problem(only_parent, points), 150)
    assert solution.checkpointed == (True, False, False)
    assert solution.recompute_ms == pytest.approx(15.0, rel=1e-4)


def test_only_units_that_are_held_at_the_peak_help() -> None:
    """The peak of 300 lies before the second unit's forward: only the first one, slow as it is, can lower it."""
    points = [PeakPoint("early", 300, ((0, 1),)), PeakPoint("late", 250, ((0, -1), (1, 1)))]
    solution = exact(problem([unit("slow", recompute_ms=50.0), unit("fast")], points), 250)
    assert solution.checkpointed == (True, False)
    assert solution.recompute_ms == pytest.approx(25.0, rel=1e-4)


def test_recomputation_takes_room_of_its_own() -> None:
    """Discarding lowers the first point to 200, but recomputing needs 30 bytes on top of the second's 180."""
    points = [PeakPoint("end of forward", 300, ((0, 1),)), PeakPoint("recomputation", 180, ((0, -1),), ((0, 30),))]
    what = problem([unit()], points)
    assert exact(what, 210).peak_bytes <= 210
    with pytest.raises(InfeasibleError, match="needed at recomputation"):
        exact(what, 209)


def test_every_microbatch_in_flight_counts() -> None:
    """Three executions alive: discarding 20 bytes of one saves 60, and 2 ms are spent four times in the step."""
    points = [PeakPoint("p", 600, ((0, 3),)), PeakPoint("q", 600, ((0, -1),)), PeakPoint("r", 100, ((0, 1),))]
    solution = exact(problem([unit(executions=4)], [points[0], points[2]]), 540)
    assert solution.kept_bytes == (80,)
    assert solution.recompute_ms == pytest.approx(8.0, rel=1e-4)
    assert exact(problem([unit(executions=4)], points), 540).kept_bytes == (70,)


def test_the_error_teaches() -> None:
    """Full discarding leaves 200 of 300 bytes: the error names that budget, the shortfall and where it is needed."""
    scale = 2**20
    units = [unit(implicit_bytes=100 * scale, discardable_bytes=100 * scale)]
    what = problem(units, [PeakPoint("aten.mm in the loss", 300 * scale, ((0, 1),)), PeakPoint("q", 150 * scale)])
    with pytest.raises(InfeasibleError) as caught:
        exact(what, 100 * scale)
    message = str(caught.value)
    assert "smallest budget that does is 0.20 GiB (100 MiB more), needed at aten.mm in the loss" in message
    assert re.search(r"fits 0\.10 GiB", message)


def test_cbc_finds_the_optimum() -> None:
    """With its heuristics CBC answered 0.5 ms: to checkpoint u1 instead, which has nothing to recompute, fits as well."""
    units = [
        unit(implicit_bytes=0, discardable_bytes=0, recompute_ms=1.0),
        unit(implicit_bytes=30, discardable_bytes=0, recompute_ms=1.0, parent=0),
        unit(implicit_bytes=20, discardable_bytes=20, recompute_ms=1.0, parent=0),
    ]
    points = [
        PeakPoint("p0", 0, ((0, 1), (1, 1), (2, 1))),
        PeakPoint("p1", 20, ((0, -1),), ((0, 0),)),
        PeakPoint("p2", 0, ((1, -1), (2, -1)), ((1, 0), (2, 0))),
    ]
    assert exact(problem(units, points), 10).recompute_ms == 0.0


@FEW
@given(problems(), st.integers(0, 60))
def test_milp_meets_the_reference(reference: Reference, what: GlobalProblem, budget: int) -> None:
    """The optimum is that of one linear program per set of units over all points; the peak is within the budget."""
    expected = reference(what, budget * 10)
    if expected == float("inf"):
        with pytest.raises(InfeasibleError):
            exact(what, budget * 10)
        return
    try:
        solution = exact(what, budget * 10)
    except InfeasibleError:  # the reference fits to the byte, with fractions of bytes kept
        assert reference(what, budget * 10 - 1) == float("inf")
        return
    total = sum(u.recompute_ms for u in what.units)
    # What fits to the byte need not be found: a millionth is held back.
    least = reference(what, budget * 10 - 1)
    assert expected - 1e-3 * total <= solution.recompute_ms
    assert least == float("inf") or solution.recompute_ms <= least + 1e-3 * total
    assert solution.bound_ms <= solution.recompute_ms + 1e-6 * total
    assert solution.peak_bytes == what.peaks_bytes(solution.kept_bytes).max() <= budget * 10


@FEW
@given(problems(), st.integers(0, 60), st.integers(0, 20))
def test_more_budget_never_costs_time(what: GlobalProblem, budget: int, more: int) -> None:
    """Recomputation falls with the budget."""
    try:
        tight = exact(what, budget * 10)
    except InfeasibleError:
        assume(False)
        return
    total = sum(u.recompute_ms for u in what.units)
    assert exact(what, (budget + more) * 10).recompute_ms <= tight.recompute_ms + 1e-3 * total


@settings(FEW, max_examples=60)
@given(problems(), st.data())
def test_dropped_points_never_decide(what: GlobalProblem, data: st.DataObject) -> None:
    """For any decision worth taking, the highest peak is at one of the candidate points."""
    kept = [
        data.draw(
            st.sampled_from([None, u.stored_bytes, min(u.highest_kept_bytes, u.implicit_bytes - u.boundary_bytes)])
        )
        if candidate
        else None
        for u, candidate in zip(what.units, what.candidates(), strict=True)
    ]
    peaks = what.peaks_bytes(kept)
    assert peaks[list(candidate_points(what))].max() == peaks.max()


def test_dominated_points_are_dropped() -> None:
    """Block b's backward lies below block b + 1's by what the blocks hold; only the loss and the last are left."""
    blocks = 6
    units = [unit(f"layers.{b}", boundary_bytes=10) for b in range(blocks)]
    points = [PeakPoint(f"forward {b}", 100 * (b + 1), ((b, 1),)) for b in range(blocks)]
    points.append(PeakPoint("loss", 100 * blocks + 50))
    points += [PeakPoint(f"backward {b}", 100 * (b + 1) + 20, ((b, -1),), ((b, 10),)) for b in reversed(range(blocks))]
    what = problem(units, points)
    assert candidate_points(what) == (6, 7)
    assert candidate_points(what, 640) == (6,)
    assert candidate_points(what, 650) == ()


def test_identical_blocks_become_one_class() -> None:
    """Four blocks held at the only point, each with two different children: three classes of four, with their parent."""
    units: list[GlobalUnit] = []
    for b in range(4):
        units.append(unit(f"{b}", implicit_bytes=150, discardable_bytes=150))
        units.append(unit(f"{b}.a", parent=3 * b, recompute_ms=4.0))
        units.append(unit(f"{b}.b", parent=3 * b, implicit_bytes=50, discardable_bytes=50, recompute_ms=6.0))
    what = problem(units, [PeakPoint("p", 1000, tuple((u, 1) for u in range(12)))])
    found = [(group.members, group.parent) for group in classes(what, (0,))]
    assert found == [((0, 3, 6, 9), -1), ((1, 4, 7, 10), 0), ((2, 5, 8, 11), 0)]


def test_counts_of_nested_classes_become_disjoint_units(reference: Reference) -> None:
    """Two kinds of nested units, three copies each, solved as classes: as good as unit by unit, and nothing nested."""
    units: list[GlobalUnit] = []
    for b in range(3):
        units.append(unit(f"{b}", implicit_bytes=150, discardable_bytes=150, recompute_ms=11.0, segments=CURVES[2]))
        units.append(unit(f"{b}.a", parent=2 * b, recompute_ms=9.0, segments=CURVES[2]))
    what = problem(units, [PeakPoint("p", 1000, tuple((u, 1) for u in range(6)))])
    for budget in (950, 850, 750, 650, 560):
        solution = exact(what, budget)
        assert solution.recompute_ms == pytest.approx(reference(what, budget), rel=1e-3)
        chosen = solution.checkpointed
        assert not any(chosen[u.parent] and chosen[i] for i, u in enumerate(units) if u.parent >= 0)


@pytest.mark.parametrize(
    ("total", "expected"),
    [(0.0, [0.0] * 4), (4.0, [1.0] * 4), (2.0, [0.5] * 4), (2.25, [0.75, 0.5, 0.5, 0.5]), (3.1, [1.0, 1.0, 0.6, 0.5])],
)
def test_spread_prefers_the_corners_of_the_curve(total: float, expected: list[float]) -> None:
    """The curve has corners at 0, 0.5 and 1; at most one of four units lies in between."""
    assert spread(total, 4, CURVES[1]) == pytest.approx(expected)


def test_a_corner_at_the_end_of_the_curve_is_no_breakpoint() -> None:
    """Two lines that meet where everything is discarded: two units that discard all discard all."""
    assert spread(2.0, 2, (CurveSegment(0.5, 0.0), CurveSegment(1.5, -1.0))) == [1.0, 1.0]


@settings(FEW, max_examples=100)
@given(st.floats(0, 1), st.integers(1, 9), st.sampled_from(CURVES))
def test_spread_keeps_sum_and_cost(mean: float, copies: int, segments: tuple[CurveSegment, ...]) -> None:
    """The sum is exact, and by convexity the cost is that of equal fractions, the least there is."""
    fractions = spread(mean * copies, copies, segments)
    curve = replace(unit(), segments=segments)
    assert len(fractions) == copies and all(0 <= f <= 1 for f in fractions)
    assert sum(fractions) == pytest.approx(mean * copies, abs=1e-9)
    assert sum(curve.step_ms(f) for f in fractions) == pytest.approx(copies * curve.step_ms(mean), abs=1e-6)


def test_a_finer_gap_is_never_worse_and_the_limit_is_obeyed() -> None:
    """80 blocks with prices of their own: the result is within the gap of its bound."""
    rng = np.random.default_rng(0)
    units = [unit(f"layers.{b}", recompute_ms=10 + float(rng.random()), segments=CURVES[1]) for b in range(80)]
    what = problem(units, [PeakPoint("p", 10_000, tuple((u, 1) for u in range(80)))])
    solution = solve_global(what, 6_000, gap=0.01, time_limit_s=20.0)
    assert solution.peak_bytes <= 6_000
    assert solution.bound_ms * (1 - 1e-6) <= solution.recompute_ms <= 1.01 * solution.bound_ms


def test_highs_agrees_with_cbc() -> None:
    """Both back ends find the same optimum, bound and price."""
    pytest.importorskip("highspy")
    points = [PeakPoint("p", 300, ((0, 1), (1, 1)))]
    what = problem([unit("slow", recompute_ms=20.0), unit("fast")], points)
    one, other = solve_global(what, 150, solver="highs", gap=0.0), exact(what, 150)
    assert one.recompute_ms == pytest.approx(other.recompute_ms, rel=1e-6)
    assert one.bound_ms == pytest.approx(other.bound_ms, rel=1e-6)
    assert one.shadow_ms_per_gib == pytest.approx(other.shadow_ms_per_gib, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problem([unit()], []), "at least one point"),
        (lambda: problem([unit(implicit_bytes=-1)], [PeakPoint("p", 1)]), "unit 'u' has negative bytes"),
        (lambda: problem([unit(parent=0)], [PeakPoint("p", 1)]), "a parent after it"),
        (lambda: problem([unit(recompute_ms=float("nan"))], [PeakPoint("p", 1)]), "impossible recomputation time"),
        (lambda: problem([unit()], [PeakPoint("p", 1, ((0, -1),))]), "leaves more often than it enters"),
        (lambda: problem([unit()], [PeakPoint("p", 1, (), ((0, -5),))]), "cannot be negative"),
        (lambda: solve_global(problem([], [PeakPoint("p", 1)]), 1, gap=1.0), r"gap must be in \[0, 1\), not 1"),
        (lambda: solve_global(problem([], [PeakPoint("p", 1)]), 1, time_limit_s=0), "positive number of seconds"),
        (lambda: solve_global(problem([], [PeakPoint("p", 1)]), 1, solver="x"), "unknown MILP solver 'x'"),
    ],
)
def test_wrong_use_is_named(call: Callable[[], object], message: str) -> None:
    """Each wrong argument ends in one clear error."""
    with pytest.raises(UsageError, match=message):
        call()


def test_fractions_of_whole_operators_give_their_bytes() -> None:
    """Discarding 9 of 10 bytes keeps 1, although (1 - 0.9) * 10 is a little less in floating point."""
    assert (1 - 0.9) * 10 < 1
    assert unit(discardable_bytes=10, stored_bytes=3).kept_bytes(0.9) == 4


@FEW
@given(problems(), st.integers(5, 60))
def test_the_price_is_the_slope(what: GlobalProblem, budget: int) -> None:
    """A little more budget saves at most what the price says, if the same units stay checkpointed."""
    try:
        tight, loose = exact(what, budget * 10), exact(what, budget * 10 + 1)
    except InfeasibleError:
        return
    if tight.checkpointed == loose.checkpointed:
        saved_ms = tight.recompute_ms - loose.recompute_ms
        assert saved_ms <= tight.shadow_ms_per_gib / 2**30 + 1e-3 * sum(u.recompute_ms for u in what.units)


@settings(FEW, max_examples=60)
@given(problems(), st.integers(5, 60), st.integers(1, 10))
def test_the_price_predicts_a_step_of_the_budget(what: GlobalProblem, budget: int, more: int) -> None:
    """Where the curve is locally linear, what more memory saves is the price times it, within 10 %.

    Locally linear: the same units are checkpointed at both budgets, at prices that differ by less than 10 %.
    """
    try:
        tight, loose = exact(what, budget * 10), exact(what, budget * 10 + more)
    except InfeasibleError:
        return
    price, other = (s.shadow_ms_per_gib * more / 2**30 for s in (tight, loose))
    if tight.checkpointed == loose.checkpointed and abs(other - price) <= 0.1 * price:
        saved_ms = tight.recompute_ms - loose.recompute_ms
        assert saved_ms == pytest.approx(price, rel=0.1, abs=1e-3 * sum(u.recompute_ms for u in what.units))


def test_one_gib_more_saves_the_price() -> None:
    """Blocks of 1 GiB and 10 ms on a line: at 12.5 of 20 GiB one GiB more saves 10 ms, as the price says."""
    gib = 2**30
    units = [unit(f"layers.{b}", implicit_bytes=gib, discardable_bytes=gib) for b in range(20)]
    what = problem(units, [PeakPoint("p", 20 * gib, tuple((u, 1) for u in range(20)))])
    tight, loose = exact(what, 25 * gib // 2), exact(what, 27 * gib // 2)
    assert tight.shadow_ms_per_gib == pytest.approx(10.0, rel=1e-3)
    assert tight.recompute_ms - loose.recompute_ms == pytest.approx(tight.shadow_ms_per_gib, rel=1e-3)


@pytest.mark.parametrize(("margin", "left"), [(0.0, 2**16), (0.25, 3 * 2**14)])
def test_a_margin_is_held_back_from_the_budget(margin: float, left: int) -> None:
    """The model counts in shares of the budget of 2^-16: a quarter less leaves three quarters of them."""
    point = PeakPoint("p", 1000, ((0, 1),))
    assert CurveModel(problem([unit()], [point]), (0,), 640, margin=margin).peak == left

"""The joint reference and the two-level method, against all plans of small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosac.errors import InfeasibleError, TimeLimitError, UsageError
from autosac.estimator.sac_curves import tight_chords
from autosac.estimator.sac_stats import tradeoff
from autosac.solvers import (
    GlobalProblem,
    GlobalSolution,
    GlobalUnit,
    LocalItem,
    LocalProblem,
    PeakPoint,
    global_milp,
    joint,
    joint_bound_ms,
    knapsack,
    recompute_ms,
    relative_gap,
    solve_global,
    solve_joint,
    solve_two_level,
)
from autosac.solvers.backend import make_backend
from autosac.solvers.two_level import RELAXED_GAP, fill_budget, greedy_policies, local_policies

Plans = Callable[
    [GlobalProblem, tuple[LocalProblem, ...]], Iterator[tuple[tuple[tuple[int, ...] | None, ...], list[int | None]]]
]
FEW = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
Joint = tuple[GlobalProblem, tuple[LocalProblem, ...]]


def unit(name: str, local: LocalProblem, implicit_bytes: int, parent: int = -1) -> GlobalUnit:
    """A unit with the bytes, time and curve of its items."""
    curve = tradeoff(local)
    return GlobalUnit(
        name=name,
        implicit_bytes=implicit_bytes,
        boundary_bytes=0,
        stored_bytes=curve.stored_bytes,
        discardable_bytes=curve.discardable_bytes,
        recompute_ms=curve.runtime_ms,
        segments=tight_chords(curve.curve(), 64),
        parent=parent,
    )


def local_problem(*rows: tuple[int, float]) -> LocalProblem:
    """A problem from (bytes, ms) rows."""
    return LocalProblem(items=tuple(LocalItem(*row) for row in rows))


@st.composite
def joints(draw: st.DrawFn) -> Joint:
    """Three units of up to three groups, a third of them copies of the one before; prefix-like points."""
    locals_: list[LocalProblem] = []
    units: list[GlobalUnit] = []
    for u in range(3):
        if u and draw(st.booleans()):
            locals_.append(locals_[-1])
            units.append(unit(f"u{u}", locals_[-1], units[-1].implicit_bytes))
            continue
        rows = draw(
            st.lists(
                st.builds(
                    LocalItem,
                    memory_bytes=st.integers(0, 8).map(lambda n: n * 10),
                    recompute_ms=st.integers(0, 9).map(float),
                    forced=st.sampled_from([None, None, None, None, True, False]),
                ),
                min_size=1,
                max_size=3,
            )
        )
        locals_.append(LocalProblem(items=tuple(rows)))
        parent = draw(st.sampled_from([-1, -1, u - 1]))
        units.append(unit(f"u{u}", locals_[-1], draw(st.integers(0, 20)) * 10, parent))
    bases = draw(st.lists(st.integers(10, 60).map(lambda n: n * 10), min_size=5, max_size=5))
    deltas = [((0, 1),), ((1, 1),), ((2, 1),), ((2, -1), (1, -1)), ((0, -1),)]
    extra = draw(st.integers(0, 3)) * 10
    points = [
        PeakPoint(f"p{p}", base, delta, ((2, extra),) if p == 3 else ())
        for p, (base, delta) in enumerate(zip(bases, deltas, strict=True))
    ]
    return GlobalProblem(units=tuple(units), points=tuple(points)), tuple(locals_)


@FEW
@given(joints(), st.integers(10, 60))
def test_joint_optimum_and_bound(plans: Plans, joint: Joint, budget: int) -> None:
    """The MILP finds the best of all plans; its bound and every two-level plan are on the right side of it."""
    problem, items = joint
    fitting = [
        recompute_ms(problem, items, plan)
        for plan, kept in plans(problem, items)
        if problem.peaks_bytes(kept).max() <= budget * 10
    ]
    if not fitting:
        with pytest.raises(InfeasibleError):
            solve_joint(problem, items, budget * 10)
        return
    try:
        found = solve_joint(problem, items, budget * 10)
    except InfeasibleError:  # only within the margin for tolerances
        assert min(problem.peaks_bytes(kept).max() for _, kept in plans(problem, items)) > budget * 10 - 1
        return
    assert found.peak_bytes <= budget * 10
    assert found.recompute_ms == pytest.approx(recompute_ms(problem, items, found.kept))
    within = [
        recompute_ms(problem, items, plan)
        for plan, kept in plans(problem, items)
        if problem.peaks_bytes(kept).max() <= budget * 10 - 1
    ]
    assert min(fitting) - 1e-9 <= found.recompute_ms <= min(within, default=float("inf")) + 1e-6
    assert found.bound_ms <= min(within, default=float("inf")) + 1e-3


def test_no_unit_keeps_more_than_without_checkpointing() -> None:
    """Three units keep 150 bytes without checkpointing and up to 180 with it. 100 bytes at the worst point are met by
    discarding 120 of one, and no other unit adds memory at points that had none to spare.
    """
    local = local_problem((60, 1.0), (60, 1.0), (60, 1.0))
    units = tuple(unit(f"u{u}", local, 150) for u in range(3))
    rows = (((0, 1),), 100), (((1, 1),), 100), (((2, 1),), 140), (((2, -1), (1, -1)), 100), (((0, -1),), 100)
    points = tuple(PeakPoint(f"p{p}", base, deltas) for p, (deltas, base) in enumerate(rows))
    found = solve_joint(GlobalProblem(units=units, points=points), (local,) * 3, 100)
    assert found.peak_bytes <= 100 and found.recompute_ms == 2
    assert all(kept is None or kept < 150 for kept in found.kept_bytes)


@FEW
@given(joints(), st.integers(10, 60), st.data())
def test_bound_of_what_the_step_pays(plans: Plans, joint: Joint, budget: int, data: st.DataObject) -> None:
    """Where recomputation is partly hidden or has a floor, no plan costs less than the bound; found plans state their cost."""
    bare, items = joint
    times = st.sampled_from([0.0, 0.0, 2.0, 5.0])
    problem = replace(bare, units=tuple(u.paying(data.draw(times), data.draw(times)) for u in bare.units))
    within = [
        recompute_ms(problem, items, plan)
        for plan, kept in plans(problem, items)
        if problem.peaks_bytes(kept).max() <= budget * 10 - 1
    ]
    if not within:
        return
    assert joint_bound_ms(problem, items, budget * 10) <= min(within) + 1e-3
    for found in (solve_joint(problem, items, budget * 10), solve_two_level(problem, items, budget * 10, gap=0.0)):
        assert found.peak_bytes <= budget * 10
        assert found.recompute_ms == pytest.approx(recompute_ms(problem, items, found.kept))
        assert found.recompute_ms >= min(within) - 1e-6 or budget * 10 - 1 < found.peak_bytes


@given(joints(), st.floats(0, 20), st.floats(0, 10), st.floats(0, 1))
@FEW
def test_the_curve_of_what_the_step_pays(joint: Joint, hidden: float, floor: float, fraction: float) -> None:
    """At every fraction, the lines that are left are the cost of the recomputation that the curve says."""
    for bare in joint[0].units:
        unit = bare.paying(hidden, floor)
        assert unit.step_ms(fraction) == pytest.approx(unit.cost_ms(bare.step_ms(fraction)), abs=1e-9)


def test_a_unit_without_time_pays_nothing() -> None:
    """What takes no time to recompute hides nothing and has no floor: its curve stays as it is."""
    bare = unit("u", LocalProblem(items=(LocalItem(10, 0.0),)), 10)
    assert bare.recompute_ms == 0.0 and bare.paying(1.0, 2.0) == bare
    timed = unit("u", local_problem((10, 4.0)), 10)
    assert timed.paying(0.0, 0.0) == timed and timed.paying(-1.0, -2.0) == timed
    assert timed.paying(1.0, 0.0).cost_ms(4.0) == pytest.approx(3.0 + 0.04)
    assert timed.paying(1.0, 2.0).cost_ms(2.5) == pytest.approx(2.0 + 0.025)


def test_cbc_finds_the_optimum() -> None:
    """With its preprocessing of integers CBC answered 2 ms: checkpoint u0 and u1, discard u1's operator.

    u0 without its free operator saves 60 of the 550 bytes at point b for 1 ms.
    """
    locals_ = (LocalProblem(items=(LocalItem(10, 1.0), LocalItem(80, 0.0, True))), *(local_problem((20, 2.0)),) * 2)
    units = tuple(unit(f"u{u}", local, 140 if u == 0 else 10) for u, local in enumerate(locals_))
    points = (
        PeakPoint("a", 100, ((0, 1),)),
        PeakPoint("b", 550, ((1, 1),)),
        PeakPoint("c", 100, ((2, 1),)),
        PeakPoint("d", 520, ((2, -1), (1, -1)), ((2, 30),)),
    )
    assert solve_joint(GlobalProblem(units=units, points=points), locals_, 495).kept == ((1,), None, None)


def test_hidden_recomputation_is_spread() -> None:
    """Four blocks of two operators (10 bytes, 4 ms each), 40 bytes allowed, 4 ms hidden in each block: one is kept in each.

    By recomputation alone all ways to keep four are equal: 16 ms. What is hidden counts 1 %, so the step pays 0.16 ms.
    """
    local = local_problem((10, 4.0), (10, 4.0))
    units = tuple(unit(str(b), local, 20).paying(4.0, 0.0) for b in range(4))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 80, tuple((u, 1) for u in range(4))),))
    for found in (solve_two_level(problem, (local,) * 4, 41, gap=0.0), solve_joint(problem, (local,) * 4, 41)):
        assert found.kept_bytes == (10, 10, 10, 10)
        assert found.recompute_ms == pytest.approx(0.16)


def test_a_floor_is_paid_by_every_checkpointed_unit() -> None:
    """To save 10 of 20 bytes in two blocks, one block discards both of its operators: one floor instead of two."""
    local = local_problem((5, 1.0), (5, 1.0))
    units = tuple(unit(str(b), local, 10).paying(0.0, 3.0) for b in range(2))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 20, ((0, 1), (1, 1))),))
    found = solve_two_level(problem, (local,) * 2, 11, gap=0.0)
    assert sorted(found.kept_bytes, key=str) == [0, None]
    assert found.recompute_ms == pytest.approx(3.02)


Error = Callable[..., None]


def _late(gaps: list[float]) -> Error:
    """A `solve_global` that finds nothing in time and notes with which gaps it was asked."""

    def solve(*_: object, gap: float, **__: object) -> None:
        gaps.append(gap)
        raise TimeLimitError("too short")

    return solve


def test_without_the_milp_greedy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """First with the gap asked for, then with a wide one, then greedily: of 60 + 30 bytes a block, 91 of 180 can stay."""
    gaps: list[float] = []
    monkeypatch.setattr("autosac.solvers.two_level.solve_global", _late(gaps))
    local = local_problem((60, 6.0), (30, 2.0))
    problem = GlobalProblem(
        units=(unit("a", local, 90), unit("b", local, 90)), points=(PeakPoint("p", 180, ((0, 1), (1, 1))),)
    )
    found = solve_two_level(problem, (local, local), 91, gap=0.005)
    assert gaps == [0.005, RELAXED_GAP] and found.method == "greedy"
    assert sorted(kept or 0 for kept in found.kept_bytes) == [0, 90] and found.recompute_ms == 8.0


def test_what_greedy_says_of_its_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 bytes must be kept, 90 may be: of two units one keeps 40 of them, the other all. Memory has no price.

    At most 150 of 200 bytes: 20 + 130, of which the second unit's operators (60 and 30 bytes) both fit beside 40 of the first.
    """
    monkeypatch.setattr("autosac.solvers.two_level.solve_global", _late([]))
    forced = LocalItem(10, 1.0, True)
    a = LocalProblem(items=(forced, LocalItem(50, 1.0), LocalItem(40, 3.0)))
    b = LocalProblem(items=(forced, LocalItem(60, 6.0), LocalItem(30, 5.0)))
    problem = GlobalProblem(
        units=(unit("a", a, 100), unit("b", b, 100)), points=(PeakPoint("p", 200, ((0, 1), (1, 1))),)
    )
    found = solve_two_level(problem, (a, b), 150)
    assert found.kept_bytes == (50, 100) and (found.peak_bytes, found.recompute_ms) == (150, 1.0)
    budgets = found.budgets
    assert budgets.discard_fraction == pytest.approx((1 - 40 / 90, 0.0))
    assert (budgets.kept_bytes, budgets.peak_bytes) == ((50, 100), 150)
    assert (budgets.shadow_ms_per_gib, budgets.binding, budgets.bound_ms, budgets.recompute_ms) == (0.0, (), 0.0, 0.0)
    assert (found.polished, found.level) == (False, False)


def test_greedy_takes_the_level_that_costs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """To recompute a block of 10 ms frees as much as both of its halves, of 3 ms each: the halves."""
    monkeypatch.setattr("autosac.solvers.two_level.solve_global", _late([]))
    whole, half = local_problem((100, 10.0)), local_problem((50, 3.0))
    units = (unit("block", whole, 100), unit("block.a", half, 50, parent=0), unit("block.b", half, 50, parent=0))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 100, ((0, 1), (1, 1), (2, 1))),))
    found = solve_two_level(problem, (whole, half, half), 20)
    assert (found.method, found.kept_bytes, found.recompute_ms) == ("greedy", (None, 0, 0), 6.0)
    assert found.budgets.discard_fraction == (None, 1.0, 1.0)


def test_a_wider_gap_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the MILP finds only within the wider gap is taken, and said."""

    def late_unless_wide(*arguments: object, gap: float, **more: object) -> GlobalSolution:
        if gap < RELAXED_GAP:
            raise TimeLimitError("too short")
        return solve_global(*arguments, gap=0.0, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("autosac.solvers.two_level.solve_global", late_unless_wide)
    local = local_problem((10, 4.0))
    problem = GlobalProblem(units=(unit("a", local, 10),), points=(PeakPoint("p", 10, ((0, 1),)),))
    found = solve_two_level(problem, (local,), 5)
    assert found.method == "milp with a relaxed gap" and found.recompute_ms == 4.0


def test_greedy_has_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no level of the units is within the budget, the time limit is what is said."""
    monkeypatch.setattr("autosac.solvers.two_level.solve_global", _late([]))
    local = local_problem((10, 4.0))
    problem = GlobalProblem(units=(unit("a", local, 10),), points=(PeakPoint("p", 30, ((0, 1),)),))
    with pytest.raises(TimeLimitError, match="too short"):
        solve_two_level(problem, (local,), 15)


@FEW
@given(joints(), st.integers(10, 60))
def test_greedy_plans_fit(joint: Joint, budget: int) -> None:
    """What greedy decides is within the budget and not better than the joint bound (of a byte more, for its margin)."""
    problem, items = joint
    found = greedy_policies(problem, items, budget * 10, knapsack)
    if found is not None:
        assert found.peak_bytes == problem.peaks_bytes(found.kept_bytes).max() <= budget * 10
        assert found.recompute_ms >= joint_bound_ms(problem, items, budget * 10 + 1) - 1e-3


@FEW
@given(joints(), st.integers(10, 60), st.sampled_from(["greedy", "knapsack", "ilp"]))
def test_two_level_plans_fit_and_respect_the_bound(joint: Joint, budget: int, local: str) -> None:
    """Whatever the local solver, the peak is within the budget and the recomputation not below the joint bound."""
    problem, items = joint
    try:
        found = solve_two_level(problem, items, budget * 10, local=local, gap=0.0)
    except InfeasibleError:
        return
    assert found.peak_bytes == problem.peaks_bytes(found.kept_bytes).max() <= budget * 10
    assert found.recompute_ms == pytest.approx(recompute_ms(problem, items, found.kept))
    assert found.recompute_ms >= joint_bound_ms(problem, items, budget * 10) - 1e-3


def test_what_one_unit_leaves_another_spends() -> None:
    """Two units of 60 + 30 bytes (6 + 2 ms), 91 of 180 bytes allowed. Relaxed: both lose the 30 bytes and one 29 of 60.

    That is 2 + 2 + 2.9 ms. Whole, one loses the 60 bytes instead of the 30: 6 + 2 ms. Of equal units the first keeps more.
    """
    local = local_problem((60, 6.0), (30, 2.0))
    problem = GlobalProblem(
        units=(unit("a", local, 90), unit("b", local, 90)), points=(PeakPoint("p", 180, ((0, 1), (1, 1))),)
    )
    found = solve_two_level(problem, (local, local), 91, gap=0.0)
    assert found.kept_bytes == (60, 30)
    assert found.recompute_ms == 8.0
    best = solve_joint(problem, (local, local), 91)
    assert best.recompute_ms == 8.0 and best.bound_ms == pytest.approx(6.9, rel=1e-4)


def test_what_is_left_goes_to_the_unit_that_saves_most() -> None:
    """Of 100 bytes, 60 are kept so far; a could keep 40 more and save 1 ms, b 30 more and save 5 ms: b, then nothing fits."""
    a, b = local_problem((30, 9.0), (40, 1.0)), local_problem((30, 9.0), (30, 5.0))
    units = (unit("a", a, 70), unit("b", b, 60))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 130, ((0, 1), (1, 1))),))
    policies = {0: a.solution((0,)), 1: b.solution((0,))}
    fill_budget(problem, (a, b), 100, knapsack, policies)
    assert (policies[0].kept, policies[1].kept) == ((0,), (0, 1))


def _budgets(*kept_bytes: int) -> GlobalSolution:
    """An answer of the MILP with these budgets."""
    return GlobalSolution(
        discard_fraction=(0.5,) * len(kept_bytes),
        kept_bytes=kept_bytes,
        peak_bytes=0,
        recompute_ms=0.0,
        bound_ms=0.0,
        binding=(),
        shadow_ms_per_gib=0.0,
    )


def test_rounding_of_the_answer_loses_no_operator() -> None:
    """Two units of two GiB: 100 bytes short of one GiB each, both keep one if the budget has room for that, else neither."""
    gib = 2**30
    local = local_problem((gib, 6.0), (gib, 6.0))
    units = (unit("a", local, 2 * gib), unit("b", local, 2 * gib))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 4 * gib, ((0, 1), (1, 1))),))
    short = _budgets(gib - 100, gib - 100)
    kept = {room: local_policies(problem, (local,) * 2, 2 * gib + room, knapsack, short) for room in (0, -1)}
    assert [policy.kept_bytes for policy in kept[0].values()] == [gib, gib]
    assert [policy.kept_bytes for policy in kept[-1].values()] == [0, 0]
    far = _budgets(gib - 10_000, gib - 10_000)
    assert [p.kept_bytes for p in local_policies(problem, (local,) * 2, 3 * gib, knapsack, far).values()] == [0, 0]


def test_polishing_counts_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What polishing finds in 2 s of CBC's own time does not depend on what else the machine does; a user's limit is one on
    the clock.
    """
    made: list[tuple[float, str]] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        backend = make_backend(*args, **kwargs)
        if backend.mip:
            made.append((backend.timeLimit, backend.optionsDict["timeMode"]))
        return backend

    for module in (joint, global_milp):
        monkeypatch.setattr(module, "make_backend", noting)
    local = local_problem((50, 5.5), (30, 3.0), (30, 3.0))
    problem = GlobalProblem(units=(unit("u", local, 110),), points=(PeakPoint("p", 110, ((0, 1),)),))
    assert solve_two_level(problem, (local,), 61, local="greedy", time_limit_s=7.0).polished
    assert made == [(7.0, "elapsed"), (2.0, "cpu")]


def test_a_plan_that_the_joint_problem_makes_is_polished() -> None:
    """One unit of 50, 30 and 30 bytes (4, 3, 3 ms) that may keep 60: greedy keeps one of 30, as the others do not fit.

    By bytes per ms the 50 go last but one: it discards 50 / 4 first, then keeps 30 + 30, which is best. With 6 ms for the 50
    bytes it discards a 30 first and then the other, and keeps 50: 6 ms are left to recompute, as with 30 + 30. With 5.5 ms it
    is 50 (6 ms recomputed) against 30 + 30 (5.5 ms).
    """
    local = local_problem((50, 5.5), (30, 3.0), (30, 3.0))
    problem = GlobalProblem(units=(unit("u", local, 110),), points=(PeakPoint("p", 110, ((0, 1),)),))
    plain = solve_two_level(problem, (local,), 61, local="greedy", polish_s=0)
    assert (plain.kept, plain.recompute_ms, plain.polished) == (((0,),), 6.0, False)
    polished = solve_two_level(problem, (local,), 61, local="greedy")
    assert (polished.kept, polished.recompute_ms, polished.polished) == (((1, 2),), 5.5, True)
    assert (polished.method, polished.level, polished.peak_bytes) == ("milp", False, 60)
    level = solve_two_level(problem, (local,), 61, local="greedy", level=True)
    assert (level.kept, level.polished, level.level) == (((0,),), False, True)


def test_a_plan_at_the_bound_is_not_polished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the two levels reach the MILP's own bound, the joint problem is not asked."""
    monkeypatch.setattr("autosac.solvers.two_level.solve_joint", _late([]))
    local = local_problem((10, 4.0), (10, 4.0))
    problem = GlobalProblem(units=(unit("u", local, 20),), points=(PeakPoint("p", 20, ((0, 1),)),))
    found = solve_two_level(problem, (local,), 11)
    assert (found.recompute_ms, found.polished) == (4.0, False)


def test_a_plan_says_that_the_joint_problem_found_none_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50, 30 and 30 bytes greedy keeps one of 30, a half above the bound; the joint problem's time is over."""
    monkeypatch.setattr("autosac.solvers.two_level.solve_joint", _late([]))
    local = local_problem((50, 5.5), (30, 3.0), (30, 3.0))
    problem = GlobalProblem(units=(unit("u", local, 110),), points=(PeakPoint("p", 110, ((0, 1),)),))
    found = solve_two_level(problem, (local,), 61, local="greedy")
    assert (found.kept, found.polished, found.unpolished) == (((0,),), False, True)
    assert not solve_two_level(problem, (local,), 61, local="greedy", polish_s=0).unpolished


def test_polishing_is_never_worse() -> None:
    """Four units of 50 + 30 + 30 bytes (4, 3, 3 ms), 190 bytes to keep: the joint optimum keeps 50 * 2 + 30 * 3."""
    local = local_problem((50, 4.0), (30, 3.0), (30, 3.0))
    units = tuple(unit(str(u), local, 110) for u in range(4))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 440, tuple((u, 1) for u in range(4))),))
    plain = solve_two_level(problem, (local,) * 4, 191, local="greedy", polish_s=0)
    polished = solve_two_level(problem, (local,) * 4, 191, local="greedy")
    assert not plain.polished
    assert solve_joint(problem, (local,) * 4, 191).recompute_ms == polished.recompute_ms <= plain.recompute_ms
    assert polished.peak_bytes <= 191


def test_copies_share_the_operators_that_fit() -> None:
    """Five equal blocks with one 10-byte operator each and room for three: two are recomputed, whichever."""
    local = local_problem((10, 4.0))
    units = tuple(unit(str(b), local, 10) for b in range(5))
    problem = GlobalProblem(units=units, points=(PeakPoint("p", 50, tuple((u, 1) for u in range(5))),))
    found = solve_joint(problem, (local,) * 5, 31)
    assert found.recompute_ms == 8.0
    assert found.peak_bytes == 30


def test_gap() -> None:
    """A plan at 11 ms lies 10 % above a bound of 10 ms."""
    assert relative_gap(11.0, 10.0) == pytest.approx(0.1)
    assert relative_gap(0.0, 0.0) == relative_gap(9.0, 10.0) == 0.0
    assert relative_gap(1.0, 0.0) == float("inf")


def test_items_that_do_not_belong_to_their_unit_are_named() -> None:
    """The items' 10 bytes are not the unit's 20."""
    local, other = local_problem((10, 1.0)), local_problem((20, 1.0))
    problem = GlobalProblem(units=(unit("a", other, 20),), points=(PeakPoint("p", 30, ((0, 1),)),))
    with pytest.raises(UsageError, match="items of unit 'a' do not add up"):
        solve_joint(problem, (local,), 15)

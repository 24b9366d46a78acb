"""What runs again under a kept set: the closure's solvers against all kept sets of small units, tried one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import InfeasibleError, UsageError
from autosac.solvers import (
    Closure,
    LocalItem,
    LocalProblem,
    Operator,
    UnitResult,
    frontier,
    greedy,
    ilp,
    knapsack,
    min_cut_hull,
    pareto,
    unit_curve,
)
from autosac.solvers.min_cut import lower_hull

Points = list[tuple[int, float]]
CHECKED = settings(deadline=None, max_examples=300)


def unit(
    operators: tuple[Operator, ...], results: tuple[UnitResult, ...], asked: tuple[int, ...], *forced: bool | None
):
    """A problem whose items' numbers follow from their results and these results' makers."""
    closure = Closure(operators, results, asked)
    count = max((result.item for result in results), default=-1) + 1
    items = []
    for i in range(count):
        own = [result for result in results if result.item == i]
        makers = {c for result in own for c in result.makers}
        ms = math.fsum(operators[c].recompute_ms for c in makers)
        items.append(LocalItem(sum(r.memory_bytes for r in own), ms, forced[i] if i < len(forced) else None))
    return LocalProblem(items=tuple(items), closure=closure)


@st.composite
def units(draw: st.DrawFn, most: int = 9, groups: bool = True) -> LocalProblem:
    """Random units: operators with up to two results, in-place writers, shared items, forced items, any reads."""
    count = draw(st.integers(1, most))
    times = draw(st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=count, max_size=count))
    results: list[UnitResult] = []
    operators: list[Operator] = []
    items = 0
    for c in range(count):
        before = range(len(results))
        reads = tuple(sorted(draw(st.sets(st.sampled_from(before), max_size=3)))) if results else ()
        operators.append(Operator(times[c], reads))
        if groups and results and draw(st.integers(0, 5)) == 0:
            s = draw(st.sampled_from(before))
            results[s] = results[s]._replace(makers=tuple(sorted({*results[s].makers, c})))
        joined = groups and results and draw(st.integers(0, 7)) == 0
        item = draw(st.sampled_from(before)) if joined else -1
        item = results[item].item if joined else items
        items = max(items, item + 1)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            results.append(UnitResult(draw(st.integers(0, 30)), item, (c,)))
    asked = tuple(sorted(draw(st.sets(st.sampled_from(range(len(results))), max_size=4))))
    forced = draw(st.lists(st.sampled_from([None] * 6 + [True, False]), min_size=items, max_size=items))
    return unit(tuple(operators), tuple(results), asked, *forced)


def all_policies(problem: LocalProblem) -> Points:
    """Bytes and time of every kept set."""
    free = problem.free_items()
    stored = {i for i, item in enumerate(problem.items) if item.forced}
    sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
    return [problem.demand.measured(stored.union(chosen)) for chosen in sets]


def undominated(points: Points) -> Points:
    """Those that no other point beats in both, by ascending bytes."""
    found: Points = []
    for nbytes, ms in sorted(points):
        if not found or ms < found[-1][1]:
            found.append((nbytes, ms))
    return found


def test_items_without_memory_change_nothing() -> None:
    """One operator of 1 ms and 8 bytes, and an item that makes nothing: the curve is keeping it or running it again."""
    closure = Closure((Operator(1.0),), (UnitResult(8, 0, (0,)),), (0,))
    problem = LocalProblem(items=(LocalItem(8, 1.0), LocalItem(0, 0.0)), closure=closure)
    assert [(p.kept_bytes, p.recompute_ms) for p in frontier(problem).policies] == [(0, 1.0), (8, 0.0)]


def chain() -> LocalProblem:
    """Three operators in a row, a -> b -> c (1, 2 and 4 ms; 10, 20 and 5 bytes), of which the backward asks for c."""
    operators = (Operator(1.0), Operator(2.0, (0,)), Operator(4.0, (1,)))
    return unit(operators, (UnitResult(10, 0, (0,)), UnitResult(20, 1, (1,)), UnitResult(5, 2, (2,))), (2,))


def test_what_leads_only_to_what_is_kept_does_not_run() -> None:
    """With c kept nothing runs; with b kept only c; b's bytes are let go if c is kept as well."""
    closure = chain().demand
    assert closure.measured({2}) == (5, 0.0)
    assert closure.measured({1}) == (20, 4.0)
    assert closure.measured({1, 2}) == (5, 0.0)
    assert closure.measured(()) == (0, 7.0)


def test_the_curve_of_a_chain() -> None:
    """Keeping the last result costs 5 bytes and saves all: nothing else is worth keeping."""
    assert [(p.kept, p.kept_bytes, p.recompute_ms) for p in frontier(chain()).policies] == [
        ((), 0, 7.0),
        ((2,), 5, 0.0),
    ]
    curve = unit_curve(chain())
    assert (curve.stored_bytes, curve.discardable_bytes, curve.recompute_ms) == (0, 5, 7.0)
    assert curve.segments == ((1.0, 0.0),)


def test_a_result_half_written_needs_only_what_wrote_it_so_far() -> None:
    """Of three operators b reads what a made before c writes to it; the backward asks for b: c does not run again."""
    operators = (Operator(1.0), Operator(2.0, (0,)), Operator(4.0, (0,)))
    problem = unit(operators, (UnitResult(8, 0, (0, 2)), UnitResult(8, 1, (1,))), (1,))
    assert problem.demand.measured(()) == (0, 3.0)


def test_a_closure_that_refers_to_nothing_is_refused() -> None:
    """An operator that reads what is made after it, a result of nobody, and an item that is not there are usage errors."""
    with pytest.raises(UsageError, match="not made before it"):
        Closure((Operator(1.0, (0,)),), (UnitResult(1, 0, (0,)),), ())
    with pytest.raises(UsageError, match="makers"):
        Closure((Operator(1.0),), (UnitResult(1, 0, ()),), ())
    with pytest.raises(UsageError, match="item that is not there"):
        LocalProblem(items=(), closure=Closure((Operator(1.0),), (UnitResult(1, 0, (0,)),), ()))


def test_a_result_that_saves_no_time_may_save_memory() -> None:
    """Of 29 bytes, b (0 bytes) is made in no time. If both items are kept they are not needed; without b they are."""
    problem = unit(
        (Operator(5.0), Operator(0.0, (0,)), Operator(0.0, (0,))),
        (UnitResult(29, 0, (0,)), UnitResult(0, 0, (1,)), UnitResult(0, 1, (2,))),
        (1, 2),
    )
    for solve in (ilp, pareto):
        found = solve(problem, 25)
        assert (found.kept, found.kept_bytes, found.recompute_ms) == ((0, 1), 0, 0.0)


@CHECKED
@given(units())
def test_the_sweep_finds_every_undominated_policy(problem: LocalProblem) -> None:
    """The curve is that of all kept sets, point by point."""
    found = frontier(problem)
    expected = undominated(all_policies(problem))
    assert found.exact
    assert [p.kept_bytes for p in found.policies] == [nbytes for nbytes, _ in expected]
    assert [p.recompute_ms for p in found.policies] == pytest.approx([ms for _, ms in expected])


@settings(CHECKED, max_examples=60)
@given(units(most=7), st.integers(0, 60))
def test_the_milp_finds_the_optimum(problem: LocalProblem, budget_bytes: int) -> None:
    """The exact solver's policy takes as long as the best of all kept sets that fit, and fits."""
    fitting = [ms for nbytes, ms in all_policies(problem) if nbytes <= budget_bytes]
    if not fitting:
        for solve in (ilp, pareto):
            with pytest.raises(InfeasibleError):
                solve(problem, budget_bytes)
        return
    for solve in (ilp, pareto):
        found = solve(problem, budget_bytes)
        assert found.kept_bytes <= budget_bytes
        assert found.recompute_ms == pytest.approx(min(fitting))
        assert problem.demand.measured(found.kept) == (found.kept_bytes, found.recompute_ms)


@CHECKED
@given(units(most=12, groups=False))
def test_the_hull_by_minimum_cuts_is_that_of_all_policies(problem: LocalProblem) -> None:
    """Where every item is of one operator, the corners are those of brute force, and their policies are real."""
    expected = lower_hull(undominated(all_policies(problem)))
    found = min_cut_hull(problem)
    assert [(c.memory_bytes, c.recompute_ms) for c in found] == [(b, pytest.approx(ms)) for b, ms in expected]
    for corner in found:
        held, spent_ms = problem.demand.measured({*corner.kept, *problem.settled()})
        assert (held, spent_ms) == (corner.memory_bytes, pytest.approx(corner.recompute_ms))


@CHECKED
@given(units())
def test_the_hull_by_minimum_cuts_is_a_bound(problem: LocalProblem) -> None:
    """With shared items and writes in place, no policy lies below the hull."""
    corners = min_cut_hull(problem)
    for nbytes, ms in all_policies(problem):
        for left, right in itertools.pairwise(corners):
            slope = (right.recompute_ms - left.recompute_ms) / (right.memory_bytes - left.memory_bytes)
            assert ms >= left.recompute_ms + slope * (nbytes - left.memory_bytes) - 1e-6
        assert nbytes >= corners[0].memory_bytes and ms >= corners[-1].recompute_ms - 1e-6


@settings(CHECKED, max_examples=100)
@given(units(), st.integers(0, 120))
def test_the_papers_solvers_are_never_better(problem: LocalProblem, budget_bytes: int) -> None:
    """Greedy and knapsack decide as if all ran again; measured by what does, they are not below the optimum."""
    for solve in (greedy, knapsack):
        try:
            found = solve(problem, budget_bytes)
        except InfeasibleError:
            continue
        assert found.kept_bytes <= budget_bytes
        assert found.recompute_ms >= pareto(problem, budget_bytes).recompute_ms - 1e-9


@settings(CHECKED, max_examples=100)
@given(units(most=12))
def test_a_thinned_sweep_keeps_real_policies_and_the_hull(problem: LocalProblem) -> None:
    """With room for a few partial policies the curve may miss some, but none is invented, and the hull stays a bound."""
    few = frontier(problem, 2)
    points = undominated(all_policies(problem))
    for policy in few.policies:
        assert problem.demand.measured(policy.kept) == (policy.kept_bytes, policy.recompute_ms)
    assert few.hull[0][0] <= points[0][0] and few.hull[-1][1] <= points[-1][1] + 1e-6

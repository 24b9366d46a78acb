"""Local policies: greedy, knapsack and ILP against cases worked out by hand and against brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosac.choices import SOLVERS
from autosac.errors import InfeasibleError, UsageError
from autosac.solvers import (
    LOCAL_SOLVERS,
    LocalItem,
    LocalProblem,
    LocalSolver,
    frontier,
    greedy,
    ilp,
    knapsack,
    knapsack_resolution,
    local_ilp,
    local_solver,
    pareto,
)
from autosac.solvers.backend import make_backend

Reference = Callable[[LocalProblem, int], float]
CHECKED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(CHECKED, max_examples=25)

item = st.builds(
    LocalItem,
    memory_bytes=st.integers(0, 40),
    recompute_ms=st.integers(0, 30).map(lambda n: n / 8),
    forced=st.sampled_from([None, None, None, None, True, False]),
)
problems = st.lists(item, max_size=9).map(lambda items: LocalProblem(items=tuple(items)))


def problem(*items: tuple[int, float] | tuple[int, float, bool]) -> LocalProblem:
    """A problem from (bytes, ms[, forced]) rows."""
    return LocalProblem(items=tuple(LocalItem(*row) for row in items))


def test_greedy_discards_by_memory_saved_per_time() -> None:
    """Bytes per ms are 10, 2 and 1: a budget of 11 of 22 bytes needs the first (10) and then the second (4) gone."""
    solution = greedy(problem((10, 1.0), (4, 2.0), (8, 8.0)), 11)
    assert (solution.kept, solution.kept_bytes, solution.recompute_ms) == ((2,), 8, 3.0)


def test_greedy_breaks_ties_by_the_module_order() -> None:
    """Two equal operators: the earlier one is discarded."""
    assert greedy(problem((4, 2.0), (4, 2.0)), 4).kept == (1,)


def test_knapsack_and_ilp_are_exact_where_greedy_is_not() -> None:
    """With 6 bytes, greedy drops 5/5.0 then 3/3.3 and keeps 3 bytes (3.6 ms); keeping both threes saves 6.9 ms of 11.9."""
    rows = problem((5, 5.0), (3, 3.3), (3, 3.6))
    assert greedy(rows, 5).kept == (2,)
    assert knapsack(rows, 6).kept == ilp(rows, 6).kept == (1, 2)
    assert knapsack(rows, 6).recompute_ms == 5.0
    assert knapsack(rows, 5).kept == ilp(rows, 5).kept == (0,)


@pytest.mark.parametrize("name", LOCAL_SOLVERS)
def test_what_is_forced_stays(name: str) -> None:
    """A view-like item is recomputed and a must-save item kept, although the opposite would be cheaper."""
    solution = local_solver(name)(problem((1, 9.0, False), (5, 0.5, True), (5, 1.0)), 6)
    assert (solution.kept, solution.kept_bytes, solution.recompute_ms) == ((1,), 5, 10.0)


@pytest.mark.parametrize("name", LOCAL_SOLVERS)
def test_items_without_memory_or_time_are_decided_alike(name: str) -> None:
    """Keeping what takes no memory is free, keeping what takes no time is useless; whatever the budget."""
    solver = local_solver(name)
    for budget in (0, 100):
        assert solver(problem((0, 2.0), (7, 0.0)), budget).kept == (0,)


@pytest.mark.parametrize("name", LOCAL_SOLVERS)
def test_nothing_to_decide(name: str) -> None:
    """An empty module has an empty policy."""
    solution = local_solver(name)(problem(), 0)
    assert (solution.kept, solution.kept_bytes, solution.recompute_ms) == ((), 0, 0.0)


@pytest.mark.parametrize("name", LOCAL_SOLVERS)
def test_forced_items_beyond_the_budget_are_infeasible(name: str) -> None:
    """5 bytes must be kept, 4 are allowed: the error says both and the difference."""
    with pytest.raises(InfeasibleError, match=r"need 5 bytes, 1 more than the module's budget of 4"):
        local_solver(name)(problem((5, 1.0, True)), 4)


@CHECKED
@given(problems, st.integers(0, 200))
def test_solvers_respect_the_budget_and_the_optimum(brute_force: Reference, rows: LocalProblem, more: int) -> None:
    """Greedy and knapsack fit, are never below the optimum, and report what their kept items really cost."""
    budget = rows.stored_bytes + more
    best = brute_force(rows, budget)
    for solve in (greedy, knapsack):
        solution = solve(rows, budget)
        assert solution.kept_bytes == sum(rows.items[i].memory_bytes for i in solution.kept) <= budget
        lost = [x.recompute_ms for i, x in enumerate(rows.items) if i not in solution.kept]
        assert solution.recompute_ms == pytest.approx(sum(lost))
        assert solution.recompute_ms >= best - 1e-9
        assert all((i in solution.kept) == x.forced for i, x in enumerate(rows.items) if x.forced is not None)


@FEW
@given(st.lists(item, max_size=14), st.integers(0, 300))
def test_ilp_is_optimal(brute_force: Reference, rows: list[LocalItem], more: int) -> None:
    """With up to 14 groups the ILP meets brute force."""
    free = [row for row in rows if row.forced is None]
    whole = LocalProblem(items=(*free[:11], *(row for row in rows if row.forced is not None)))
    budget = whole.stored_bytes + more
    solution = ilp(whole, budget)
    assert solution.kept_bytes <= budget
    assert solution.recompute_ms == pytest.approx(brute_force(whole, budget), abs=1e-9)


@CHECKED
@given(problems, st.integers(0, 200), st.integers(1, 400))
def test_knapsack_keeps_its_promise(brute_force: Reference, rows: LocalProblem, more: int, cells: int) -> None:
    """However coarse, it is as good as the optimum of a budget smaller by one unit per free item; exact if units divide."""
    budget = rows.stored_bytes + more
    delta = knapsack_resolution(rows, cells)
    solution = knapsack(rows, budget, cells=cells)
    smaller = budget - len(rows.free()) * delta
    assert solution.kept_bytes <= budget
    if smaller >= rows.stored_bytes:
        assert solution.recompute_ms <= brute_force(rows, smaller) + 1e-9
    if all(rows.items[i].memory_bytes % delta == 0 for i in rows.free()):
        assert solution.recompute_ms == pytest.approx(brute_force(rows, budget), abs=1e-9)
    assert solution.recompute_ms <= greedy(rows, budget).recompute_ms


@CHECKED
@given(problems, st.integers(0, 120), st.integers(0, 120), st.sampled_from([greedy, knapsack]))
def test_more_budget_never_costs_time(rows: LocalProblem, more: int, yet_more: int, solve: LocalSolver) -> None:
    """Recomputation falls with the budget."""
    budget = rows.stored_bytes + more
    assert solve(rows, budget + yet_more).recompute_ms <= solve(rows, budget).recompute_ms + 1e-9


@CHECKED
@given(problems)
def test_the_frontier_of_an_additive_problem(brute_force: Reference, rows: LocalProblem) -> None:
    """Every point of the frontier is the optimum of its budget, and one byte less is worse."""
    found = frontier(rows)
    assert found.exact
    for policy in found.policies:
        kept, ms = policy.kept_bytes, policy.recompute_ms
        assert ms == pytest.approx(brute_force(rows, kept), abs=1e-9)
        assert kept == found.policies[0].kept_bytes or brute_force(rows, kept - 1) > ms


def test_a_long_frontier_is_thinned_beyond_its_limit() -> None:
    """Four items with powers of two have 16 undominated sums; with room for fewer, those that are left are real."""
    rows = problem(*((2**i, 2.0**i) for i in range(4)))
    assert len(frontier(rows).policies) == 16
    rows = problem(*((1000 + 2**i, 1000 + 2.0**i) for i in range(9)))
    few = frontier(rows, limit=50)
    assert not few.exact and len(few.policies) < len(frontier(rows).policies) == 512
    assert all(rows.keeping(policy.kept) == policy for policy in few.policies)


def test_highs_agrees_with_cbc() -> None:
    """Both back ends find the one best policy."""
    pytest.importorskip("highspy")
    rows = problem((512, 1.0), (1024, 2.5), (1536, 3.0), (2048, 3.9))
    assert ilp(rows, 2560, solver="highs") == ilp(rows, 2560, solver="cbc")
    assert ilp(rows, 2560).kept == (1, 2)


def test_the_milp_ends_on_large_coprime_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of 10^10 to 10^12 bytes without a common divisor take a few solver calls, and the exact fit of three is found."""
    sizes = [10**10 + 19, 3 * 10**10 + 7, 10**11 + 3, 2 * 10**11 + 9, 5 * 10**11 + 1, 10**12 - 11, 7 * 10**10 + 33]
    rows = problem(*((size, size / 1e10 + i / 7) for i, size in enumerate(sizes)))
    calls = []
    solve = local_ilp.LocalModel.solve
    monkeypatch.setattr(local_ilp.LocalModel, "solve", lambda self, backend: (calls.append(1), solve(self, backend))[1])
    for chosen in ((1, 3, 6), (0, 2, 4)):
        budget = sum(sizes[i] for i in chosen)
        found = ilp(rows, budget)
        assert found.kept_bytes <= budget
        assert found.recompute_ms == pytest.approx(pareto(rows, budget).recompute_ms)
        assert found.recompute_ms <= rows.keeping(chosen).recompute_ms + 1e-9
    assert len(calls) <= 20


def test_a_set_that_is_cut_off_leaves_its_parts() -> None:
    """After all three items the two dearest are the best, not one alone."""
    rows = problem((10, 3.0), (10, 2.0), (10, 1.0))
    model, backend = local_ilp.LocalModel(rows, 30), make_backend("cbc")
    found = model.solve(backend)
    assert found is not None and found.kept == (0, 1, 2)
    model.cut_off(found)
    less = model.solve(backend)
    assert less is not None and less.kept == (0, 1)


def test_the_time_limit_is_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every answer is too large is asked until the time is over, not for ever; greedy's answer stands."""
    rows = problem((5, 5.0), (3, 3.3), (3, 3.6))
    clock = iter(range(1000))
    monkeypatch.setattr(local_ilp.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(local_ilp.LocalModel, "solve", lambda self, backend: rows.keeping((0, 1, 2)))
    assert ilp(rows, 6, time_limit_s=5).kept == knapsack(rows, 6).kept
    assert next(clock) <= 10


def test_large_byte_counts_do_not_lose_the_budget() -> None:
    """Sizes that differ by one byte in 10 GB: three of them do not fit into three times the smallest less one."""
    rows = problem(*((10**10 + i, 1.0 + 1e-3 * i) for i in range(6)))
    budget = 3 * 10**10 + 2
    solution = ilp(rows, budget)
    assert solution.kept_bytes <= budget
    assert len(solution.kept) == 2


def test_equal_calls_are_answered_once() -> None:
    """The solver by name gives the very same object for an equal problem."""
    solve = local_solver("knapsack")
    assert solve(problem((3, 1.0)), 3) is solve(problem((3, 1.0)), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: local_solver("magic"), "unknown local solver 'magic': choose one of pareto, greedy, knapsack, ilp"),
        (lambda: ilp(problem((1, 1.0)), 0, solver="gurobi"), "unknown MILP solver 'gurobi': choose one of cbc, highs"),
        (lambda: ilp(problem((1, 1.0)), 0, time_limit_s=0), "must be a positive number of seconds, not 0"),
        (lambda: ilp(problem((1, 1.0)), 0, time_limit_s=float("nan")), "must be a positive number of seconds"),
        (lambda: knapsack(problem((1, 1.0)), 0, cells=0), "at least one cell, not 0"),
        (lambda: problem((-1, 1.0)), "item 0 has a negative or infinite memory or time"),
        (lambda: problem((1, float("inf"))), "item 0 has a negative or infinite memory or time"),
    ],
)
def test_wrong_use_is_named(call: Callable[[], object], message: str) -> None:
    """Each wrong argument ends in one clear error."""
    with pytest.raises(UsageError, match=message):
        call()


def test_a_missing_back_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that is not installed says how to get it."""
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(UsageError, match=r"'highs' is not installed \(pip install highspy\)"):
        ilp(problem((1, 1.0)), 0, solver="highs")


def test_the_names_that_users_choose() -> None:
    """Every solver has a name that the command line knows, and every name a solver."""
    assert set(SOLVERS) == set(LOCAL_SOLVERS)

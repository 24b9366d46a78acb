"""What the step pays for recomputation, on a job whose times are known (see conftest), and the search that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autosac.planning.closed_loop import Planned, make_plans
from autosac.planning.planner import Goal, Planner
from autosac.planning.search import Search
from autosac.planning.step_costs import AddedWork, StepCosts, UnitCost
from autosac.runtime_sim import INSTANT_HOST, HostModel
from autosac.runtime_sim.host import PLANNED_MODES

MIB = 2**20
MakeJob = Callable[..., Any]


SLOW_HOST = HostModel(
    **{
        **{name: getattr(INSTANT_HOST, name) for name in INSTANT_HOST.__slots__},
        "eager_op_us": 8000.0,
        "backward_op_us": 8000.0,
        "recompute_op_us": 1000.0,
        "selective_op_us": 6000.0 / PLANNED_MODES,
        "saved_op_us": 9000.0,
    }
)


def quiet(_: str) -> None:
    """No progress."""


def goal(mib: float) -> Goal:
    """A budget of active memory, to be used as far as possible."""
    return Goal(budget_bytes=int(mib * MIB), budget_kind="active", utilisation=0.985)


def without(planner: Planner, mib: int) -> Goal:
    """The budget at which so many MiB have to go (and a little more is there, for the solver's tolerances)."""
    return goal(planner.base.peak_active_bytes / MIB - mib + 0.1)


def test_the_step_is_what_it_was_built_to_be(make_job: MakeJob) -> None:
    """Four forwards of 5.5 ms; three windows of 5 ms, in which 3 ms are waited; 2 ms for the last layer: 39 ms."""
    job = make_job()
    assert job.observed().step_ms == pytest.approx(39.0)
    assert job.simulated({3: {"a", "b"}}).step_ms == pytest.approx(39.0 + 4.5 - 3.0)
    assert job.simulated({0: {"a"}, 3: {"a"}}).step_ms == pytest.approx(39.0 + 2.0)


def test_what_is_hidden_is_measured(make_job: MakeJob) -> None:
    """What runs again of a layer takes 4.5 ms: 3 ms hide behind the gathers of the upper layers, nothing in the lowest.

    Times are rounded down to sixteenths of the layer's: 10 of them are 2.8125 ms.
    """
    planner = Planner(make_job().observed(), goal(1))
    costs = planner.costs()
    assert costs is not None
    assert [cost.hidden_ms for cost in costs] == pytest.approx([0.0, 2.8125, 2.8125, 2.8125])
    assert all(cost.floor_ms == 0 and cost.plain_ms is None for cost in costs)


def test_shares_of_executions(make_job: MakeJob) -> None:
    """Nothing is at no event, everything at all events; one event of a backward is that of one unit."""
    planner = Planner(make_job().observed(), goal(1))
    costs = StepCosts(planner.base, planner.problem, [4.5] * 4, [2] * 4)
    events = range(len(planner.base.trace.events))
    assert costs.shares(()) == (0.0,) * 4 and costs.shares(events) == (1.0,) * 4
    alone = {costs.shares([event]) for event in events} - {(0.0,) * 4}
    assert alone == {tuple(float(i == j) for j in range(4)) for i in range(4)}


def test_what_was_hidden_stays_known_where_less_is_recomputed(make_job: MakeJob) -> None:
    """3 ms hide, of sixteenths of 4.5 ms ten. 1 ms that hides as a whole says nothing of the rest; of 4 ms, 1 is felt: no more
    than 3 can be hidden, whatever was thought before.
    """
    planner = Planner(make_job().observed(), goal(1))
    step_costs = StepCosts(planner.base, planner.problem, [4.5] * 4, [2] * 4)
    thought = (
        UnitCost(hidden_ms=2.8125),
        UnitCost(hidden_ms=2.8125),
        UnitCost(hidden_ms=4.5),
        UnitCost(hidden_ms=2.8125),
    )
    less, more = (step_costs.refined(thought, {2: AddedWork(device_ms=ms)}) for ms in (1.0, 4.0))
    assert less == thought
    assert [cost.hidden_ms for cost in more] == pytest.approx([2.8125] * 4)


@pytest.mark.parametrize("solver", ["pareto", "greedy"])
def test_a_share_of_the_time_counts(make_job: MakeJob, solver: str) -> None:
    """A quarter of each item's time, of what runs again when others are kept, and of the whole unit's; another unit's counts
    whole. What the paper's solvers decide as if it were independent stays so.
    """
    planner = Planner(make_job().observed(), replace(goal(1), solver=solver))
    problem, whole = planner.priced()
    priced, items = planner.priced((UnitCost(share=0.25), *[UnitCost()] * 3))
    assert priced.units[0].recompute_ms == 0.25 * problem.units[0].recompute_ms > 0
    assert [item.recompute_ms for item in items[0].items] == [0.25 * item.recompute_ms for item in whole[0].items]
    assert items[0].demand.measured(frozenset())[1] == 0.25 * whole[0].demand.measured(frozenset())[1] > 0
    assert (items[0].closure is None) is (solver == "greedy")
    assert items[1:] == whole[1:] and priced.units[1:] == problem.units[1:]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_run_while_one_recomputes(make_job: MakeJob, stage: int) -> None:
    """One of three equal ranks computes 4 ms more in one layer, of which 3 ms are hidden: 40 instead of 39 ms. The other two
    have the work that they had.
    """
    planner = Planner(make_job(ranks=3, stage=stage).observed(), goal(1))
    costs = StepCosts(planner.base, planner.problem, [4.5] * 4, [2] * 4)
    assert costs.step({}).makespan_ms == pytest.approx(39.0)
    step = costs.step({2: AddedWork(device_ms=4.0)})
    assert step.makespan_ms == pytest.approx(40.0)
    assert [float(row.sum()) for row in step.problem.event_ms] == pytest.approx(
        [49.0 if rank == stage else 45.0 for rank in range(3)]
    )


def test_what_a_short_recomputation_hides_is_measured_again(make_job: MakeJob) -> None:
    """Everything of 4.5 ms hides behind gathers of 10 ms; a gather of 5 ms would have shown 3 ms."""
    slow = Planner(make_job(gather_ms=10.0).observed(), goal(1))
    costs = slow.costs()
    assert costs is not None and [cost.hidden_ms for cost in costs] == pytest.approx([0.0, 4.5, 4.5, 4.5])
    fast = Planner(make_job().observed(), goal(1))
    refined = fast.refined(costs, fast.smallest())
    assert [cost.hidden_ms for cost in refined] == pytest.approx([0.0, 2.8125, 2.8125, 2.8125])


def test_nothing_hides_where_nothing_is_waited_for(make_job: MakeJob) -> None:
    """Gathers that are shorter than the backward leave nothing to hide behind."""
    assert Planner(make_job(gather_ms=1.0).observed(), goal(1)).costs() is None


def test_hidden_recomputation_beats_the_least_recomputation(make_job: MakeJob) -> None:
    """Five layers, 49.5 ms; of the four lower ones' eight MiB, four must go (the fifth is recomputed at the peak itself).

    The least recomputation, aten.a in each of the four, is 8 ms, of which the lowest layer pays 2. In the other three, the
    same memory takes 8.5 ms, but only one of them pays, 4.5 - 3 ms: 51 instead of 51.5 ms.
    """
    job = make_job(count=5)
    planner = Planner(job.observed(), goal(5))
    least = job.under(planner.plan([*[(1, 2)] * 4, None]))
    assert least.step_ms == pytest.approx(51.5) and least.recompute_ms == pytest.approx(8.0)

    budget = without(planner, 4)
    assert least.peak_active_bytes <= budget.budget_bytes
    best = Search(job, planner, quiet).run(budget)
    assert best.simulation.step_ms == pytest.approx(51.0)
    assert best.simulation.recompute_ms == pytest.approx(8.5)
    assert best.simulation.breakdown.hidden_recompute_ms == pytest.approx(7.0)
    assert best.costs is not None


def test_the_search_ends_when_nothing_is_paid(make_job: MakeJob) -> None:
    """Two MiB are free as soon as they are sought in layers that wait; no further plan is simulated."""
    job = make_job(gather_ms=10.0)
    planner = Planner(job.observed(), goal(5))
    best = Search(job, planner, quiet).run(without(planner, 2))
    assert best.simulation.step_ms == pytest.approx(planner.base.step_ms)
    assert job.captured == 2


@pytest.mark.parametrize(("tail_ms", "hidden"), [(59.0, True), (59.2, False)])
def test_waiting_for_less_than_a_hundredth_of_the_step_hides_nothing(
    make_job: MakeJob, tail_ms: float, hidden: bool
) -> None:
    """Three windows of 0.3 ms in a step of 30.9 ms and an optimizer: 1 % of the step if that takes 59.1 ms.

    Of 4.5 ms a sixteenth, 0.28125 ms, hides in each window.
    """
    planner = Planner(make_job(gather_ms=2.3, tail_ms=tail_ms).observed(), goal(1))
    assert planner.base.step_ms == pytest.approx(30.9 + tail_ms)
    costs = planner.costs()
    if hidden:
        assert costs is not None and [cost.hidden_ms for cost in costs] == pytest.approx([0.0, *[0.28125] * 3])
    else:
        assert costs is None


@pytest.mark.parametrize(("selective_us", "floor_ms"), [(82.0, 0.0), (83.0, 0.3237)])
def test_a_host_that_costs_less_than_a_hundredth_of_the_step_is_free(
    make_job: MakeJob, selective_us: float, floor_ms: float
) -> None:
    """A plan costs the host 1.3 times so much for each of twelve operators: 1 % of 128 ms at 82.05 us.

    Shared out over four equal layers, 83 us are 0.3237 ms for each.
    """
    planner = Planner(
        make_job(gather_ms=1.0, host=replace(SLOW_HOST, selective_op_us=selective_us)).observed(), goal(1)
    )
    costs = planner.costs()
    if floor_ms:
        assert costs is not None and [cost.floor_ms for cost in costs] == pytest.approx([floor_ms] * 4)
    else:
        assert costs is None


def test_a_slow_host_pays_for_every_operator(make_job: MakeJob) -> None:
    """The host needs 8 ms for a kernel of at most 2.5, and writes down each of a unit's three operators in 6 ms: 18 ms.

    The backward needs two of them, 9 ms each: no policy is cheaper than to run both again (`plain_ms`; 2 ms
    of the first layer's hide). To save two MiB, one
    layer does, which is 36 ms with what else the host waits for. Two layers without aten.a would be 4 ms of
    the device instead of 4.5, but 54 ms of the host.
    """
    job = make_job(gather_ms=1.0, host=SLOW_HOST)
    planner = Planner(job.observed(), goal(5))
    assert planner.base.step_ms == pytest.approx(4 * 4 * 8.0)
    costs = planner.costs()
    assert costs is not None
    assert [cost.plain_ms for cost in costs] == pytest.approx([16.0, 18.0, 18.0, 18.0])
    best = Search(job, planner, quiet).run(without(planner, 2))
    assert best.simulation.step_ms == pytest.approx(128.0 + 36.0)
    assert len(best.plan.units) == 1 and not any(decision.keep for decision in best.plan.units[0].decisions)


def test_a_host_that_waits_before_each_step_is_late_in_its_forward(make_job: MakeJob) -> None:
    """An optimizer of 500 ms follows, so that the step takes longer than all that the host does, policies' work included. If
    the host is ahead of it with the next step, they cost nothing; if it waits for its end, what they cost without it.
    """
    free, ahead, waiting = (
        Planner(make_job(gather_ms=1.0, host=SLOW_HOST, tail_ms=tail_ms, waits=waits).observed(), goal(5)).costs()
        for tail_ms, waits in ((0.0, False), (500.0, False), (500.0, True))
    )
    assert free is not None and ahead is None and waiting is not None
    assert [cost.plain_ms for cost in waiting] == pytest.approx([16.0, 18.0, 18.0, 18.0])
    assert waiting == free


def test_more_memory_never_means_a_slower_plan(make_job: MakeJob) -> None:
    """Plans for several budgets, in any order given, get faster with the budget; each is within its own."""
    job = make_job(count=6)
    peak = job.observed().peak_active_bytes
    budgets = [peak - round(mib * MIB) for mib in (2.9, 7.9, 0.9, 5.9, 4.9)]
    plans = make_plans(job, goal(1), budgets)
    assert all(isinstance(planned, Planned) for planned in plans)
    curve = sorted(zip(budgets, plans, strict=True), key=lambda pair: pair[0])
    times = [planned.simulation.step_ms for _, planned in curve]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert all(planned.simulation.peak_active_bytes <= budget for budget, planned in curve)


def test_what_counts_for_less_is_recomputed(make_job: MakeJob) -> None:
    """Where a layer's recomputation counts for a tenth, it is that layer which recomputes; what a plan pays is scaled alike,
    and the least possible is no more than that. (Of the last layer nothing is gone where memory peaks.)
    """
    planner = Planner(make_job().observed(), goal(1))
    inner = without(planner, 2).budget_bytes
    for cheap in range(3):
        costs = tuple(UnitCost(share=0.1 if layer == cheap else 1.0) for layer in range(4))
        plan, solution = planner.solve(inner, costs)
        assert {unit.fqn for unit in plan.units if unit.recompute_ms} == {f"layers.{cheap}"}
        assert solution.recompute_ms == pytest.approx(0.45)
        spent_ms, least_ms = planner.bounds(plan, costs)
        assert spent_ms == pytest.approx(0.45) and least_ms <= spent_ms

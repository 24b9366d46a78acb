"""Single units of the best plan keep something else at the end of the search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.planning.candidates import Candidate
from autosac.planning.local_search import LocalSearch, Move, Moves, altered, in_order
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.planning.search import Search
from autosac.planning.step_costs import UnitCost
from autosac.plans import Plan
from autosac.simulation import Simulation
from autosac.solvers import LocalItem, LocalProblem

MIB = 2**20


def planner_of(job: Any, budget_bytes: int, kind: str = "active") -> Planner:
    return Planner(job.observed(), Goal(budget_bytes=budget_bytes, budget_kind=kind))


def every(planner: Planner) -> Iterator[Plan]:
    """Each unit not checkpointed, or with any set of its results kept."""
    options: list[list[Any]] = []
    for policy in planner.policies.units:
        free = policy.problem().free()
        sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
        options.append([None, *map(policy.keeping, sets)])
    for chosen in itertools.product(*options):
        yield plan_of(planner.base, planner.goal, tuple(unit for unit in chosen if unit is not None))


def start(planner: Planner, job: Any) -> Candidate:
    """Everything recomputed."""
    plan = planner.smallest()
    return Candidate(plan=plan, simulation=job.under(plan), costs=planner.costs())


@pytest.mark.parametrize("gather_ms", [0.0, 5.0])
def test_the_search_ends_at_the_best_of_all_choices(make_job: Callable[..., Any], gather_ms: float) -> None:
    """Of three layers of three results, at every budget between the least and the most."""
    job = make_job(3, gather_ms)
    steps = [job.under(plan) for plan in every(planner_of(job, 1)) if plan.units] + [job.observed()]
    low, high = min(s.peak_active_bytes for s in steps), job.observed().peak_active_bytes
    for i in range(8):
        budget = low + (high - 1 - low) * i // 7
        planner = planner_of(job, budget)
        search = Search(job, planner, lambda _: None)
        found = search.run(planner.goal)
        best_ms = min(s.step_ms for s in steps if s.peak_active_bytes <= budget)
        assert found is not None and found.simulation.step_ms == pytest.approx(best_ms)


def test_changes_alone_lead_from_full_recomputation_to_the_best_plan(make_job: Callable[..., Any]) -> None:
    """Without any solver, with room for half of what there is to keep."""
    job = make_job(4, 0.0)
    low, high = (job.under(planner_of(job, 1).smallest()).peak_active_bytes, job.observed().peak_active_bytes)
    planner = planner_of(job, (low + high) // 2)
    steps = [job.under(plan) for plan in every(planner) if plan.units]
    found, tries = LocalSearch(planner, job).climb(planner.goal, start(planner, job))
    fitting = [s.step_ms for s in steps if s.peak_active_bytes <= planner.goal.budget_bytes]
    assert found.simulation.step_ms == pytest.approx(min(fitting))
    assert found.simulation.peak_active_bytes <= planner.goal.budget_bytes and tries < len(steps)


def test_costs_that_say_there_is_nothing_to_gain_are_not_believed(make_job: Callable[..., Any]) -> None:
    """They are estimates: what recomputation takes by itself is tried as well, within the same work."""
    job = make_job(4, 0.0)
    low, high = (job.under(planner_of(job, 1).smallest()).peak_active_bytes, job.observed().peak_active_bytes)
    planner = planner_of(job, (low + high) // 2)
    first = start(planner, job)
    misled = replace(first, costs=(UnitCost(plain_ms=0.0),) * len(planner.problem.modules))
    found, _ = LocalSearch(planner, job).climb(planner.goal, misled)
    best, _ = LocalSearch(planner, job).climb(planner.goal, first)
    assert found.simulation.step_ms == pytest.approx(best.simulation.step_ms)
    assert found.simulation.step_ms < first.simulation.step_ms
    assert LocalSearch(planner, job).climb(planner.goal, misled, work=0) == (misled, 0)


def test_the_search_ends_with_its_work(make_job: Callable[..., Any]) -> None:
    """One change is simulated with work for less than one, and none without."""
    job = make_job(4, 0.0)
    planner = planner_of(job, 2**40)
    first = start(planner, job)
    found, tries = LocalSearch(planner, job).climb(planner.goal, first, work=1)
    assert tries == 1 and found.simulation.step_ms < first.simulation.step_ms
    assert LocalSearch(planner, job).climb(planner.goal, first, work=0) == (first, 0)


def test_a_hole_is_filled(make_job: Callable[..., Any]) -> None:
    """What a layer keeps of aten.b costs the allocator 10 MiB more in the last layer: the first layers keep it instead."""
    job = make_job(3, 0.0)

    def derived(plan: Plan) -> Simulation:
        simulation: Simulation = job.under(plan)
        kept = {unit.fqn for unit in plan.units for d in unit.decisions if d.op.split(".")[1] == "b" and d.keep}
        report = SimpleNamespace(
            active_peak_bytes=simulation.peak_active_bytes,
            reserved_peak_bytes=simulation.peak_active_bytes + 10 * MIB * ("layers.2" in kept),
        )
        return replace(simulation, given_allocation=report)

    budget = derived(planner_of(job, 1).smallest()).peak_active_bytes + 2 * MIB
    planner = planner_of(job, budget, "reserved")
    units = {policy.name: policy for policy in planner.policies.units}
    last = units["layers.2"].keeping((1,))
    plan = plan_of(planner.base, planner.goal, (units["layers.0"].keeping(()), units["layers.1"].keeping(()), last))
    begin = Candidate(plan=planner.smallest(), simulation=derived(planner.smallest()))
    assert derived(plan).peak_bytes("reserved") > budget
    verifier: Any = SimpleNamespace(derived=derived)
    found, _ = LocalSearch(planner, verifier).climb(planner.goal, begin)
    kept = {unit.fqn for unit in found.plan.units for d in unit.decisions if d.op.split(".")[1] == "b" and d.keep}
    assert kept == {"layers.0", "layers.1"}


def test_moves_are_of_one_unit_of_many_and_of_two(make_job: Callable[..., Any]) -> None:
    """From full recomputation with room for 2 MiB: each saves time. If all four layers keep a result of 1 MiB, the peak rises
    by that of three: the recomputation of the fourth had it there before.
    """
    job = make_job(4, 0.0)
    planner = planner_of(job, 1)
    chosen = planner.policies_of(planner.smallest())
    assert chosen is not None
    moves = Moves(planner, None).of(chosen, 2 * MIB)
    assert min(move.saved_ms for move in moves) > 0
    sizes = {len(move.policies) for move in moves}
    assert sizes == {1, 2, 4}
    (one,) = {m.added_bytes for m in moves if len(m.policies) == 4 and all(p and p.kept == (1,) for _, p in m.policies)}
    assert one == 3 * MIB


def test_an_exchange_that_saves_nothing_is_no_move(make_job: Callable[..., Any]) -> None:
    """Of two equal layers one keeps a result: that the other one does instead is not proposed."""
    planner = planner_of(make_job(2, 0.0), 1)
    first, second = planner.policies.units
    units = first.keeping(first.problem().free()[:1]), second.keeping(())
    chosen = planner.policies_of(plan_of(planner.base, planner.goal, units))
    assert chosen is not None and chosen[0] != chosen[1]
    exchanged = ((0, chosen[1]), (1, chosen[0]))
    moves = Moves(planner, None).of(chosen, 2 * MIB)
    assert moves and all(move.saved_ms > 0 and tuple(sorted(move.policies)) != exchanged for move in moves)


def test_moves_that_fit_come_first_and_those_for_holes_by_what_they_lack() -> None:
    """Ties wait for one of each; what neither fits nor could fit with all holes is left out."""

    def move(saved_ms: float, added_bytes: int, unit: int = 0) -> Move:
        return Move(saved_ms, added_bytes, ((unit, None),))

    moves = [move(1, 5), move(2, 8), move(2, 8, 7), move(9, 30), move(8, 12), move(5, 11), move(9, 99)]
    assert in_order(moves, 10, 20) == [move(2, 8), move(1, 5), move(2, 8, 7), move(5, 11), move(8, 12), move(9, 30)]


def test_a_plan_of_other_units_is_left_as_it_is(make_job: Callable[..., Any]) -> None:
    """Its policies are not known."""
    job = make_job(4, 0.0)
    planner = planner_of(job, 2**40)
    first = start(planner, job)
    strange = replace(first.plan, units=(replace(first.plan.units[0], fqn="elsewhere"),))
    assert LocalSearch(planner, job).climb(planner.goal, replace(first, plan=strange)) == (
        replace(first, plan=strange),
        0,
    )


def test_of_a_large_unit_only_the_most_worthwhile_changes_are_proposed() -> None:
    """Of 2,000 items, of which every second is kept, 7 that save least for their memory and 7 others that save most: 14 sets
    with one item more or less, 49 with one for another.
    """
    items = tuple(LocalItem(MIB, float(i + 1)) for i in range(2000))
    problem = LocalProblem(items=items)
    present = problem.solution(tuple(range(0, 2000, 2)))
    dropped, added = set(range(0, 14, 2)), set(range(1987, 2000, 2))
    changes = [set(chosen) ^ set(present.kept) for chosen in altered(problem, present)]
    assert len(changes) == 14 + 49
    assert all(change <= dropped | added for change in changes)
    assert {tuple(sorted(c)) for c in changes if len(c) == 2} == {(i, j) for i in dropped for j in added}


def test_of_a_small_unit_every_change_is_proposed() -> None:
    """Seven items, three of them kept: 7 sets with one more or less, 12 with one for another."""
    problem = LocalProblem(items=tuple(LocalItem(MIB, float(i + 1)) for i in range(7)))
    sets = altered(problem, problem.solution((0, 3, 5)))
    assert len(set(sets)) == 7 + 12

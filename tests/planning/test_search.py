"""The search for the inner budget, with a planner and a simulator that are functions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.errors import InfeasibleError
from autosac.planning.candidates import Candidate
from autosac.planning.planner import Goal
from autosac.planning.relaxations import Relaxed
from autosac.planning.search import Search
from autosac.plans import Decision, Plan, Settings, Unit
from plans import MADE_FOR

GIB = 2**30


class Fake:
    """Planner and simulator: a plan for an inner budget x (GiB) reserves `peak(x)` and recomputes 100 - x ms.

    There is no plan below `least`, and the smallest plan takes that. A level plan reserves 8 GiB less and recomputes
    `level_ms` more; a baseline's plan is the baseline itself.
    """

    level_ms = 1e9
    derives = True
    own_ways: tuple[str, ...] = ()

    def __init__(self, peak: Callable[[float], float], kind: str, least: float = 10.0) -> None:
        self.peak, self.least, self.solved = peak, least, []  # type: ignore[var-annotated]
        self.goal = Goal(budget_bytes=1, budget_kind=kind)
        self.base = self.simulation(100.0)

    def simulation(self, inner: float, level: bool = False) -> Any:
        more_ms, spared = (self.level_ms, 8) if level else (0.0, 0)
        report = SimpleNamespace(outside="", op="aten.mm", phase=SimpleNamespace(name="BACKWARD"), module="")
        return SimpleNamespace(
            inner=inner,
            level=level,
            recompute_ms=100 - inner + more_ms,
            step_ms=1000 + 100 - inner + more_ms,
            peak_active_bytes=int(inner * GIB),
            peak_bytes=lambda kind: int((self.peak(inner) - spared if kind == "reserved" else inner) * GIB),
            memory=SimpleNamespace(peak=lambda: report),
            trace=SimpleNamespace(info=SimpleNamespace(compiled=False)),
            target=SimpleNamespace(with_expandable_segments=None),
        )

    def plan(self, inner: float, level: bool = False) -> Plan:
        name = "level" if level else "a"
        kept = Decision(op=f"{inner:g} GiB", occurrence=0, keep=True, outputs=())
        unit = Unit(fqn=name, discard_fraction=0.5, kept_bytes=int(inner * GIB), recompute_ms=1.0, decisions=(kept,))
        return Plan(made_for=MADE_FOR, units=(unit,))

    def solve(self, inner_bytes: int, costs: object, *, level: bool = False) -> tuple[Plan, Any]:
        inner = inner_bytes / GIB
        if inner < self.least:
            raise InfeasibleError("too little")
        if not level:
            self.solved.append(inner)
        found = self.simulation(inner, level)
        budgets = SimpleNamespace(shadow_ms_per_gib=1.0)
        solution = SimpleNamespace(
            peak_bytes=inner_bytes, recompute_ms=found.recompute_ms, budgets=budgets, level=level
        )
        return self.plan(inner, level), solution

    def mirror(self, baseline: Any) -> Plan:
        return self.plan(baseline.inner)

    def own(self, name: str, _: Any) -> Plan | None:
        if name not in self.own_ways:
            return None
        return Plan(made_for=MADE_FOR, units=(), settings=Settings(job_checkpointing="full"))

    def smallest(self) -> Plan:
        return self.plan(self.least)

    def relaxations(self, _: Plan) -> Iterator[list[Relaxed]]:
        return iter(())

    def costs(self) -> None:
        return None

    def derived(self, plan: Plan) -> Any:
        return self.under(plan) if self.derives else None

    policies: Any = SimpleNamespace(left_out=())

    def policies_of(self, *_: Any) -> None:
        return None

    def under(self, plan: Plan) -> Any:
        (unit,) = plan.units
        return self.simulation(unit.kept_bytes / GIB, unit.fqn == "level")

    def is_derived(self, _: Any) -> bool:
        return self.derives


def search(fake: Fake, budget: float, baselines: dict[str, Any] | None = None) -> Any:
    """The best plan's simulation."""
    goal = Goal(budget_bytes=int(budget * GIB), budget_kind=fake.goal.budget_kind)
    found = Search(fake, fake, lambda _: None)  # type: ignore[arg-type]
    found.run(goal)
    found.compete(goal, baselines or {})
    return found.best(goal, baselines or {}).simulation


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (1.0, 7.0), (1.3, -2.0), (0.8, 9.0)])
def test_the_budget_is_used_but_not_exceeded(slope: float, offset: float) -> None:
    """Whatever the reserved peak is of the active one, 99 % of the budget are used."""
    fake = Fake(lambda x: slope * x + offset, "reserved")
    found = search(fake, 60.0)
    assert 0.99 * 60 <= slope * found.inner + offset <= 60.0


def test_a_second_stretch_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 40 to 49 GiB active the allocator fragments and reserves 30 GiB more than else; 55 GiB fit into 60 again.

    The search begins at 48 GiB, by what the step without checkpointing wastes, and finds the border at 40.
    """

    def peak(active: float) -> float:
        return active + 5 + 30 * (40 < active < 49) + 7 * (active > 90)

    assert search(Fake(peak, "reserved"), 60.5).inner > 49
    monkeypatch.setattr("autosac.planning.search.BEYOND", 0)
    monkeypatch.setattr("autosac.planning.search.LAST_TRIES", 0)
    assert search(Fake(peak, "reserved"), 60.5).inner <= 40


class Holes(Fake):
    """Above 40 GiB the allocator reserves 30 GiB more. Units that recompute less take 1 GiB each, and no hole: of the first
    sequence 25 of 30 exceed, of the second 5.
    """

    asked = 0

    def __init__(self, budget: float = 60.0) -> None:
        super().__init__(lambda x: x + 30 * (40 < x < 100), "reserved")
        self.budget = budget

    def relaxations(self, plan: Plan) -> Iterator[list[Relaxed]]:
        self.asked += 1
        start = self.inner_of(plan)
        for most in (5, 25):
            yield [Relaxed(self.relaxed(start + count, exceeds=count > most), count * GIB) for count in range(1, 31)]

    def inner_of(self, plan: Plan) -> float:
        return plan.units[0].kept_bytes / GIB

    def relaxed(self, inner: float, exceeds: bool) -> Plan:
        unit = self.plan(inner).units[0]
        return Plan(made_for=MADE_FOR, units=(replace(unit, fqn="exceeds" if exceeds else "relaxed"),))

    def under(self, plan: Plan) -> Any:
        found = super().under(plan)
        name = plan.units[0].fqn
        if name in ("exceeds", "relaxed"):
            reserved = self.budget + 1 if name == "exceeds" else min(self.budget, found.inner)
            found.peak_bytes = lambda _: int(reserved * GIB)
        return found


def test_units_recompute_less_where_holes_leave_much_of_the_budget() -> None:
    """The solver's plans end at 40 of 60 GiB; that up to 25 modules keep more uses all of it."""
    fake = Holes()
    found = search(fake, 60.0)
    assert found.inner > 64 and found.peak_bytes("reserved") == 60 * GIB
    assert fake.asked == 1


@pytest.mark.parametrize(("most", "tried"), [(3, [3, 4]), (5, [3, 4, 6, 5]), (0, [3, 2, 1])])
def test_relaxing_begins_with_what_fits_by_its_bytes(most: int, tried: list[int]) -> None:
    """By its bytes there is room for three modules of 30; the border is looked for from there, in growing strides."""
    simulated: list[int] = []

    class Rooms(Holes):
        def relaxations(self, plan: Plan) -> Iterator[list[Relaxed]]:
            if not simulated:
                left_gib = self.budget - self.peak(self.inner_of(plan))
                yield [Relaxed(self.of(count), int((count - 0.5) * left_gib / 3 * GIB)) for count in range(1, 31)]

        def of(self, count: int) -> Plan:
            unit = self.relaxed(40 + count / 100, exceeds=count > most).units[0]
            return Plan(made_for=MADE_FOR, units=(replace(unit, recompute_ms=float(count)),))

        def under(self, plan: Plan) -> Any:
            if plan.units[0].fqn in ("exceeds", "relaxed"):
                simulated.append(int(plan.units[0].recompute_ms))
            return super().under(plan)

    fake = Rooms()
    Search(fake, fake, lambda _: None).run(Goal(budget_bytes=60 * GIB, budget_kind="reserved"))  # type: ignore[arg-type]
    assert simulated == tried


@pytest.mark.parametrize("why", ["captured", "worth nothing"])
def test_units_stay_as_they_are_where_that_is_not_worth_it(why: str) -> None:
    """Where each step takes a capture, and where the step is hardly longer than without checkpointing."""
    fake = Holes()
    if why == "captured":
        fake.derives = False
    else:
        fake.base.step_ms = 1e9
    assert search(fake, 60.0).inner <= 40
    assert fake.asked == 0


def test_captured_units_recompute_less_where_the_solver_finds_nothing() -> None:
    """Its problem allows no plan, the smallest one needs 10 GiB: that is relaxed once, in the first of two sequences, whose
    first five plans fit; and no bound is told.
    """

    class Unsolved(Holes):
        derives = False

        def solve(self, inner_bytes: int, costs: object, *, level: bool = False) -> Any:
            raise InfeasibleError("no plan fits")

    fake = Unsolved()
    goal = Goal(budget_bytes=60 * GIB, budget_kind="reserved")
    found = Search(fake, fake, lambda _: None)  # type: ignore[arg-type]
    best = found.run(goal)
    assert best is not None and best.simulation.inner == 15 and fake.asked == 1
    assert found.is_refuted
    solved = Search(Holes(), Holes(), lambda _: None)  # type: ignore[arg-type]
    solved.run(goal)
    assert not solved.is_refuted


def test_nothing_is_captured_for_the_rest_of_the_budget() -> None:
    """What the first plan leaves is solved for where steps are derived, and not where each takes a capture."""
    derived, captured = Fake(lambda x: x, "active"), Fake(lambda x: x, "active")
    captured.derives = False
    search(derived, 60.0)
    search(captured, 60.0)
    assert captured.solved == pytest.approx([59.7])
    assert derived.solved == pytest.approx([59.7, 60.0])


def test_the_rest_of_the_budget_is_halved_where_it_exceeds() -> None:
    """Above 59.9 GiB a plan takes 1 GiB more than its solver knows: all of the rest is tried, then half of it."""

    class Jumps(Fake):
        def simulation(self, inner: float, level: bool = False) -> Any:
            found = super().simulation(inner, level)
            found.peak_bytes = lambda _: int((inner + (59.9 < inner < 100)) * GIB)
            return found

    fake = Jumps(lambda x: x, "active")
    assert search(fake, 60.0).inner == pytest.approx(59.85)
    assert fake.solved == pytest.approx([59.7, 60.0, 59.85])


@pytest.mark.parametrize(("method", "level"), [("milp", False), ("greedy", False), ("milp with a relaxed gap", True)])
def test_how_a_plan_was_decided_is_told(method: str, level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not the MILP's own answer, and equal modules alike; how many plans were simulated, and where the peak is."""
    fake = Fake(lambda x: x, "active")
    goal = Goal(budget_bytes=60 * GIB, budget_kind="active")
    found = Search(fake, fake, lambda _: None)  # type: ignore[arg-type]
    plan, solution = fake.solve(30 * GIB, None)
    solution.method, solution.level = method, level
    best = Candidate(plan=plan, simulation=fake.simulation(30.0), solution=solution)
    found.verified.append(best)
    monkeypatch.setattr(fake, "gap", lambda plan, costs: 0.01, raising=False)
    monkeypatch.setattr(
        fake, "policies", SimpleNamespace(refusals=("layers.9: views only",), is_uneven=False), raising=False
    )
    notes = found.notes(goal, best)
    assert notes[:2] == (
        "the verified peak uses 50.0% of the budget; 1 plan was simulated",
        "the peak is at aten.mm in the backward of the step",
    )
    assert (f"the MILP found nothing within its time limit; decided by: {method}" in notes) == (method != "milp")
    assert any("equal modules keep nearly the same operators" in note for note in notes) == level
    assert notes[-3:] == (
        "recomputation is at most 1.0% above the least possible at this peak (linear bound)",
        "1 GiB more would save about 1.0 ms of recomputation",
        "layers.9: views only",
    )
    best.simulation.recompute_ms = 0.9  # less than a GiB is worth
    assert found.notes(goal, best)[-2] == "1 MiB more would save about 0.001 ms of recomputation"


def test_what_is_active_has_one_border() -> None:
    """No inner budgets above one that exceeded are tried for a budget of active memory."""
    fake = Fake(lambda x: x, "active")
    assert 0.99 * 60 <= search(fake, 60.0).inner <= 60.0
    assert max(fake.solved) <= 60.0


def test_nothing_fits() -> None:
    """The smallest plan needs 10 GiB active, 15 reserved: the error says so, after the smallest plan was tried."""
    fake = Fake(lambda x: x + 5, "reserved")
    with pytest.raises(InfeasibleError, match=r"no plan meets 12.00 GiB reserved: the smallest .* is 15.00 GiB"):
        search(fake, 12.0)


def test_nothing_else_is_tried_where_recomputing_everything_needs_far_more() -> None:
    """The smallest plan reserves 15 GiB: within 12 no other is looked for, within 13 some are."""
    for budget, tries in ((12.0, False), (13.0, True)):
        fake = Fake(lambda x: x + 5, "reserved")
        with pytest.raises(InfeasibleError):
            search(fake, budget)
        assert bool(fake.solved) is tries


def test_full_checkpointing_is_the_last_resort() -> None:
    """Where the solver finds nothing at all, the plan with the least memory is verified, and taken if it fits."""
    fake = Fake(lambda x: x, "active", least=20.0)
    fake.solve = lambda inner, costs, level=False: (_ for _ in ()).throw(InfeasibleError("none"))  # type: ignore[method-assign]
    assert search(fake, 40.0).inner == 20.0


def test_a_baseline_that_fits_is_never_refused() -> None:
    """No solver's plan needs less than 20 GiB, full checkpointing needs 8: it is the plan, or the budget that would do."""
    fake = Fake(lambda x: x, "active", least=20.0)
    baselines = {"none": fake.simulation(100.0), "full": fake.simulation(8.0), "selective-op": fake.simulation(9.0)}
    assert search(fake, 8.5, baselines).inner == 8.0
    assert search(fake, 12.0, baselines).inner == 9.0
    with pytest.raises(InfeasibleError, match=r"no plan meets 7.00 GiB active: the smallest budget .* is 8.00 GiB;"):
        search(fake, 7.0, baselines)


@pytest.mark.parametrize(("budget", "fits"), [(12.0, "fits"), (7.0, "needs less")])
def test_a_baseline_that_is_no_plan(budget: float, fits: str) -> None:
    """The error names the job's own setting and what it needs, not a plan's budget as the smallest."""
    fake = Fake(lambda x: x, "active", least=20.0)
    fake.mirror = lambda baseline: Plan(made_for=MADE_FOR, units=())  # type: ignore[method-assign]
    told = rf'is 20.00 GiB, but activation_checkpoint.mode = "full" of the job itself {fits} with 8.00 GiB, which no plan can'
    with pytest.raises(InfeasibleError, match=told):
        search(fake, budget, {"none": fake.simulation(100.0), "full": fake.simulation(8.0)})


def test_a_step_that_recomputes_by_itself() -> None:
    """Where plans recompute once more and need 20 GiB at least, the error says that the step without one needs 15."""
    fake = Fake(lambda x: x, "active", least=20.0)
    told = "no plan meets 12.00 GiB active: the step without a plan needs 15.00 GiB, and every plan more; with"
    with pytest.raises(InfeasibleError, match=told):
        search(fake, 12.0, {"none": fake.simulation(15.0), "full": fake.simulation(22.0)})


def wasteful(active: float) -> float:
    """12 GiB beyond what is active; without checkpointing (100 GiB) only 4."""
    return active + (12 if active < 100 else 4)


@pytest.mark.parametrize(("level_ms", "level", "inner"), [(3.0, True, 55.5), (8.5, False, 47.5)])
def test_equal_units_alike(level_ms: float, level: bool, inner: float) -> None:
    """A level plan has 8 GiB more of 60 for what is active, which is worth 8 ms: it is given for 3 ms, not for 8.5."""
    fake = Fake(wasteful, "reserved")
    fake.level_ms = level_ms
    found = search(fake, 60.0)
    assert (found.level, found.inner) == (level, pytest.approx(inner, abs=0.5))


def test_no_level_plans_for_active_budgets() -> None:
    """What the allocator reserves does not matter there, however little a level plan costs."""
    fake = Fake(wasteful, "active")
    fake.level_ms = -1.0
    assert not search(fake, 60.0).level


def test_a_faster_baseline_becomes_the_plan() -> None:
    """Of two baselines that are faster than the search's plan (at most 48 of 60 GiB active) the one that fits is given."""
    fake = Fake(lambda x: x + (4 if x == 55.0 else 12), "reserved")
    found = Search(fake, fake, lambda _: None)  # type: ignore[arg-type]
    goal = Goal(budget_bytes=60 * GIB, budget_kind="reserved")
    first = found.run(goal)
    assert first is not None and first.simulation.inner <= 48
    baselines = {name: fake.simulation(x) for name, x in (("none", 100.0), ("full", 40.0), ("own", 55.0))}
    found.compete(goal, baselines)
    assert found.best(goal, baselines).simulation.inner == 55.0
    assert {c.simulation.inner for c in found.verified}.isdisjoint({40.0, 100.0})


def quick(fake: Fake, reserved: float, step_ms: float) -> Any:
    """Full checkpointing that takes no time per operator."""
    found = fake.simulation(reserved)
    found.step_ms, found.recompute_ms = step_ms, 100.0
    return found


@pytest.mark.parametrize(("shorter", "is_own"), [(0.9985, True), (0.9995, False)])
def test_the_jobs_own_checkpointing_is_the_plan_where_no_plan_is_as_fast(shorter: float, is_own: bool) -> None:
    """If its step is shorter than the best plan's by more than 0.1 %, it fits, and it may be a plan."""
    fake = Fake(lambda x: x, "reserved")
    goal = Goal(budget_bytes=60 * GIB, budget_kind="reserved")
    found = Search(fake, fake, lambda _: None)  # type: ignore[arg-type]
    first = found.run(goal)
    assert first is not None
    baselines = {"full": quick(fake, 20.0, shorter * first.simulation.step_ms)}
    found.compete(goal, baselines)
    assert found.best(goal, baselines) is first, "it may be no plan"
    fake.own_ways = ("full",)
    found.compete(goal, baselines)
    best = found.best(goal, baselines)
    assert bool(best.plan.settings.job_checkpointing) == is_own and (best.simulation is baselines["full"]) == is_own
    assert found.best(goal, baselines, own=False) is first
    larger = Goal(budget_bytes=90 * GIB, budget_kind="reserved")
    improved = found.run(larger)
    assert improved is not None and improved.simulation.inner > 88, "it stops no search for a larger budget"


def test_the_jobs_own_checkpointing_is_the_smallest_budget_that_works() -> None:
    """Where it needs less than every plan (8 of 10 GiB): named for 7 GiB, and the plan for 8."""
    fake = Fake(lambda x: x, "reserved")
    fake.own_ways = ("full",)
    baselines = {"full": quick(fake, 8.0, 900.0)}
    fake.mirror = lambda _: fake.plan(10.0)  # type: ignore[method-assign]
    with pytest.raises(InfeasibleError, match=r"the smallest budget found to work is 8\.00 GiB"):
        search(fake, 7.0, baselines)
    assert search(fake, 8.0, baselines) is baselines["full"]

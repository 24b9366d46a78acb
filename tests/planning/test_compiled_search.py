"""Mixes of policies for equal compiled layers, with a compiler that is a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.errors import CaptureError
from autosac.planning import compiled_search
from autosac.planning.candidates import Candidates
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup
from autosac.planning.compiled_search import CompiledMixes
from autosac.planning.planner import Goal
from autosac.plans import Decision, Plan, Unit
from autosac.solvers.mix import Cost
from autosac.trace import TracedOperators
from plans import MADE_FOR

GIB = 2**30
LAYERS = 32
OPERATORS = ("full", "keeps half", "keeps most")
AS_TRACED = (("one more", ()), *((op, ()) for op in OPERATORS))
BASE = 20 * GIB  # beside what layers save
SAVED = {"own": 2.0, "full": 0.0, "keeps half": 1.0, "keeps most": 1.5}  # GiB
MS = {"own": 10.0, "full": 15.0, "keeps half": 12.0, "keeps most": 10.5}


def policy(name: str) -> CompiledPolicy:
    """That keeps the operator of its name, of three."""
    decisions = tuple(Decision(op=op, occurrence=0, keep=op == name, outputs=()) for op in OPERATORS)
    expected = {"recompute_ms": MS[name] - 10.0, "kept_bytes": int(SAVED[name] * GIB), "discard_fraction": 0.5}
    return CompiledPolicy(name=name, template=Unit(fqn="", decisions=decisions, **expected))  # type: ignore[arg-type]


def budget(share: float) -> CompiledPolicy:
    unit = Unit(fqn="", discard_fraction=0.5, kept_bytes=0, recompute_ms=0.0, decisions=(), memory_budget=share)
    return CompiledPolicy(name=f"memory_budget {share:g}", template=unit)


def _name(unit: Unit) -> str:
    """The row of the table that a unit's decisions, or its memory budget, stand for."""
    if unit.memory_budget is not None:
        return "keeps half"
    return next((row.op for row in unit.decisions if row.keep), "full")


class Compiled:
    """Captures of a model whose layers cost what the table says; of which there are records."""

    def __init__(self) -> None:
        self.sampled: list[tuple[int | None, set[str]]] = []
        self.steps = 0
        self.traced: dict[str, TracedOperators] = {}
        self.refused: Callable[[Unit], bool] = lambda _: False

    def simulation(self, plan: Plan | None, layers: int = LAYERS) -> Any:
        named = {unit.fqn: _name(unit) for unit in plan.units} if plan is not None else {}
        names = [f"layers.{i}" for i in range(layers)]
        policies = [named.get(name, "own") for name in names]
        peak = BASE + sum(int(SAVED[p] * GIB) for p in policies)
        return SimpleNamespace(
            costs={name: Cost(int(SAVED[p] * GIB), MS[p]) for name, p in zip(names, policies, strict=True)},
            trace=SimpleNamespace(modules=names, info=SimpleNamespace(traced=self.traced)),
            step_ms=sum(MS[p] for p in policies),
            peak_active_bytes=peak,
            peak_bytes=lambda _: peak,
            prediction=lambda: None,
        )

    def sample(self, plan: Plan, layers: int | None) -> Any:
        if any(map(self.refused, plan.units)):
            raise CaptureError("it cannot be compiled")
        self.sampled.append((layers, {_name(unit) for unit in plan.units[: layers or 0]}))
        return lambda: self.simulation(plan, layers or LAYERS)

    def under(self, plan: Plan) -> Any:
        self.steps += 1
        return self.simulation(plan)

    def is_derived(self, _: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("budget_gib", "tried", "peak_gib"),
    [(75, {"keeps most"}, 74.5), (60, {"keeps half", "keeps most"}, 59.5), (30, {"full", "keeps half"}, 29)],
)
def test_few_policies_are_measured_on_few_layers(
    monkeypatch: pytest.MonkeyPatch, budget_gib: int, tried: set[str], peak_gib: float
) -> None:
    """What saves about as much as the budget leaves is measured on three layers for each policy; the first mix is the best."""

    def costs(simulation: Any, names: Sequence[str]) -> Mapping[str, Cost]:
        return {name: simulation.costs[name] for name in names}

    monkeypatch.setattr(compiled_search, "unit_costs", costs)
    monkeypatch.setattr(compiled_search, "plan_of", lambda _, __, units: Plan(made_for=MADE_FOR, units=units))
    job: Any = Compiled()
    units: Any = tuple(SimpleNamespace(name=f"layers.{i}", parameters=()) for i in range(LAYERS))
    policies = (CompiledPolicy(name="own", template=None), *map(policy, list(SAVED)[1:]))
    group = UnitGroup(units=units, policies=policies)
    baselines = {"none": job.simulation(None)}
    mixes = CompiledMixes((group,), baselines, baselines["none"], lambda _: None, job.sample, lambda _: None)
    goal = Goal(budget_bytes=budget_gib * GIB)
    candidates = Candidates(job, lambda _: None, "")
    mixes.find(goal, candidates)
    assert {layers for layers, _ in job.sampled} == {3}
    assert set().union(*(names for _, names in job.sampled)) == tried
    (found,) = candidates.verified
    assert found.simulation.peak_bytes("reserved") == peak_gib * GIB and job.steps == 1


def test_baselines_that_policies_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full checkpointing is the policy of that name for every unit; no plan where no policy is known, or units are parts."""
    monkeypatch.setattr(compiled_search, "plan_of", lambda _, __, units: Plan(made_for=MADE_FOR, units=units))
    job: Any = Compiled()
    units: Any = tuple(SimpleNamespace(name=f"layers.{i}", parameters=()) for i in range(2))
    policies = (CompiledPolicy(name="own", template=None), policy("full"))

    def mixes(**more: Any) -> CompiledMixes:
        baselines = {"none": job.simulation(None)}
        group = UnitGroup(units=units, policies=policies, **more)
        return CompiledMixes((group,), baselines, baselines["none"], lambda _: None, job.sample, lambda _: None)

    goal = Goal(budget_bytes=GIB)
    mirror = mixes().mirror(goal, "full")
    assert mirror is not None and [unit.fqn for unit in mirror.units] == ["layers.0", "layers.1"]
    assert mixes().mirror(goal, "selective-op") is None is mixes().mirror(goal, "none")


def _found(
    monkeypatch: pytest.MonkeyPatch, job: Any, budgets: Sequence[float] = (0.5,)
) -> tuple[list[Unit], tuple[str, ...]]:
    """The units of the plan for about half of what the job saves by itself, and the notes; policies and memory budgets."""
    monkeypatch.setattr(compiled_search, "unit_costs", lambda s, names: {name: s.costs[name] for name in names})
    monkeypatch.setattr(compiled_search, "plan_of", lambda _, __, units: Plan(made_for=MADE_FOR, units=units))
    random: Any = SimpleNamespace(stats=SimpleNamespace(operators=(SimpleNamespace(random=True),)))
    whole = policy("full").template
    units: Any = tuple(
        SimpleNamespace(name=f"layers.{i}", parameters=(), sac=random, recompute_all=lambda: whole)
        for i in range(LAYERS)
    )
    policies = (CompiledPolicy(name="own", template=None), *map(policy, list(SAVED)[1:]), *map(budget, budgets))
    baselines = {"none": job.simulation(None)}
    group = UnitGroup(units=units, policies=policies)
    mixes = CompiledMixes((group,), baselines, baselines["none"], lambda _: None, job.sample, lambda _: None)
    candidates = Candidates(job, lambda _: None, "")
    mixes.find(Goal(budget_bytes=52 * GIB), candidates)
    found = candidates.verified[-1]
    return list(found.plan.units), mixes.notes(found)


def test_policies_decide_about_what_the_compiler_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer has one more operator as compiled: plans know of it, and recompute it; nothing is left out."""
    job: Any = Compiled()
    job.traced = {"layers.1": AS_TRACED}
    units, notes = _found(monkeypatch, job)
    decided = [[(row.op, row.keep) for row in unit.decisions] for unit in units if unit.memory_budget is None]
    assert [("one more", False), ("full", False), ("keeps half", False), ("keeps most", True)] in decided
    assert {rows[0] for rows in decided} == {("one more", False)}
    assert len(notes) == 1


def test_what_follows_the_compiler_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler traces what was observed, or tells nothing, no measurement is forgotten. With one operator more, what
    has decisions is measured again.
    """
    sampled = []
    for traced in ({}, {"layers.1": AS_TRACED[1:]}, {"layers.1": AS_TRACED}):
        job: Any = Compiled()
        job.traced = traced
        _found(monkeypatch, job)
        sampled.append(len(job.sampled))
    assert sampled[0] == sampled[1] < sampled[2]


def test_operators_that_stop_a_capture_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not follow decisions stops. Units without any show what is traced; the same as before."""
    job: Any = Compiled()
    job.traced = {"layers.0": AS_TRACED}
    job.refused = lambda unit: unit.decisions and unit.decisions[0].op != "one more"
    units, notes = _found(monkeypatch, job)
    assert {unit.decisions[0].op for unit in units if unit.decisions} == {"one more"}
    assert len(notes) == 1


def test_units_that_take_no_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow policies; the notes say why budgets were not tried."""
    job: Any = Compiled()
    job.refused = lambda unit: unit.memory_budget is not None
    units, notes = _found(monkeypatch, job)
    assert units and all(unit.memory_budget is None for unit in units)
    assert notes[1] == "memory budgets of single modules were not tried: it cannot be compiled"


def test_units_that_cannot_be_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get memory budgets; the notes say why nothing else was tried."""
    job: Any = Compiled()
    job.refused = lambda unit: unit.memory_budget is None
    units, notes = _found(monkeypatch, job)
    assert units and all(unit.memory_budget == 0.5 for unit in units)
    assert notes[1] == "only memory budgets of the compiler's partitioner were tried: it cannot be compiled"


class Partitioned(Compiled):
    """Refuses decisions. Small memory budgets save more than their share, 2 GiB times the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = lambda unit: unit.memory_budget is None

    def simulation(self, plan: Plan | None, layers: int = LAYERS) -> Any:
        """See `Compiled`."""
        found = super().simulation(plan, layers)
        for unit in plan.units if plan is not None else ():
            if unit.fqn in found.costs:
                share = unit.memory_budget or 0.0
                found.costs[unit.fqn] = Cost(int((0.6 + share) * GIB), 11 - share)
        peak = BASE + sum(cost.nbytes for cost in found.costs.values())
        found.step_ms, found.peak_active_bytes = sum(cost.ms for cost in found.costs.values()), peak
        found.peak_bytes = lambda _: peak
        return found


def test_memory_budgets_alone_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 GiB left for a layer 0.5 and 0.6 are tried first, and save 1.1 and 1.2; then those that fit."""
    job: Any = Partitioned()
    units, _ = _found(monkeypatch, job, [k / 10 for k in range(1, 10)])
    assert {unit.memory_budget for unit in units} == {0.3, 0.4}


def test_units_that_can_do_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reason is the error."""
    job: Any = Compiled()
    job.refused = lambda _: True
    with pytest.raises(CaptureError, match=r"^it cannot be compiled$"):
        _found(monkeypatch, job)


class Holed(Compiled):
    """The allocator reserves 8 GiB more than is active, without checkpointing only."""

    def simulation(self, plan: Plan | None, layers: int = LAYERS) -> Any:
        """See `Compiled`."""
        found = super().simulation(plan, layers)
        holes = 0 if plan is not None else 8 * GIB
        found.peak_bytes = lambda _: found.peak_active_bytes + holes
        return found


def test_what_is_left_of_the_budget_is_used_where_the_peak_was_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mix leaves 12 % of 77 GiB, which are worth 0.1 % of the step: the second one uses them."""
    monkeypatch.setitem(MS, "keeps most", 10.02)
    monkeypatch.setattr(compiled_search, "unit_costs", lambda s, names: {name: s.costs[name] for name in names})
    monkeypatch.setattr(compiled_search, "plan_of", lambda _, __, units: Plan(made_for=MADE_FOR, units=units))
    job: Any = Holed()
    units: Any = tuple(SimpleNamespace(name=f"layers.{i}", parameters=()) for i in range(LAYERS))
    group = UnitGroup(units=units, policies=(CompiledPolicy(name="own", template=None), *map(policy, list(SAVED)[1:])))
    baselines = {"none": job.simulation(None)}
    mixes = CompiledMixes((group,), baselines, baselines["none"], lambda _: None, job.sample, lambda _: None)
    candidates = Candidates(job, lambda _: None, "")
    mixes.find(Goal(budget_bytes=77 * GIB), candidates)
    peaks = [candidate.simulation.peak_bytes("reserved") / GIB for candidate in candidates.verified]
    assert peaks == [68.0, 76.5]


def test_a_policy_that_saves_nothing_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers save more under every policy than without, which was not measured of full checkpointing: a step under
    it tells, and the next plan leaves these layers alone.
    """
    monkeypatch.setattr(compiled_search, "unit_costs", lambda s, names: {name: s.costs[name] for name in names})
    monkeypatch.setattr(compiled_search, "plan_of", lambda _, __, units: Plan(made_for=MADE_FOR, units=units))
    job: Any = Compiled()
    halves: list[Any] = [
        tuple(SimpleNamespace(name=f"layers.{i}", parameters=()) for i in range(k, LAYERS, 2)) for k in (0, 1)
    ]
    simulation = job.simulation

    def hostile(plan: Plan | None, layers: int = LAYERS) -> Any:
        """The layers with even numbers save 2.5 GiB under any policy, and 2 GiB without; a planned step needs 12 GiB more."""
        found = simulation(plan, layers)
        even = [unit.fqn for unit in plan.units if int(unit.fqn[7:]) % 2 == 0] if plan is not None else []
        found.costs.update({name: Cost(int(2.5 * GIB), 15.0) for name in even if name in found.costs})
        more = 12 * GIB if plan is not None and layers == LAYERS else 0
        peak = BASE + more + sum(cost.nbytes for cost in found.costs.values())
        found.peak_active_bytes, found.peak_bytes = peak, lambda _: peak
        found.step_ms = sum(cost.ms for cost in found.costs.values())
        return found

    job.simulation = hostile
    own = CompiledPolicy(name="own", template=None)
    groups = tuple(UnitGroup(units=half, policies=(own, *map(policy, list(SAVED)[1:]))) for half in halves)
    baselines = {"none": job.simulation(None)}
    mixes = CompiledMixes(groups, baselines, baselines["none"], lambda _: None, job.sample, lambda _: None)
    candidates = Candidates(job, lambda _: None, "")
    goal = Goal(budget_bytes=(20 + 12 + 32 + 1) * GIB)
    mixes.find(goal, candidates)
    best = min((c for c in candidates.verified if c.fits(goal)), key=lambda c: c.simulation.step_ms)
    assert all(int(unit.fqn[7:]) % 2 for unit in best.plan.units)

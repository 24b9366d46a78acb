"""Mixes of policies for equal compiled layers, with a compiler that is a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.planning import compiled_search
from autosac.planning.candidates import Candidates
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup
from autosac.planning.compiled_search import CompiledMixes
from autosac.planning.planner import Goal
from autosac.plans import Decision, Plan, Unit
from autosac.solvers.mix import Cost
from plans import MADE_FOR

GIB = 2**30
LAYERS = 32
BASE = 20 * GIB  # beside what layers save
SAVED = {"own": 2.0, "full": 0.0, "keeps half": 1.0, "keeps most": 1.5}  # GiB
MS = {"own": 10.0, "full": 15.0, "keeps half": 12.0, "keeps most": 10.5}


def policy(name: str) -> CompiledPolicy:
    decision = Decision(op=name, occurrence=0, keep=False, outputs=())
    expected = {"recompute_ms": MS[name] - 10.0, "kept_bytes": int(SAVED[name] * GIB), "discard_fraction": 0.5}
    return CompiledPolicy(name=name, template=Unit(fqn="", decisions=(decision,), **expected))  # type: ignore[arg-type]


class Compiled:
    """Captures of a model whose layers cost what the table says; of which there are records."""

    def __init__(self) -> None:
        self.sampled: list[tuple[int | None, set[str]]] = []
        self.steps = 0

    def simulation(self, plan: Plan | None, layers: int = LAYERS) -> Any:
        named = {unit.fqn: unit.decisions[0].op for unit in plan.units} if plan is not None else {}
        names = [f"layers.{i}" for i in range(layers)]
        policies = [named.get(name, "own") for name in names]
        peak = BASE + sum(int(SAVED[p] * GIB) for p in policies)
        return SimpleNamespace(
            costs={name: Cost(int(SAVED[p] * GIB), MS[p]) for name, p in zip(names, policies, strict=True)},
            trace=SimpleNamespace(modules=names),
            step_ms=sum(MS[p] for p in policies),
            peak_active_bytes=peak,
            peak_bytes=lambda _: peak,
            prediction=lambda: None,
        )

    def sample(self, plan: Plan, layers: int | None) -> Any:
        self.sampled.append((layers, {unit.decisions[0].op for unit in plan.units[: layers or 0]}))
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

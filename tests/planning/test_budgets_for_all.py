"""Memory budgets for all that is compiled beside mixes of policies, with a compiler and mixes that are tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autosac.errors import InfeasibleError
from autosac.planning.candidates import Candidates
from autosac.planning.planner import Goal
from autosac.planning.search import Search
from autosac.plans import Decision, Plan, Unit
from plans import MADE_FOR

GIB = 2**30


class Compiler:
    """Under a budget b of tenths the step reserves 30 + b GiB and takes 130 - b ms; under a mix what its unit states."""

    def __init__(self) -> None:
        self.tried: list[float] = []

    def under(self, plan: Plan) -> Any:
        tenths = 10 * plan.settings.memory_budget
        if not plan.units:
            self.tried.append(plan.settings.memory_budget)
            return simulation(30 + tenths, 130 - tenths)
        return simulation(plan.units[0].kept_bytes / GIB, plan.units[0].recompute_ms)


def simulation(peak_gib: float, step_ms: float) -> Any:
    report = SimpleNamespace(outside="", op="aten.mm", phase=SimpleNamespace(name="BACKWARD"), module="")
    return SimpleNamespace(
        step_ms=step_ms,
        recompute_ms=0.0,
        peak_bytes=lambda _: round(peak_gib * GIB),
        peak_active_bytes=int(peak_gib * GIB),
        memory=SimpleNamespace(peak=lambda: report),
        trace=SimpleNamespace(info=SimpleNamespace(compiled=True)),
        target=SimpleNamespace(with_expandable_segments=None),
    )


def mix(peak_gib: float, step_ms: float) -> Plan:
    kept = Decision(op=f"{peak_gib:g} GiB", occurrence=0, keep=True, outputs=())
    nbytes = int(peak_gib * GIB)
    unit = Unit(fqn="a", discard_fraction=0.5, kept_bytes=nbytes, recompute_ms=step_ms, decisions=(kept,))
    return Plan(made_for=MADE_FOR, units=(unit,))


class Mixes:
    """Proposes one mix, and one that recomputes all."""

    none = simulation(40.0, 120.0)
    has_budgets = True

    def __init__(self, found: Plan, smallest: Plan, *, leaves_out: bool) -> None:
        self.found, self._smallest, self.leaves_out = found, smallest, leaves_out

    def find(self, _: Goal, candidates: Candidates) -> None:
        candidates.verify(self.found)

    def smallest(self, _: Goal) -> Plan:
        return self._smallest

    def mirror(self, *_: Any) -> None:
        return None


def search(compiler: Compiler, mixes: Mixes, monkeypatch: pytest.MonkeyPatch) -> Search:
    monkeypatch.setattr("autosac.planning.search.plan_of", lambda *_: Plan(made_for=MADE_FOR, units=()))
    policies = SimpleNamespace(left_out=())
    planner: Any = SimpleNamespace(base=simulation(40.0, 120.0), goal=Goal(budget_bytes=1), policies=policies)
    return Search(compiler, planner, lambda _: None, mixes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mix_ms", "leaves_out", "tried", "step_ms"),
    [
        (127.5, True, [0.9, 0.8, 0.6, 0.7], 124.0),
        (121.5, True, [0.9, 0.8], 121.5),
        (120.5, True, [0.9], 120.5),
        (127.5, False, [], 127.5),
    ],
)
def test_a_budget_for_all_competes_with_mixes(
    mix_ms: float, leaves_out: bool, tried: list[float], step_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 GiB there are 36, which 0.6 needs and takes 124 ms. It is looked for from 0.9 on, the ninth of nine, as 36 / 40 of
    nine is 8.1; not below one that takes longer than the mix does, and only where mixes leave out what it decides on.
    """
    compiler = Compiler()
    found = search(compiler, Mixes(mix(35.0, mix_ms), mix(20.0, 200.0), leaves_out=leaves_out), monkeypatch)
    best = found.run(Goal(budget_bytes=36 * GIB))
    assert best is not None and best.simulation.step_ms == step_ms
    assert compiler.tried == tried


def test_what_is_said_to_work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 18 GiB a mix of 19 is tried, and full checkpointing of 20: the error names the second, which every budget's search
    tries. With 20 it is the plan, though the mix that is tried then needs 21.
    """
    whole = mix(20.0, 200.0)
    small = search(Compiler(), Mixes(mix(19.0, 190.0), whole, leaves_out=False), monkeypatch)
    goal = Goal(budget_bytes=18 * GIB)
    assert small.run(goal) is None
    with pytest.raises(InfeasibleError, match=r"the smallest budget found to work is 20\.00 GiB"):
        small.best(goal, {})
    found = search(Compiler(), Mixes(mix(21.0, 195.0), whole, leaves_out=False), monkeypatch)
    best = found.run(Goal(budget_bytes=20 * GIB))
    assert best is not None and best.plan == whole

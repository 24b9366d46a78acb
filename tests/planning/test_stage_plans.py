"""One plan from those of a pipeline's stages, on a stored step that stands for each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosac.errors import InfeasibleError
from autosac.planning import stage_plans
from autosac.planning.closed_loop import Planned
from autosac.planning.stage_plans import join_plans
from autosac.plans import Plan, Reasons, Unit
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace
from plans import MADE_FOR

STORED = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def steps() -> dict[str, Simulation]:
    """The step without checkpointing, and under it."""
    target = Target.of("h100-sxm-80gb", 8)
    return {name: simulation_of(Trace.load(STORED / f"{name}.trace"), target) for name in ("observed", "outer")}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that do not talk to each other: each keeps its own time."""

    class Apart:
        def __init__(self, *, stages: tuple[Simulation, ...]) -> None:
            self.stages = stages

        def joined(self) -> tuple[Simulation, ...]:
            return self.stages

    monkeypatch.setattr(stage_plans, "Pipeline", Apart)


def planned(step: Simulation, unit: str, *notes: str) -> Planned:
    """A stage's plan of one unit."""
    made_for = replace(
        MADE_FOR, budget_bytes=2 * step.peak_active_bytes, parameters=((f"{unit}.w", (2,)), ("tied", (1,)))
    )
    units = (Unit(fqn=unit, discard_fraction=1.0, kept_bytes=0, recompute_ms=1.0, decisions=()),)
    reasons: Any = (Reasons(objective="recompute", method=unit, ms_per_gib=0.0),)
    return Planned(plan=Plan(made_for=made_for, units=units, reasons=reasons), simulation=step, notes=notes)


def test_stages_become_one_plan(steps: dict[str, Simulation]) -> None:
    """All units, parameters once, the worst peaks, the baselines that every stage has; the notes say whose they are."""
    own, other = steps["observed"], steps["outer"]
    first = planned(own, "layers.0", "the verified peak uses 50%", "alike", "mine")
    second = planned(other, "layers.1", "the peak is at x", "alike")
    found = join_plans([first, second], [{"none": own, "full": other, "lost": own}, {"none": other, "full": other}])
    assert isinstance(found, Planned)
    assert [unit.fqn for unit in found.plan.units] == ["layers.0", "layers.1"]
    assert [name for name, _ in found.plan.made_for.parameters] == ["layers.0.w", "tied", "layers.1.w"]
    assert [reasons.method for reasons in found.plan.reasons] == ["layers.0", "layers.1"]
    assert list(found.plan.predictions) == ["autosac", "none", "full"]
    mine, full = found.plan.predictions["autosac"], found.plan.predictions["full"]
    assert (mine.step_ms, mine.peak_active_bytes) == (own.step_ms, own.peak_active_bytes)
    assert mine.peak_reserved_bytes == max(own.peak_reserved_bytes, other.peak_reserved_bytes)
    assert mine.recompute_ms == other.recompute_ms > own.recompute_ms == 0
    assert mine.fits and full.peak_active_bytes == other.peak_active_bytes
    assert found.simulation is own
    wait = f"{own.breakdown.bubble_ms:.1f} ms waiting for other stages"
    assert found.notes == (
        f"stage 0: 1 modules checkpointed, 50.0% of the budget, 0.0 ms recomputed, {wait}",
        f"stage 1: 1 modules checkpointed, 50.0% of the budget, {other.recompute_ms:.1f} ms recomputed, {wait}",
        "every stage: alike",
        "stage 0: mine",
    )


def test_what_some_stages_say(steps: dict[str, Simulation]) -> None:
    """Two of three are named; a single stage is not called every stage."""
    step = steps["outer"]
    stages = [planned(step, "a", "x"), planned(step, "b"), planned(step, "c", "x")]
    found = join_plans(stages, [{"none": step}] * 3)
    assert isinstance(found, Planned) and found.notes[-1] == "stages 0, 2: x"
    alone = join_plans(stages[:1], [{"none": step}])
    assert isinstance(alone, Planned) and alone.notes[-1] == "stage 0: x"


def test_a_stage_without_a_plan_is_named(steps: dict[str, Simulation]) -> None:
    """The first one."""
    stages = [planned(steps["outer"], "a"), InfeasibleError("no plan"), InfeasibleError("none either")]
    found = join_plans(stages, [{}] * 3)
    assert isinstance(found, InfeasibleError) and str(found) == "pipeline stage 1: no plan"

"""One plan from those of a pipeline's stages, on a stored step that stands for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosac import simulation
from autosac.errors import InfeasibleError
from autosac.planning.closed_loop import Planned
from autosac.planning.stage_plans import join_plans
from autosac.plans import Plan, Reasons, Unit
from autosac.runtime_sim import INSTANT_HOST, Timeline
from autosac.simulation import Pipeline, Simulation, Target, simulation_of
from autosac.trace import Phase, Trace
from plans import MADE_FOR

STORED = Path(__file__).parents[1] / "golden"


class Steps:
    """The stored step without checkpointing and under it, on each of FSDP's ranks."""

    def __init__(self) -> None:
        self._target = replace(Target.of("h100-sxm-80gb", 8), host=INSTANT_HOST)
        self._traces = {name: Trace.load(STORED / f"{name}.trace") for name in ("observed", "outer")}
        self._known: dict[tuple[str, int], Simulation] = {}

    def on(self, name: str, rank: int) -> Simulation:
        """One of them on a rank."""
        if (name, rank) not in self._known:
            trace = self._traces[name]
            trace = replace(trace, info=replace(trace.info, rank=rank))
            self._known[name, rank] = simulation_of(trace, self._target)
        return self._known[name, rank]


@pytest.fixture(scope="module")
def steps() -> Steps:
    """The steps."""
    return Steps()


def planned(step: Simulation, unit: str, *notes: str) -> Planned:
    """A stage's plan of one unit."""
    made_for = replace(
        MADE_FOR, budget_bytes=2 * step.peak_active_bytes, parameters=((f"{unit}.w", (2,)), ("tied", (1,)))
    )
    units = (Unit(fqn=unit, discard_fraction=1.0, kept_bytes=0, recompute_ms=1.0, decisions=()),)
    reasons: Any = (Reasons(objective="recompute", method=unit, ms_per_gib=0.0),)
    return Planned(plan=Plan(made_for=made_for, units=units, reasons=reasons), simulation=step, notes=notes)


def test_stages_become_one_plan(steps: Steps) -> None:
    """All units, parameters once, the worst peaks, the baselines that every stage has; the notes say whose they are, and what
    of the recomputation is the step's: here all of it, for nothing else takes so long.
    """
    own, other = steps.on("observed", 0), steps.on("outer", 1)
    first = planned(own, "layers.0", "the verified peak uses 50%", "alike", "mine")
    second = planned(other, "layers.1", "the peak is at x", "alike")
    none, full = (own, steps.on("observed", 1)), (steps.on("outer", 0), other)
    baselines = [{"none": none[0], "full": full[0], "lost": own}, {"none": none[1], "full": full[1]}]
    found = join_plans([first, second], baselines)
    assert isinstance(found, Planned)
    assert [unit.fqn for unit in found.plan.units] == ["layers.0", "layers.1"]
    assert [name for name, _ in found.plan.made_for.parameters] == ["layers.0.w", "tied", "layers.1.w"]
    assert [reasons.method for reasons in found.plan.reasons] == ["layers.0", "layers.1"]
    predictions = found.plan.predictions
    assert list(predictions) == ["autosac", "none", "full"]
    for name, stages in (("autosac", (own, other)), ("none", none), ("full", full)):
        assert predictions[name].step_ms == Pipeline(stages=stages).timeline.makespan_ms
        assert predictions[name].peak_active_bytes == max(stage.peak_active_bytes for stage in stages)
        assert predictions[name].peak_reserved_bytes == max(stage.peak_reserved_bytes for stage in stages)
        assert predictions[name].recompute_ms == max(stage.recompute_ms for stage in stages)
    timeline = Pipeline(stages=(own, other)).timeline
    exposed_ms = timeline.exposed_recompute_ms()
    assert exposed_ms[0] == 0 and exposed_ms[1] == pytest.approx(other.recompute_ms, rel=0.01)
    assert found.simulation.trace is own.trace and found.simulation.step_ms == predictions["autosac"].step_ms
    waits = [f"{timeline.parts(position).bubble_ms:.1f} ms waiting for other stages" for position in (0, 1)]
    share = other.peak_bytes(MADE_FOR.budget_kind) / other.peak_active_bytes / 2
    assert found.notes == (
        f"stage 0: 1 modules checkpointed, 50.0% of the budget, 0.0 ms recomputed, {waits[0]}",
        f"stage 1: 1 modules checkpointed, {share:.1%} of the budget, {other.recompute_ms:.1f} ms recomputed "
        f"(0.0 ms of it hidden), {waits[1]}",
        f"{exposed_ms[1]:.1f} ms of the step is recomputation; the rest hides in bubbles or behind other work",
        "every stage: alike",
        "stage 0: mine",
    )


def test_recomputation_of_compiled_stages_is_what_their_step_takes_longer(steps: Steps) -> None:
    """It is a part of their backwards, so that the traces do not tell it: a stage's line does not say it either."""

    def compiled(name: str, rank: int) -> Simulation:
        step = steps.on(name, rank)
        events = tuple(
            event._replace(phase=Phase.BACKWARD) if getattr(event, "phase", None) is Phase.RECOMPUTE else event
            for event in step.trace.events
        )
        info = replace(step.trace.info, compiled=True)
        return simulation_of(replace(step.trace, info=info, events=events), step.target)

    none, full = ([compiled(name, rank) for rank in (0, 1)] for name in ("observed", "outer"))
    baselines = [{"none": free, "full": other} for free, other in zip(none, full, strict=True)]
    found = join_plans([planned(stage, unit) for stage, unit in zip(full, "ab", strict=True)], baselines)
    assert isinstance(found, Planned)
    predictions = found.plan.predictions
    longer_ms = predictions["full"].step_ms - predictions["none"].step_ms
    assert longer_ms > 0 == predictions["none"].recompute_ms
    assert predictions["full"].recompute_ms == predictions["autosac"].recompute_ms == longer_ms
    assert not any("recomputed" in note for note in found.notes)
    bare = join_plans([planned(stage, unit) for stage, unit in zip(full, "ab", strict=True)], [{}])
    assert isinstance(bare, Planned) and bare.plan.predictions["autosac"].recompute_ms == 0


def test_each_step_of_all_stages_is_executed_once(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans' own, for its prediction, a baseline's and the notes; and another baseline's."""
    executed: list[tuple[Simulation, ...]] = []
    execute = simulation.execute_together

    def counted(stages: Sequence[Simulation]) -> Timeline:
        executed.append(tuple(stages))
        return execute(stages)

    monkeypatch.setattr(simulation, "execute_together", counted)
    own, none = ([steps.on(name, rank) for rank in (0, 1)] for name in ("outer", "observed"))
    baselines = [{"none": one, "own": other} for one, other in zip(none, own, strict=True)]
    join_plans([planned(stage, unit) for stage, unit in zip(own, "ab", strict=True)], baselines)
    assert [list(map(id, stages)) for stages in executed] == [list(map(id, own)), list(map(id, none))]


def test_what_some_stages_say(steps: Steps) -> None:
    """Two of three are named; a single stage is not called every stage."""
    stages = [planned(steps.on("outer", rank), name, *notes) for rank, (name, *notes) in enumerate(["ax", "b", "cx"])]
    found = join_plans(stages, [{"none": steps.on("observed", rank)} for rank in range(3)])
    assert isinstance(found, Planned) and found.notes[-1] == "stages 0, 2: x"
    alone = join_plans(stages[:1], [{"none": steps.on("observed", 0)}])
    assert isinstance(alone, Planned) and alone.notes[-1] == "stage 0: x"


def test_a_stage_without_a_plan_is_named(steps: Steps) -> None:
    """The first one."""
    stages = [planned(steps.on("outer", 0), "a"), InfeasibleError("no plan"), InfeasibleError("none either")]
    found = join_plans(stages, [{}] * 3)
    assert isinstance(found, InfeasibleError) and str(found) == "pipeline stage 1: no plan"

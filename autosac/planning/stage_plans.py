"""One plan from the plans of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosac.errors import InfeasibleError
from autosac.planning.closed_loop import Planned
from autosac.planning.joint_choice import JointSteps
from autosac.plans import Plan, Prediction
from autosac.simulation import Simulation

# Notes of one stage's plan that its line among all stages' says as well.
_OF_THE_BUDGET = ("the verified peak uses", "the peak is at")


def join_plans(
    stages: Sequence[Planned | InfeasibleError],
    baselines: Sequence[Mapping[str, Simulation]],
    steps: JointSteps | None = None,
) -> Planned | InfeasibleError:
    """The plan of the whole job; its predictions are those of all stages together. The first error if a stage has none.

    `steps`: what has been executed already.
    """
    steps = steps or JointSteps()
    planned: list[Planned] = []
    for position, stage in enumerate(stages):
        if isinstance(stage, InfeasibleError):
            return InfeasibleError(f"pipeline stage {position}: {stage}", peak_in=stage.peak_in)
        planned.append(stage)
    own = [stage.simulation for stage in planned]
    pipeline = steps.pipeline(own)  # held: `steps` keeps the last one only
    predictions = {
        "autosac": _prediction(own, steps, _free_ms(baselines, steps)),
        **joint_predictions(baselines, steps),
    }
    together = pipeline.joined()
    first = planned[0].plan
    assert all(stage.plan.settings.memory_budget == first.settings.memory_budget for stage in planned)
    slices = first.settings.optimizer_slice_bytes
    assert all(stage.plan.settings.optimizer_slice_bytes == slices for stage in planned)
    return Planned(
        plan=replace(merged([stage.plan for stage in planned]), predictions=predictions),
        simulation=max(together, key=lambda stage: stage.peak_bytes(first.made_for.budget_kind)),
        notes=_notes(planned, together),
    )


def merged(plans: Sequence[Plan]) -> Plan:
    """The first stage's plan with the parameters, units and reasons of all of them."""
    return replace(
        plans[0],
        made_for=replace(
            plans[0].made_for, parameters=tuple(dict.fromkeys(p for plan in plans for p in plan.made_for.parameters))
        ),
        units=tuple(unit for plan in plans for unit in plan.units),
        reasons=tuple(reasons for plan in plans for reasons in plan.reasons),
    )


def joint_predictions(
    baselines: Sequence[Mapping[str, Simulation]], steps: JointSteps | None = None
) -> dict[str, Prediction]:
    """What is shown of the policies that all stages can run under. Waits for their captures, and does meanwhile what is to be
    done with those that are there.
    """
    steps = steps or JointSteps()
    found, free_ms = {}, _free_ms(baselines, steps)
    for name in baselines[0]:
        stages: list[Simulation] = []
        for stage in baselines:
            if name in stage:
                stages.append(stage[name])
                stages[-1].work_ahead()
        if len(stages) == len(baselines):
            found[name] = _prediction(stages, steps, free_ms)
    return found


def _free_ms(baselines: Sequence[Mapping[str, Simulation]], steps: JointSteps) -> float | None:
    """The step of all stages without checkpointing; None if that of one is not known."""
    if not all("none" in stage for stage in baselines):
        return None
    return steps.step_ms([stage["none"] for stage in baselines], is_beside=True)


def _prediction(stages: Sequence[Simulation], steps: JointSteps, free_ms: float | None) -> Prediction:
    """As `prediction_of_stages`, also of a compiled step. `free_ms`: the step without checkpointing, if it is known."""
    prediction = prediction_of_stages(stages, steps.step_ms(stages, is_beside=True))
    compiled = any(stage.trace.info.compiled for stage in stages)
    return prediction.compiled(free_ms) if compiled and free_ms is not None else prediction


def prediction_of_stages(stages: Sequence[Simulation], step_ms: float) -> Prediction:
    """Step time of the pipeline; peaks and recomputation of the stage that has most. No stage is executed by itself."""
    return Prediction(
        step_ms=step_ms,
        peak_active_bytes=max(stage.peak_active_bytes for stage in stages),
        peak_reserved_bytes=max(stage.peak_reserved_bytes for stage in stages),
        fits=all(stage.fits for stage in stages),
        recompute_ms=max(stage.recompute_ms for stage in stages),
    )


def _notes(planned: Sequence[Planned], together: Sequence[Simulation]) -> tuple[str, ...]:
    """One line per stage, and what the stages' own plans have to tell that is not about the budget's use."""
    notes = []
    timeline = together[0].timeline
    exposed_ms = timeline.exposed_recompute_ms()
    for position, (stage, simulation) in enumerate(zip(planned, together, strict=True)):
        budget = stage.plan.made_for.budget_bytes
        peak = simulation.peak_bytes(stage.plan.made_for.budget_kind)
        recompute_ms = simulation.recompute_ms
        hidden = f" ({max(0.0, recompute_ms - exposed_ms[position]):.1f} ms of it hidden)" if recompute_ms else ""
        compiled = simulation.trace.info.compiled  # recomputation is a part of its backward
        notes.append(
            f"stage {position}: {stage.plan.doing}, {peak / budget:.1%} of the budget, "
            + ("" if compiled else f"{recompute_ms:.1f} ms recomputed{hidden}, ")
            + f"{timeline.parts(position).bubble_ms:.1f} ms waiting for other stages"
        )
    if sum(exposed_ms):
        notes.append(
            f"{sum(exposed_ms):.1f} ms of the step is recomputation; the rest hides in bubbles or behind other work"
        )
    own: dict[str, list[str]] = {}
    for position, stage in enumerate(planned):
        for note in stage.notes:
            if not note.startswith(_OF_THE_BUDGET):
                own.setdefault(note, []).append(str(position))
    for note, positions in own.items():
        every = len(planned) > 1 and len(positions) == len(planned)
        where = "every stage" if every else f"stage{'s' * (len(positions) > 1)} {', '.join(positions)}"
        notes.append(f"{where}: {note}")
    return tuple(notes)

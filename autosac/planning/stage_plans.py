"""One plan from the plans of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosac.errors import InfeasibleError
from autosac.planning.closed_loop import Planned
from autosac.plans import Prediction
from autosac.simulation import Pipeline, Simulation

# Notes of one stage's plan that its line among all stages' says as well.
_OF_THE_BUDGET = ("the verified peak uses", "the peak is at")


def join_plans(
    stages: Sequence[Planned | InfeasibleError], baselines: Sequence[Mapping[str, Simulation]]
) -> Planned | InfeasibleError:
    """The plan of the whole job; its predictions are those of all stages together. The first error if a stage has none."""
    planned: list[Planned] = []
    for position, stage in enumerate(stages):
        if isinstance(stage, InfeasibleError):
            return InfeasibleError(f"pipeline stage {position}: {stage}")
        planned.append(stage)
    together = Pipeline(stages=tuple(stage.simulation for stage in planned)).joined()
    predictions = {"autosac": _prediction(together)}
    for name in baselines[0]:
        if not all(name in stage for stage in baselines):
            continue
        predictions[name] = _prediction(Pipeline(stages=tuple(stage[name] for stage in baselines)).joined())
    first = planned[0].plan
    plan = replace(
        first,
        made_for=replace(
            first.made_for,
            parameters=tuple(dict.fromkeys(p for stage in planned for p in stage.plan.made_for.parameters)),
        ),
        units=tuple(unit for stage in planned for unit in stage.plan.units),
        predictions=predictions,
        reasons=tuple(reasons for stage in planned for reasons in stage.plan.reasons),
    )
    return Planned(
        plan=plan,
        simulation=max(together, key=lambda stage: stage.peak_bytes(first.made_for.budget_kind)),
        notes=_notes(planned, together),
    )


def _prediction(stages: Sequence[Simulation]) -> Prediction:
    """Step time of the pipeline; peaks and recomputation of the stage that has most."""
    single = [stage.prediction() for stage in stages]
    return Prediction(
        step_ms=stages[0].step_ms,
        peak_active_bytes=max(p.peak_active_bytes for p in single),
        peak_reserved_bytes=max(p.peak_reserved_bytes or 0 for p in single),
        fits=all(p.fits for p in single),
        recompute_ms=max(p.recompute_ms for p in single),
    )


def _notes(planned: Sequence[Planned], together: Sequence[Simulation]) -> tuple[str, ...]:
    """One line per stage, and what the stages' own plans have to tell that is not about the budget's use."""
    notes = []
    for position, (stage, simulation) in enumerate(zip(planned, together, strict=True)):
        budget = stage.plan.made_for.budget_bytes
        peak = simulation.peak_bytes(stage.plan.made_for.budget_kind)
        notes.append(
            f"stage {position}: {len(stage.plan.units)} modules checkpointed, {peak / budget:.1%} of the budget, "
            f"{simulation.recompute_ms:.1f} ms recomputed, {simulation.breakdown.bubble_ms:.1f} ms waiting for other stages"
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

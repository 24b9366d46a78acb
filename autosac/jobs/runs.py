"""A job whose first steps were measured: a profile that they correct, and a plan made again with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autosac.errors import UsageError
from autosac.estimator.calibration.profile import profile_base
from autosac.estimator.calibration.runs import LearnedRun, learn_run
from autosac.estimator.calibration.traces.correction import load_correction
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.files.writing import write_text_atomically
from autosac.jobs.tasks import TitanJob, plan_job, simulate_job
from autosac.plans import Plan
from autosac.runs import RunRecord
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace

REPLAN_GAIN = 0.02
Progress = Callable[[str], None]


def measured_target(gpu: str, world_size: int) -> Target:
    """The machine that a run's times are compared with: the profile without what an earlier run has corrected."""
    target = Target.of(gpu, world_size)
    bare = replace(target.hardware, run_corrected="", more_active_bytes=0, more_reserved_bytes=0)
    return replace(target, hardware=bare)


def simulate_run(record: RunRecord, gpu: str, plan_file: str | None, progress: Progress) -> Simulation:
    """The step that the record is of. UsageError if it does not name a job, or its plan has changed."""
    if not record.job:
        raise UsageError("the run is of an eager model: give its capture (simulate --save-capture) before --from-run")
    if record.plan_hash and plan_file is None:
        plan_file = record.plan_file
        if not plan_file or not Path(plan_file).exists():
            raise UsageError(f"the run followed a plan that is not at {plan_file or '(no file)'}: give it with --plan")
    if plan_file is not None and record.plan_hash and Plan.load(plan_file).hash() != record.plan_hash:
        raise UsageError(f"{plan_file} is not the plan that the run followed")
    target = measured_target(gpu, record.world_size)
    job = TitanJob.of(record.job, gpu=gpu, world_size=record.world_size, overrides=record.overrides, progress=progress)
    simulation, _ = simulate_job(
        replace(job, target=replace(job.target, hardware=target.hardware)), plan_file=plan_file
    )
    return simulation


def simulate_capture(record: RunRecord, gpu: str, trace: Trace, plan: Plan | None) -> Simulation:
    """The captured step that the record is of."""
    return simulation_of(trace, measured_target(gpu, max(record.world_size, trace.info.world_size)), plan)


def learn(record: RunRecord, simulation: Simulation) -> LearnedRun:
    """What the record says of the simulated step's profile. Times are compared on rank 0, peaks on the fullest rank."""
    first = simulation.pipeline.joined()[0] if simulation.pipeline is not None else simulation
    return learn_run(
        record,
        first.trace,
        first.timeline.ranks[first.stage],
        first.pricing,
        first.step_ms,
        first.target.hardware,
        (simulation.peak_active_bytes, simulation.peak_reserved_bytes),
    )


def write_profile(learned: LearnedRun, hardware: Hardware, gpu: str, output: Path) -> None:
    """The profile and the corrections beside it; each appears whole or not at all. UsageError as of `profile_base`."""
    base = profile_base(hardware, output, gpu)
    corrections = output.with_suffix(".run.json")
    learned.correction.save(corrections)
    lines = [
        "# Written by autosac calibrate --from-run.",
        f"base = {json.dumps(base)}",
        f"description = {json.dumps(f'{hardware.description}, corrected by a run'[:500])}",
        f"run_corrected = {json.dumps(corrections.name)}",
    ]
    if learned.more_bytes is not None:
        lines += [
            f"more_{kind}_bytes = {more}" for kind, more in zip(("active", "reserved"), learned.more_bytes, strict=True)
        ]
    write_text_atomically(output, "\n".join(lines) + "\n")
    load_correction.cache_clear()
    load_hardware.cache_clear()


class Replanned(NamedTuple):
    """A plan made with what a run has measured; None to go on with the present one. `why`: in one line."""

    plan: Plan | None
    why: str


def replan(record: RunRecord, plan: Plan, profile: Path, *, budget: str, **settings: object) -> Replanned:
    """Plan the job again with its measured steps: taken if the budget is missed or the step is shorter by more than 2 %.

    Writes the corrected profile. `settings`: of `plan_job`. Whatever planning raises.
    """
    simulation = simulate_run(record, record.gpu, record.plan_file or None, lambda _: None)
    write_profile(learn(record, simulation), simulation.target.hardware, record.gpu, profile)
    corrected = Target.of(str(profile), record.world_size)
    present_ms = simulation.on(replace(simulation.target, hardware=corrected.hardware)).step_ms
    found: Plan = plan_job(
        config_file=record.job,
        overrides=record.overrides,
        gpu=str(profile),
        world_size=record.world_size,
        budget=budget,
        **settings,  # type: ignore[arg-type]
    )
    new_ms = found.predictions["autosac"].step_ms
    said = f"{new_ms:.1f} ms a step instead of {present_ms:.1f}"
    own = found.settings.job_checkpointing
    if own != plan.settings.job_checkpointing or (own and found.settings.early_stop != plan.settings.early_stop):
        return Replanned(
            None, f"a new plan ({said}) changes how TorchTitan checkpoints by itself, which needs a restart"
        )
    if (found.units, found.settings) == (plan.units, plan.settings):
        return Replanned(None, "the new plan is the same")
    if found.settings.loss_chunks != plan.settings.loss_chunks:
        return Replanned(
            None, f"a new plan ({said}) computes the loss in another number of chunks, which needs a restart"
        )
    if record.misses_budget:
        return Replanned(found, f"the budget was exceeded: {said}")
    if new_ms < (1 - REPLAN_GAIN) * present_ms:
        return Replanned(found, said)
    return Replanned(None, f"a new plan would not be faster by more than {REPLAN_GAIN:.0%}: {said}")

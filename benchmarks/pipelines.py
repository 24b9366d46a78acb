"""Plans of pipelined jobs: each stage planned by itself, beside plans for the step of all stages together.

    python -m benchmarks.pipelines [--jobs 8b-pp2-interleaved,...] [--gpu h100-sxm-80gb] [--budgets 40GiB,50GiB]

One row for each job: its step without checkpointing and under full checkpointing; "alone", the step if each stage follows the
plan that makes its own step shortest; "together", the step under the plan of all stages; by how much that is above the least
possible, at most; and what of all recomputation is hidden, by stage. All steps are of all stages together. Plans are simulated
on derived traces; nothing is captured under them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.tasks import captures_of
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Goal, Planned, make_plans
from autosac.planning.pipeline_plans import make_pipeline_plans
from autosac.planning.stage_plans import join_plans
from autosac.quantities import format_bytes, format_ms, parse_budget

EXAMPLES = Path(__file__).parents[1] / "examples"


class Job(NamedTuple):
    """A job file of the examples, its GPUs, stages and schedule, its budget, and other settings."""

    file: str
    world_size: int
    stages: int
    schedule: str
    budget: str
    overrides: tuple[str, ...] = ()


_BATCH = ("--training.local_batch_size", "8", "--training.seq_len", "4096")
JOBS = {
    "8b-pp2": Job("llama3_8b.toml", 8, 2, "1F1B", "60GiB", _BATCH),
    "8b-pp2-interleaved": Job("llama3_8b.toml", 8, 2, "Interleaved1F1B", "50GiB", _BATCH),
    "8b-pp2-zbv": Job("llama3_8b.toml", 8, 2, "ZBVZeroBubble", "64GiB", _BATCH),
    "8b-pp4": Job("llama3_8b.toml", 8, 4, "1F1B", "36GiB", _BATCH),
    "8b-pp4-interleaved": Job("llama3_8b.toml", 8, 4, "Interleaved1F1B", "40GiB", _BATCH),
    "70b-pp4": Job(
        "llama3_70b.toml",
        64,
        4,
        "1F1B",
        "60GiB",
        ("--parallelism.tensor_parallel_degree", "8", "--training.local_batch_size", "8"),
    ),
}


def titan_job(job: Job, gpu: str) -> TitanJob:
    """The job as planning sees it."""
    pipeline = (
        "--parallelism.pipeline_parallel_degree",
        str(job.stages),
        "--parallelism.pipeline_parallel_schedule",
        job.schedule,
    )
    overrides = (*pipeline, *job.overrides)
    return TitanJob.of(str(EXAMPLES / job.file), gpu=gpu, world_size=job.world_size, overrides=overrides)


def alone(captures: Sequence[TitanCaptures], goal: Goal) -> Planned | InfeasibleError:
    """Each stage under the plan that makes its own step shortest."""
    plans = [make_plans(stage, goal, (goal.budget_bytes,))[0] for stage in captures]
    return join_plans(plans, [stage.baselines() for stage in captures])


def row(name: str, job: Job, captures: Sequence[TitanCaptures], goal: Goal) -> list[str]:
    """What the table says of a job."""
    (together,) = make_pipeline_plans(captures, goal, (goal.budget_bytes,))
    before = alone(captures, goal)
    heading = [name, job.schedule, format_bytes(goal.budget_bytes)]
    if isinstance(together, InfeasibleError) or isinstance(before, InfeasibleError):
        return [*heading, str(together)]
    predictions, pipeline = together.plan.predictions, together.simulation.pipeline
    assert pipeline is not None
    exposed_ms = pipeline.timeline.exposed_recompute_ms()
    hidden = [
        f"{max(0.0, stage.recompute_ms - ms):.0f} of {stage.recompute_ms:.0f}"
        for stage, ms in zip(pipeline.stages, exposed_ms, strict=True)
    ]
    bound = next(
        (note.split("at most ")[1].split()[0] for note in together.notes if "step of all stages is" in note), "-"
    )
    steps = [predictions[policy].step_ms for policy in ("none", "full")]
    steps += [before.plan.predictions["autosac"].step_ms, predictions["autosac"].step_ms]
    return [*heading, *map(format_ms, steps), bound, ", ".join(hidden)]


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--budgets", default="", help="instead of each job's own")
    arguments = parser.parse_args()
    names = arguments.jobs.split(",")
    unknown = sorted(set(names) - set(JOBS))
    if unknown:
        parser.error(f"unknown jobs {unknown}")
    table = Table(title="Step of all stages together")
    for heading in ("job", "schedule", "budget", "none", "full", "alone", "together", "bound", "hidden, by stage (ms)"):
        table.add_column(heading, justify="left" if heading in ("job", "schedule") else "right")
    for name in names:
        job = JOBS[name]
        with CaptureServer() as server, tempfile.TemporaryDirectory(prefix="autosac-") as folder:
            titan = titan_job(job, arguments.gpu)
            captures = captures_of(titan, server, Path(folder), ("none",), beside=("none", "full"))
            for text in filter(None, (arguments.budgets or job.budget).split(",")):
                budget = parse_budget(text, titan.target.hardware.usable_bytes)
                table.add_row(*row(name, job, captures, Goal(budget_bytes=budget, confirm=False)))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

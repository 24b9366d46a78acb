"""``autosac calibrate --from-run``: simulates the step that was measured, writes the corrected profile, and reports."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autosac.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autosac.estimator.calibration.runs import LearnedRun
    from autosac.runs import RunRecord
    from autosac.simulation import Simulation


def calibrate_from_run(arguments: argparse.Namespace) -> dict[str, Any] | RenderableType:
    """Learn from the run, write the profile, and return what is to be printed: JSON's document or tables."""
    from autosac.cli.progress import progress_line
    from autosac.jobs.runs import learn, write_profile
    from autosac.runs import RunRecord

    record = RunRecord.load(arguments.from_run)
    gpu = arguments.gpu or record.gpu
    if not gpu:
        raise UsageError(f"{arguments.from_run} does not name a known GPU: give the profile to correct with --gpu")
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        simulation = _simulated(arguments, record, gpu, progress)
    learned = learn(record, simulation)
    write_profile(learned, simulation.target.hardware, gpu, arguments.output)
    if arguments.json:
        return _document(record, simulation, learned, arguments)
    return _report(record, simulation, learned, arguments)


def _simulated(arguments: argparse.Namespace, record: RunRecord, gpu: str, progress: Any) -> Simulation:
    from autosac.jobs.runs import simulate_capture, simulate_run
    from autosac.plans import Plan
    from autosac.trace import Trace, is_capture

    if arguments.job is not None and is_capture(arguments.job):
        plan = Plan.load(arguments.plan) if arguments.plan is not None else None
        return simulate_capture(record, gpu, Trace.load(arguments.job), plan)
    if arguments.job is not None:
        record = replace(record, job=arguments.job, overrides=arguments.overrides or record.overrides)
    return simulate_run(record, gpu, str(arguments.plan) if arguments.plan is not None else None, progress)


def _document(
    record: RunRecord, simulation: Simulation, learned: LearnedRun, arguments: argparse.Namespace
) -> dict[str, Any]:
    return {
        "profile": str(arguments.output),
        "step_ms": {"predicted": simulation.step_ms, "measured": record.step_ms},
        "parts": [part._asdict() for part in learned.parts],
        "more_bytes": learned.more_bytes,
    }


def _report(
    record: RunRecord, simulation: Simulation, learned: LearnedRun, arguments: argparse.Namespace
) -> RenderableType:
    from rich.console import Group

    from autosac.display.tables import Table

    table = Table(title="The step by its parts", title_justify="left")
    table.add_column("module")
    table.add_column("part")
    for heading in ("alike", "predicted ms", "measured ms", "corrected ms"):
        table.add_column(heading, justify="right")
    for part in sorted(learned.parts, key=lambda p: -p.measured_ms * p.count):
        times = (part.predicted_ms, part.measured_ms, part.corrected_ms)
        table.add_row(part.name or "-", part.part, str(part.count), *(f"{ms:,.2f}" for ms in times))
    lines: list[Any] = [
        f"profile written to {arguments.output}",
        f"step: {simulation.step_ms:,.1f} ms predicted, {record.step_ms:,.1f} ms measured",
    ]
    if learned.more_bytes is not None:
        mib = (f"{nbytes / 2**20:+,.1f} MiB" for nbytes in learned.more_bytes)
        lines.append("peaks above the prediction: {} active, {} reserved".format(*mib))
    return Group(*lines, table)

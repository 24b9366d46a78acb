"""The commands of the command line, each a function of the parsed arguments."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosac import reports
from autosac.errors import UsageError
from autosac.jobs import BASELINES, TitanJob, plan_titan_job, simulate_job
from autosac.planning import Goal
from autosac.plans import Plan
from autosac.progress import progress_line
from autosac.quantities import parse_budget
from autosac.simulation import Simulation


def run(arguments: argparse.Namespace) -> None:
    """Run the command that was asked for."""
    {"plan": plan, "simulate": simulate, "explain": explain}[arguments.run](arguments)


def _job(arguments: argparse.Namespace, progress: Any) -> TitanJob:
    return TitanJob.of(
        arguments.job,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
        overrides=arguments.overrides,
        rank=arguments.rank,
        cluster=arguments.cluster,
        allocator=arguments.alloc_conf,
        debug=arguments.debug,
        progress=progress,
    )


def _check_writable(*paths: Path | None) -> None:
    """Refuse before the work, not after it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{path} is a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")


def plan(arguments: argparse.Namespace) -> None:
    """``autosac plan``."""
    _check_writable(arguments.output)
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        job = _job(arguments, progress)
        goal = Goal(
            budget_bytes=parse_budget(arguments.budget, job.target.hardware.usable_bytes),
            budget_kind=arguments.budget_kind,
            solver=arguments.solver,
            milp=arguments.milp,
            time_limit_s=arguments.time_limit,
            gap=arguments.gap,
        )
        planned = plan_titan_job(job, goal)
    if arguments.output is not None:
        planned.plan.save(arguments.output)
    if arguments.json:
        print(planned.plan.to_bytes().decode(), end="")
        return
    out = reports.console()
    out.print(reports.plan_summary(planned.plan, planned.notes))
    if arguments.output is not None:
        out.print(f"plan written to {arguments.output}")


def simulate(arguments: argparse.Namespace) -> None:
    """``autosac simulate``."""
    _check_writable(
        arguments.trace,
        arguments.memory_html,
        arguments.memory_png,
        arguments.memory_snapshot,
        arguments.save_capture,
    )
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        job = _job(arguments, progress)
        simulation, others = simulate_job(
            job,
            beside=BASELINES if arguments.memory else (),
            checkpointing=arguments.ac or "job",
            plan_file=str(arguments.plan) if arguments.plan else None,
        )
        _write_pictures(arguments, simulation)
        name = arguments.ac or (str(arguments.plan) if arguments.plan else "the job as it is")
        summary = reports.simulation_summary(simulation, name)
    if arguments.json:
        document = simulation_document(simulation)
        if others:
            document["beside"] = {mode: asdict(other.prediction()) for mode, other in others.items()}
        print(json.dumps(document, indent=1))
        return
    out = reports.console()
    out.print(summary)
    if arguments.memory:
        out.print(reports.memory_tables(simulation))
        out.print(reports.mode_table(simulation, others))


def _write_pictures(arguments: argparse.Namespace, simulation: Simulation) -> None:
    if arguments.save_capture is not None:
        simulation.trace.save(arguments.save_capture)
    if arguments.trace is not None:
        from autosac.runtime_sim import write_chrome_trace

        write_chrome_trace(simulation.timeline, arguments.trace)
    if arguments.memory_snapshot is not None:
        from autosac.memory_sim.viewer import memory_snapshot, write_memory_snapshot

        target = simulation.target
        snapshot = memory_snapshot(simulation.trace, config=target.allocator, workspaces=target.workspaces)
        write_memory_snapshot(arguments.memory_snapshot, snapshot)
    if arguments.memory_html is not None or arguments.memory_png is not None:
        from autosac.memory_sim.pictures import timeline_html, timeline_png

        for path, draw in ((arguments.memory_html, timeline_html), (arguments.memory_png, timeline_png)):
            if path is not None:
                title = f"{simulation.trace.info.get('model', 'The job')}: memory over one training step"
                draw(path, simulation.memory, title=title, report=simulation.unlimited_allocation)


def simulation_document(simulation: Simulation) -> dict[str, Any]:
    """The simulation's figures as JSON."""
    breakdown = asdict(simulation.timeline.breakdown())
    breakdown.pop("modules")
    verdict = simulation.allocation.verdict
    peak = simulation.memory.peak()
    return {
        "job": {k: v for k, v in simulation.trace.info.items() if k != "parameter_shapes"},
        "step": breakdown,
        "peak_active_bytes": peak.nbytes,
        "peak_reserved_bytes": simulation.peak_reserved_bytes,
        "peak_at": {"operator": peak.op, "module": peak.module, "phase": peak.phase.name.lower()},
        "peak_by_category": {category.name.lower(): nbytes for category, nbytes in peak.by_category.items()},
        "outside_of_pytorch_bytes": simulation.target.hardware.context_bytes + simulation.nccl_bytes,
        "verdict": verdict.outcome.value,
        "verdict_text": str(verdict),
        "priced_ms_by_model": simulation.pricing.shares(),
        "priced_by_bytes_ms": simulation.pricing.unknown,
    }


def explain(arguments: argparse.Namespace) -> None:
    """``autosac explain``."""
    plan = Plan.load(arguments.plan)
    units = plan.units
    if arguments.module is not None:
        units = tuple(unit for unit in units if unit.fqn == arguments.module)
        if not units:
            known = ", ".join(unit.fqn for unit in plan.units[:6]) or "none"
            raise UsageError(f"the plan checkpoints no module {arguments.module!r}; it checkpoints: {known}, ...")
    if arguments.json:
        print(json.dumps([asdict(unit) for unit in units], indent=1))
        return
    out = reports.console()
    if arguments.module is None:
        out.print(reports.plan_summary(plan))
        shown: set[object] = set()
        for unit in units:
            if unit.decisions not in shown:
                shown.add(unit.decisions)
                out.print(reports.decision_table(unit))
    else:
        out.print(reports.decision_table(units[0]))

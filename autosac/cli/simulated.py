"""What a simulated step is printed and written as, for the commands that simulate one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosac.estimator import AlphaBeta, ChunkModel, LogSigmoid
from autosac.files.writing import check_outputs
from autosac.plans import Plan
from autosac.runtime_sim import NoInterference
from autosac.simulation import Simulation, Target


def check_pictures(arguments: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """UsageError if one of the files of `add_pictures` cannot be written, or is an input."""
    check_outputs(
        (
            ("--trace", arguments.trace),
            ("--memory-html", arguments.memory_html),
            ("--memory-png", arguments.memory_png),
            ("--memory-snapshot", arguments.memory_snapshot),
            ("--save-capture", arguments.save_capture),
        ),
        inputs,
    )


def with_models(target: Target, arguments: argparse.Namespace) -> Target:
    """The target with the models of overlap and of collectives that were asked for."""
    if arguments.interference == "off":
        target = replace(target, overlap=NoInterference())
    if arguments.collectives != "flows":
        model = {"fitted": LogSigmoid, "alpha-beta": AlphaBeta, "chunks": ChunkModel}[arguments.collectives]
        target = replace(target, collectives=model(target.hardware))
    return target


def write_pictures(arguments: argparse.Namespace, simulation: Simulation, plan: Plan | None) -> None:
    """Write what was asked for; `plan` is the one that the step follows."""
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
        from autosac.report.memory_pictures import draw_memory

        made_for = plan.made_for if plan is not None else None
        draw_memory(simulation, html=arguments.memory_html, png=arguments.memory_png, made_for=made_for)


def simulation_document(simulation: Simulation) -> dict[str, Any]:
    """The simulation's figures as JSON."""
    breakdown = asdict(simulation.breakdown)
    breakdown.pop("modules")
    verdict = simulation.allocation.verdict
    peak = simulation.memory.peak()
    return {
        "job": replace(simulation.trace.info, parameter_shapes={}).document(),
        "step": breakdown,
        "peak_active_bytes": simulation.peak_active_bytes,
        "peak_reserved_bytes": simulation.peak_reserved_bytes,
        "peak_at": {"operator": peak.op, "module": peak.module, "phase": peak.phase.name.lower()},
        "peak_by_category": {category.name.lower(): nbytes for category, nbytes in peak.by_category.items()},
        "outside_of_pytorch_bytes": simulation.target.hardware.context_bytes + simulation.nccl_bytes,
        "verdict": verdict.outcome.value,
        "verdict_text": str(verdict),
        "priced_ms_by_model": simulation.pricing.shares(),
        "priced_by_bytes_ms": simulation.pricing.unknown,
    }

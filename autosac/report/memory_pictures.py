"""The memory of a simulated step as pictures: its time on the axis, the GPU's memory and the plan's budget as lines."""

from __future__ import annotations

from pathlib import Path

from autosac.memory_sim.pictures import Limit, budget_limit, gpu_limit, timeline_html, timeline_png
from autosac.plans import MadeFor
from autosac.simulation import Simulation


def draw_memory(
    simulation: Simulation, *, html: Path | None = None, png: Path | None = None, made_for: MadeFor | None = None
) -> None:
    """Write a page, a picture, or both. `made_for`: of the plan that the step runs under, if there is one.

    UsageError without plotly or matplotlib, OSError if a file cannot be written.
    """
    info, hardware = simulation.trace.info, simulation.target.hardware
    title = f"{info.model or 'The job'} on {hardware.name}: memory over one training step"
    for path, draw in ((html, timeline_html), (png, timeline_png)):
        if path is not None:
            draw(
                path,
                simulation.memory,
                title=title,
                report=simulation.unlimited_allocation,
                event_ms=simulation.event_ms,
                limits=limits(simulation, made_for),
            )


def limits(simulation: Simulation, made_for: MadeFor | None) -> tuple[Limit, ...]:
    """What the GPU has for PyTorch, and the budget if there is one."""
    hardware = simulation.target.hardware
    gpu = gpu_limit(hardware.usable_bytes - hardware.context_bytes - simulation.nccl_bytes)
    return (gpu,) if made_for is None else (gpu, budget_limit(made_for.budget_bytes, made_for.budget_kind))

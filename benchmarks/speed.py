"""How long the whole command takes, as a user waits for it: `autosac simulate` and `autosac plan` in a fresh process.

    python -m benchmarks.speed [--models 8b,70b] [--repeat 1] [--stages]

Prints wall time, CPU time and peak resident memory (of the largest process) per command; with `--stages` also what each
stage of a simulation takes once the step is captured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"
JOBS = {
    "8b": ("llama3_8b.toml", 8, "68GiB"),
    "70b": ("llama3_70b.toml", 64, "68GiB"),
}
# Whole process, two cores (seconds).
GOALS = {("simulate", "8b"): 6, ("simulate", "70b"): 8, ("plan", "8b"): 60, ("plan", "70b"): 150}


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """(wall s, CPU s of all processes, peak GiB of the largest one) of one command."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "autosac", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    if status:
        raise SystemExit(f"autosac {' '.join(arguments)} failed")
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def stages(name: str) -> list[tuple[str, float]]:
    """(stage, seconds) of one simulation."""
    from autosac.capture.server import CaptureServer
    from autosac.jobs import TitanJob, simulation_of
    from autosac.memory_sim import replay_allocator, simulate_memory
    from autosac.planner import Goal, Planner

    file, world_size, _ = JOBS[name]
    job = TitanJob.of(str(EXAMPLES / file), gpu="h100-sxm-80gb", world_size=world_size)
    found: list[tuple[str, float]] = []

    def timed(stage: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        found.append((stage, time.perf_counter() - start))
        return result

    with CaptureServer() as server:
        trace = timed("capture process and first capture", lambda: server.capture(job.request("none", observe=True)))
        timed("another capture", lambda: server.capture(job.request("none")))
    simulation = simulation_of(trace, job.target)
    workspaces = job.target.workspaces
    timed("memory timeline and its peak", lambda: simulate_memory(trace, workspaces=workspaces).peak())
    timed("caching allocator", lambda: replay_allocator(trace, config=job.target.allocator, workspaces=workspaces))
    timed("prices", lambda: simulation.pricing)
    timed("execution of two steps", lambda: simulation.timeline)
    goal = Goal(budget_bytes=simulation.peak_active_bytes * 6 // 10, budget_kind="active")
    planner = timed("statistics and global problem", lambda: Planner(simulation, goal))
    timed("global MILP and local policies", lambda: planner.solve(goal.budget_bytes))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--stages", action="store_true")
    arguments = parser.parse_args()
    table = Table(title="Whole process")
    for heading in ("command", "job", "wall s (best)", "CPU s", "peak GiB", "goal s"):
        table.add_column(heading, justify="left" if heading in ("command", "job") else "right")
    for name in arguments.models.split(","):
        file, world_size, budget = JOBS[name]
        job = [str(EXAMPLES / file), "--gpu", "h100-sxm-80gb", "--world-size", str(world_size), "--quiet"]
        for command, extra in (("simulate", []), ("plan", ["--budget", budget])):
            runs = [measure([command, *job, *extra]) for _ in range(arguments.repeat)]
            wall_s, cpu_s, gib = min(runs)
            table.add_row(
                command, name, f"{wall_s:.1f}", f"{cpu_s:.1f}", f"{gib:.2f}", str(GOALS.get((command, name), "-"))
            )
    Console().print(table)
    if arguments.stages:
        for name in arguments.models.split(","):
            parts = Table("stage", "seconds", title=f"Stages, {name}")
            for stage, seconds in stages(name):
                parts.add_row(stage, f"{seconds:.2f}")
            Console().print(parts)


if __name__ == "__main__":
    main()

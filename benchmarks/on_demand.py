"""What it is worth to know which operators really run again: plans of the additive problem beside plans of the closure.

    python -m benchmarks.on_demand [--case NAME ...]

Recomputation runs only what leads from what is kept to what the backward asks for. `knapsack` decides as if every operator
that is not kept ran again (AUTO-SAC's problem); `pareto` knows the closure. Both plans are simulated as they run, for the same
reserved budget on H100s of 80 GB, before the last changes of single modules, in which solvers have no part. Seconds are of
planning from the captures at hand, with the steps it simulates.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Planned, make_plans
from autosac.planning.planner import Goal
from autosac.quantities import format_bytes, format_ms, parse_budget

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"
COMPARED = ("knapsack", "pareto")


class Case(NamedTuple):
    """A job by its changes to the example job, and its budgets."""

    world_size: int
    overrides: tuple[str, ...]
    budgets: tuple[str, ...]


def _changed(model: str, flavor: str, *more: str) -> tuple[str, ...]:
    return ("--model.name", model, "--model.flavor", flavor, *more)


CASES = {
    "llama3 8B": Case(8, (), ("55GiB", "68GiB", "76GiB")),
    "llama3 8B, TP 2": Case(8, ("--parallelism.tensor_parallel_degree", "2"), ("40GiB", "60GiB")),
    "qwen3 14B": Case(8, _changed("qwen3", "14B"), ("60GiB", "72GiB")),
    "llama3 debugmodel, TP 2": Case(
        4, _changed("llama3", "debugmodel", "--parallelism.tensor_parallel_degree", "2"), ("0.7GiB", "0.8GiB")
    ),
}


def add_rows(table: Table, name: str, case: Case) -> None:
    """Add one row for each budget and solver of a case."""
    job = TitanJob.of(str(JOB), gpu="h100-sxm-80gb", world_size=case.world_size, overrides=case.overrides)
    budgets = [parse_budget(text, job.target.hardware.usable_bytes) for text in case.budgets]
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        captures = TitanCaptures(job, server, Path(folder))
        captures.observed()
        captures.baselines()
        for budget in budgets:
            for solver in COMPARED:
                began = time.perf_counter()
                (planned,) = make_plans(
                    captures, Goal(budget_bytes=budget, solver=solver, changes=False), (budget,), job.progress
                )
                seconds = time.perf_counter() - began
                table.add_row(name, format_bytes(budget), solver, *_figures(planned), f"{seconds:.1f}")


def _figures(planned: Planned | InfeasibleError) -> tuple[str, ...]:
    if isinstance(planned, InfeasibleError):
        return ("none fits", "", "")
    simulation = planned.simulation
    return (
        format_ms(simulation.recompute_ms),
        format_ms(simulation.step_ms),
        format_bytes(simulation.peak_bytes("reserved")),
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    table = Table(box=box.MARKDOWN)
    for heading in ("job", "budget", "solver", "recompute", "step", "peak reserved", "seconds"):
        table.add_column(heading, justify="left" if heading in ("job", "solver") else "right")
    for name in parser.parse_args().case:
        add_rows(table, name, CASES[name])
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

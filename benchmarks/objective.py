"""Two objectives side by side: plans that recompute for the least time, and plans whose step is the shortest.

    python -m benchmarks.objective [--gpu a100-sxm-40gb] [--cluster aws-p4d] [--world-size 64] [--seq-len 5120]
                                   [--budgets 18GiB,22GiB,26GiB] [JOB.toml]

The default is bound by communication: Llama-3 8B with FSDP on 64 A100 of 40 GB whose nodes have 4 x 100 Gb/s, one sequence
of 5,120 tokens each. In most layers' backward the compute stream waits for the next layer's gather, and recomputation is
free until that is filled. The least recomputation treats all layers alike; the shortest step recomputes where it waits.
Every row is a verified plan: the step is simulated under it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import make_plans
from autosac.planning.planner import OBJECTIVES, Goal
from autosac.quantities import format_bytes, format_ms, parse_budget
from autosac.simulation import Simulation

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"


def _row(objective: str, simulation: Simulation, none_ms: float, kind: str) -> tuple[str, ...]:
    breakdown = simulation.breakdown
    return (
        objective,
        format_ms(breakdown.recompute_ms),
        format_ms(breakdown.hidden_recompute_ms),
        format_ms(simulation.step_ms),
        f"{simulation.step_ms / none_ms - 1:+.2%}",
        format_bytes(simulation.peak_bytes(kind)),
    )


def compare(job: TitanJob, budgets: list[int], kind: str) -> Table:
    """A table with one row for each budget and objective."""
    table = Table(title="Plans by objective")
    for heading in ("budget", "least", "recompute", "hidden", "step", "above no checkpointing", f"peak {kind}"):
        table.add_column(heading, justify="left" if heading == "least" else "right")
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        captures = TitanCaptures(job, server, Path(folder))
        base = captures.observed()
        table.add_row("", *_row("no checkpointing", base, base.step_ms, kind))
        found = {
            objective: make_plans(
                captures,
                Goal(budget_bytes=budgets[0], budget_kind=kind, objective=objective, changes=False),
                budgets,
                job.progress,
            )
            for objective in OBJECTIVES
        }
        for position, budget in enumerate(budgets):
            for objective, plans in found.items():
                planned = plans[position]
                if isinstance(planned, InfeasibleError):
                    table.add_row(format_bytes(budget), str(planned))
                else:
                    table.add_row(format_bytes(budget), *_row(objective, planned.simulation, base.step_ms, kind))
    return table


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(JOB))
    parser.add_argument("--gpu", default="a100-sxm-40gb")
    parser.add_argument("--cluster", default="aws-p4d")
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=5120)
    parser.add_argument("--local-batch-size", type=int, default=1)
    parser.add_argument("--budgets", default="18GiB,22GiB,26GiB")
    parser.add_argument("--budget-kind", choices=("active", "reserved"), default="active")
    arguments = parser.parse_args()
    overrides = (
        "--training.seq_len",
        str(arguments.seq_len),
        "--training.local_batch_size",
        str(arguments.local_batch_size),
    )
    job = TitanJob.of(
        arguments.job,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
        overrides=overrides,
        cluster=arguments.cluster,
    )
    total = job.target.hardware.usable_bytes
    budgets = [parse_budget(text, total) for text in arguments.budgets.split(",")]
    Console(width=110).print(compare(job, budgets, arguments.budget_kind))


if __name__ == "__main__":
    main()

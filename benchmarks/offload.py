"""Plans with and without offloading to host memory, side by side.

    python -m benchmarks.offload [--gpus h100-sxm-80gb,b200-sxm-180gb] [--world-size 8] [--budgets 52GiB,56GiB,60GiB,68GiB]
                                 [JOB.toml] [-- --training.seq_len 4096]

The default is Llama-3 8B with FSDP on 8 GPUs, at budgets from the least that any plan needs to those that need little
recomputation. A faster GPU with the same link to its host has less time to hide copies in. Every row is a verified plan:
the job was captured under it, copies and all, and simulated. The last changes of single modules are left out, which
plans that offload do not have.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Goal, Planned, make_plans
from autosac.quantities import format_bytes, format_ms, parse_budget

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"


def _row(name: str, planned: Planned, none_ms: float, kind: str) -> tuple[str, ...]:
    simulation, units = planned.simulation, planned.plan.units
    return (
        name,
        format_ms(simulation.step_ms),
        f"{simulation.step_ms / none_ms - 1:+.1%}",
        format_ms(simulation.recompute_ms),
        format_ms(simulation.breakdown.exposed_copy_ms),
        format_bytes(sum(unit.offloaded_bytes for unit in units)),
        format_bytes(simulation.peak_bytes(kind)),
    )


def compare(job: TitanJob, budgets: Sequence[int], kind: str) -> Table:
    """A table with two rows for each budget: the plan, and the plan that may offload."""
    table = Table(title=f"{Path(job.config_file).stem} on {job.world_size} x {job.target.hardware.name}")
    headings = ("budget", "plan", "step", "above none", "recompute", "copies waited for", "on the host", f"peak {kind}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        captures = TitanCaptures(job, server, Path(folder))
        none_ms = captures.observed().step_ms
        goal = Goal(budget_bytes=max(budgets), budget_kind=kind, changes=False)
        found = {
            name: make_plans(captures, replace(goal, offload=offload), budgets, job.progress)
            for name, offload in (("without", False), ("offloading", True))
        }
        for position, budget in enumerate(budgets):
            for name, plans in found.items():
                planned = plans[position]
                if isinstance(planned, InfeasibleError):
                    table.add_row(format_bytes(budget), str(planned))
                else:
                    table.add_row(format_bytes(budget), *_row(name, planned, none_ms, kind))
    return table


def main(argv: Sequence[str]) -> None:
    """Parse, run, print."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(JOB))
    parser.add_argument("--gpus", default="h100-sxm-80gb,b200-sxm-180gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--budgets", default="52GiB,56GiB,60GiB,68GiB")
    parser.add_argument("--budget-kind", choices=("active", "reserved"), default="reserved")
    arguments = parser.parse_args(argv[:split])
    out = Console(width=130)
    for gpu in arguments.gpus.split(","):
        job = TitanJob.of(
            arguments.job,
            gpu=gpu,
            world_size=arguments.world_size,
            overrides=tuple(argv[split + 1 :]),
            progress=lambda text: print(text, file=sys.stderr),
        )
        budgets = [parse_budget(text, job.target.hardware.usable_bytes) for text in arguments.budgets.split(",")]
        out.print(compare(job, budgets, arguments.budget_kind))


if __name__ == "__main__":
    main(sys.argv[1:])

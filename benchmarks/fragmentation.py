"""What the caching allocator reserves beyond the active peak, by the way in which equal units share what they keep.

    python -m benchmarks.fragmentation [--gpu h100-sxm-80gb] [--world-size 8] [--budgets 7] [JOB.toml]

For active peaks between full and no checkpointing, the plan with the least recomputation: with the units that keep the least
first, with those that keep the most first (as plans are given), and with all equal units keeping nearly the same (as plans
are tried where the budget bounds reserved memory). See `autosac.solvers.arrange`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autosac.capture.process.server import CaptureServer
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import derivation_for
from autosac.planning.planner import Goal, Planner
from autosac.plans import Plan
from autosac.quantities import format_bytes, format_ms
from autosac.simulation import Simulation

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"
WAYS = ("least first", "most first", "level")


def _plans(planner: Planner, inner_bytes: int) -> dict[str, Plan]:
    """The plan for an active peak in each of `WAYS`."""
    most_first, _ = planner.solve(inner_bytes)
    level, _ = planner.solve(inner_bytes, level=True)
    return {"least first": _reversed(planner, most_first), "most first": most_first, "level": level}


def _reversed(planner: Planner, plan: Plan) -> Plan:
    """The plan with the decisions of units of one look in reverse order."""
    looks: dict[object, list[int]] = {}
    for i, unit in enumerate(plan.units):
        look = planner.policies.of_module(planner.base.trace.modules.index(unit.fqn)).sac.problem
        looks.setdefault(look, []).append(i)
    units = list(plan.units)
    for positions in looks.values():
        for i, j in zip(positions, reversed(positions), strict=True):
            units[i] = replace(plan.units[j], fqn=plan.units[i].fqn, parameters=plan.units[i].parameters)
    return replace(plan, units=tuple(units), reasons=())


def _beyond(simulation: Simulation) -> str:
    return format_bytes(simulation.peak_reserved_bytes - simulation.peak_active_bytes)


def compare(job: TitanJob, count: int) -> Table:
    """A table with a row for each of `count` active peaks."""
    table = Table(title="Reserved beyond the active peak, and the step")
    for heading in ("peak active", *WAYS, "step", "step, level"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        captures = TitanCaptures(job, server, Path(folder))
        base, full = captures.observed(), captures.baselines()["full"]
        planner = Planner(base, Goal(budget_bytes=1))
        derivation = derivation_for(captures, planner)
        low, high = full.peak_active_bytes, base.peak_active_bytes
        for i in range(1, count + 1):
            inner_bytes = low + (high - low) * i // (count + 1)
            found = {way: derivation.under(plan) for way, plan in _plans(planner, inner_bytes).items()}
            table.add_row(
                format_bytes(found["most first"].peak_active_bytes),
                *(_beyond(found[way]) for way in WAYS),
                format_ms(found["most first"].step_ms),
                format_ms(found["level"].step_ms),
            )
        table.caption = f"without checkpointing {_beyond(base)}, with full checkpointing {_beyond(full)}"
    return table


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(JOB))
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--budgets", type=int, default=7, metavar="N", help="active peaks to try (default 7)")
    arguments = parser.parse_args()
    job = TitanJob.of(arguments.job, gpu=arguments.gpu, world_size=arguments.world_size)
    Console(width=110).print(compare(job, arguments.budgets))


if __name__ == "__main__":
    main()

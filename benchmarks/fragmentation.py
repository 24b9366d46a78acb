"""What the caching allocator reserves beyond the active peak, by the way in which equal units share what they keep.

    python -m benchmarks.fragmentation [--gpu h100-sxm-80gb] [--world-size 8] [--budgets 7] [JOB.toml]

For active peaks between full and no checkpointing, the plan with the least recomputation: with the units that keep the least
first, with those that keep the most first (as plans are given), and with all equal units keeping nearly the same (as plans
are tried where the budget bounds reserved memory). See `autosac.solvers.arrange`.

    python -m benchmarks.fragmentation --exhaustive

Every choice there is, for a model of three small blocks and a large vocabulary: each block not checkpointed, or with any set
of its results kept. For budgets of reserved memory it prints the plan, the fastest of all choices that fit, and the least that
the allocator reserves beyond the active peak in any choice that fits and is no slower than the plan.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from autosac.api import EagerCaptures
from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import derivation_for, make_plans
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.plans import Plan, Unit
from autosac.quantities import format_bytes, format_ms
from autosac.simulation import Simulation, Target

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"
_BLOCKS = ("1", "2", "3")
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


class Choice(NamedTuple):
    """One way to checkpoint: its step (ms), and its peaks (bytes)."""

    step_ms: float
    active_bytes: int
    reserved_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """What is reserved beyond the active peak."""
        return self.reserved_bytes - self.active_bytes

    @staticmethod
    def of(simulation: Simulation) -> Choice:
        """Of a simulated step."""
        return Choice(simulation.step_ms, simulation.peak_active_bytes, simulation.peak_reserved_bytes)


def small_step(device: Any) -> tuple[Any, Any]:
    """Three blocks of 1,024 features, 8 x 1,024 tokens, 16,384 words."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 3072), nn.Linear(3072, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    with torch.device(device):
        model = nn.Sequential(nn.Embedding(16384, 1024), *(Block() for _ in _BLOCKS), nn.Linear(1024, 16384))
        words = torch.zeros(8192, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        nn.functional.cross_entropy(model(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def choices(planner: Planner) -> Iterator[tuple[Unit, ...]]:
    """Every choice: of each block, not checkpointed or any set of its results kept."""
    blocks = [policy for policy in planner.policies.units if policy.name in _BLOCKS]
    options: list[list[Unit | None]] = []
    for policy in blocks:
        free = policy.sac.problem.free()
        sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
        options.append([None, *map(policy.keeping, sets)])
    for chosen in itertools.product(*options):
        if any(chosen):
            yield tuple(unit for unit in chosen if unit is not None)


def exhaustive(gpu: str, count: int) -> Table:
    """A row for each of `count` budgets between full and no checkpointing."""
    captures = EagerCaptures(small_step, Target.of(gpu, 1))
    ends = captures.baselines()
    planner = Planner(captures.observed(), Goal(budget_bytes=1))
    derivation = derivation_for(captures, planner)
    every = [Choice.of(captures.observed())]
    for units in choices(planner):
        every.append(Choice.of(derivation.under(plan_of(planner.base, planner.goal, units))))
    low, high = (ends[name].peak_reserved_bytes for name in ("full", "none"))
    budgets = [low + (high - low) * i // (count + 1) for i in range(1, count + 1)]
    table = Table(title=f"Against all {len(every):,} choices")
    for heading in ("budget", "plan", "beyond active", "fastest of all", "beyond active", "least beyond active"):
        table.add_column(heading, justify="right")
    for budget, planned in zip(budgets, make_plans(captures, Goal(budget_bytes=1), budgets), strict=True):
        fitting = [choice for choice in every if choice.reserved_bytes <= budget]
        if isinstance(planned, InfeasibleError) or not fitting:
            table.add_row(format_bytes(budget), "none", "", "none" if not fitting else "some", "", "")
            continue
        own, best = Choice.of(planned.simulation), min(fitting)
        least = min(c.beyond_bytes for c in (*fitting, own) if c.step_ms <= own.step_ms)
        row = [format_ms(own.step_ms), format_bytes(own.beyond_bytes)]
        row += [format_ms(best.step_ms), format_bytes(best.beyond_bytes), format_bytes(least)]
        table.add_row(format_bytes(budget), *row)
    return table


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(JOB))
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--budgets", type=int, default=7, metavar="N", help="active peaks to try (default 7)")
    parser.add_argument("--exhaustive", action="store_true", help="all choices of a small model, in place of the job")
    arguments = parser.parse_args()
    if arguments.exhaustive:
        Console(width=110).print(exhaustive(arguments.gpu, arguments.budgets))
        return
    job = TitanJob.of(arguments.job, gpu=arguments.gpu, world_size=arguments.world_size)
    Console(width=110).print(compare(job, arguments.budgets))


if __name__ == "__main__":
    main()

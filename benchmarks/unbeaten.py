"""Plans against the best that an adversary found by hand, with this project's own simulator, under the same budget.

    python -m benchmarks.unbeaten [--case NAME ...]

The adversary was free to change what plans of that time could not: not to recompute what nobody needs, to stop a recomputation
early, to cut the global batch into smaller microbatches, to compile the model. Each case prints the plan as it is, the plan
with the loss in chunks, and the best of all levers (`autosac plan --levers all`) where the adversary used one.

Prices have changed since, and the adversary's steps were not kept. What they would take today is estimated: longer by the
factor by which the same job takes longer under full checkpointing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autosac.errors import InfeasibleError
from autosac.jobs.levers import plan_with_levers
from autosac.jobs.tasks import plan_titan_job
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Planned
from autosac.planning.planner import Goal
from autosac.quantities import format_bytes, parse_budget

EXAMPLES = Path(__file__).parents[1] / "examples"


class Case(NamedTuple):
    """A job by its changes to an example job, its budget, and the adversary's step and the one under full checkpointing (ms
    for the same tokens), both by the prices of that time.
    """

    world_size: int
    overrides: tuple[str, ...]
    budget: str
    best_ms: float
    full_ms: float
    levers: bool = False
    file: str = "llama3_8b.toml"


CASES = {
    "llama3 8B, 68 GiB": Case(8, (), "68GiB", 1724.6, 1970.6),
    "llama3 8B, 55 GiB": Case(8, (), "55GiB", 1836.8, 1970.6),
    "llama3 8B, 76 GiB": Case(8, (), "76GiB", 1675.7, 1970.6),
    "llama3 70B, 64 GPUs, 60 GiB": Case(64, (), "60GiB", 7454.6, 8049.5, file="llama3_70b.toml"),
    "qwen3 14B, 72 GiB": Case(8, ("--model.name", "qwen3", "--model.flavor", "14B"), "72GiB", 3428.1, 3590.1),
    "llama3 8B, 68 GiB, levers": Case(8, (), "68GiB", 1539.1, 1970.6, levers=True),
}


class Row(NamedTuple):
    """One way to run the job: its name, step (ms), reserved peak (bytes; 0: it does not fit), and the step under full
    checkpointing (ms; 0: not known).
    """

    how: str
    step_ms: float
    peak_bytes: int
    full_ms: float = 0.0


def rows(case: Case) -> Iterator[Row]:
    """The plan, the plan with the loss in chunks, and the levers if the case allows them."""
    job = TitanJob.of(
        str(EXAMPLES / case.file), gpu="h100-sxm-80gb", world_size=case.world_size, overrides=case.overrides
    )
    goal = Goal(budget_bytes=parse_budget(case.budget, job.target.hardware.usable_bytes))
    (own,) = plan_titan_job(job, goal)
    yield _row("plan", own)
    (chunked,) = plan_titan_job(job, replace(goal, chunk_loss=True))
    yield _row("plan --chunk-loss", chunked)
    if case.levers and isinstance(own, Planned):
        _, found = plan_with_levers(job, goal, "all")
        for pulled in found:
            if pulled.planned is not None and not pulled.numbers:
                yield _row(pulled.name, pulled.planned)


def _row(how: str, planned: Planned | InfeasibleError) -> Row:
    if isinstance(planned, InfeasibleError):
        return Row(how, float("inf"), 0)
    full = planned.plan.predictions.get("full")
    peak_bytes = planned.simulation.peak_bytes("reserved")
    return Row(how, planned.simulation.step_ms, peak_bytes, full.step_ms if full is not None else 0.0)


def main() -> None:
    """Print the table as Markdown, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this case (may be repeated)")
    chosen = parser.parse_args().case or list(CASES)
    print("| case | adversary | today | how | step | of the adversary's | of today's | peak reserved |")
    print("|---|--:|--:|---|--:|--:|--:|--:|", flush=True)
    for name in chosen:
        case, best_ms = CASES[name], 0.0
        for row in rows(case):
            best_ms = best_ms or case.best_ms * row.full_ms / case.full_ms  # by the plan itself, the first row
            found = "none fits | | |"
            if row.peak_bytes:
                today = f"{row.step_ms / best_ms:.1%}" if best_ms else ""
                peak = format_bytes(row.peak_bytes)
                found = f"{row.step_ms:,.1f} ms | {row.step_ms / case.best_ms:.1%} | {today} | {peak}"
            print(f"| {name} | {case.best_ms:,.1f} ms | {best_ms:,.1f} ms | {row.how} | {found} |", flush=True)


if __name__ == "__main__":
    main()

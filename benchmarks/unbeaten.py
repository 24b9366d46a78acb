"""Plans against the best that an adversary found by hand, with this project's own simulator, under the same budget.

    python -m benchmarks.unbeaten [--case NAME ...]

The adversary was free to change what plans of that time could not: not to recompute what nobody needs, to stop a recomputation
early, to cut the global batch into smaller microbatches, to compile the model. Each case prints the plan as it is, the plan
with the loss in chunks, and the best of all levers (`autosac plan --levers all`) where the adversary used one.
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
    """A job by its changes to an example job, its budget, and the adversary's step (ms for the same tokens)."""

    world_size: int
    overrides: tuple[str, ...]
    budget: str
    best_ms: float
    levers: bool = False
    file: str = "llama3_8b.toml"


CASES = {
    "llama3 8B, 68 GiB": Case(8, (), "68GiB", 1724.6),
    "llama3 8B, 55 GiB": Case(8, (), "55GiB", 1836.8),
    "llama3 8B, 76 GiB": Case(8, (), "76GiB", 1675.7),
    "llama3 70B, 64 GPUs, 60 GiB": Case(64, (), "60GiB", 7454.6, file="llama3_70b.toml"),
    "qwen3 14B, 72 GiB": Case(8, ("--model.name", "qwen3", "--model.flavor", "14B"), "72GiB", 3428.1),
    "llama3 8B, 68 GiB, levers": Case(8, (), "68GiB", 1539.1, levers=True),
}


class Row(NamedTuple):
    """One way to run the job: its name, step (ms) and reserved peak (bytes; 0: it does not fit)."""

    how: str
    step_ms: float
    peak_bytes: int


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
    return Row(how, planned.simulation.step_ms, planned.simulation.peak_bytes("reserved"))


def main() -> None:
    """Print the table as Markdown, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this case (may be repeated)")
    chosen = parser.parse_args().case or list(CASES)
    print(
        "| case | adversary | how | step | of the adversary's | peak reserved |\n|---|--:|---|--:|--:|--:|", flush=True
    )
    for name in chosen:
        for how, step_ms, peak_bytes in rows(CASES[name]):
            best_ms = CASES[name].best_ms
            found = (
                f"{step_ms:,.1f} ms | {step_ms / best_ms:.1%} | {format_bytes(peak_bytes)}"
                if peak_bytes
                else "none fits | |"
            )
            print(f"| {name} | {best_ms:,.1f} ms | {how} | {found} |", flush=True)


if __name__ == "__main__":
    main()

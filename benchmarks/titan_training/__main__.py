"""Whether real TorchTitan jobs train under plans as without them, bit for bit.

    python -m benchmarks.titan_training [--only WORD] [--list]

TorchTitan's own Trainer trains its models at debug size on the CPU, with gloo, over the ways to parallelize them (`jobs`):
without a plan, and under plans for the memory of full checkpointing, and for a third and two thirds of what lies between that
and no checkpointing. Compared are losses, norms, each rank's gradients in each step, and its parameters afterwards. Before,
the job trains twice without a plan: where that differs, nothing is told. Where a plan's differs, it trains without one again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autosac.errors import AutosacError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import TitanJob, plan_job, simulate_job
from benchmarks.titan_training.jobs import JOBS, TEXT, Job, train

_GPU = "h100-sxm-80gb"
_SHARES = (0.0, 1 / 3, 2 / 3)
_AGAIN = 3  # trainings without a plan, if one with a plan is not as the first
_LINE = "| {:<58} | {:>5} | {:>11} | {:>19} | {} |"


def compare(job: Job, folder: Path) -> None:
    """Print a line for each budget."""
    file = folder / "job.toml"
    text = TEXT.format(
        folder=folder.as_posix(), model=job.model, flavor=job.flavor, batch=job.batch, length=256, steps=2
    )
    file.write_text(text)
    plain = train(file, job.ranks, job.arguments)
    if plain is None or train(file, job.ranks, job.arguments) != plain:
        why = "does not run on a CPU" if plain is None else "differs without a plan, too"
        print(_LINE.format(job.describe(), job.ranks, "", "", why), flush=True)
        return
    for budget_mib in budgets(job, file):
        print(
            _LINE.format(job.describe(), job.ranks, f"{budget_mib} MiB", *under(job, file, budget_mib, plain)),
            flush=True,
        )


def budgets(job: Job, file: Path) -> list[int]:
    """In MiB, see the program's docstring."""
    titan = TitanJob.of(str(file), overrides=job.arguments, gpu=_GPU, world_size=job.ranks)
    full, none = (simulate_job(titan, checkpointing=mode)[0].peak_reserved_bytes for mode in ("full", "none"))
    return [int(full + share * (none - full)) // 2**20 + 1 for share in _SHARES]


def under(job: Job, file: Path, budget_mib: int, plain: list[dict[str, Any]]) -> tuple[str, str]:
    """How many modules each rank's plan checkpoints, and whether its ranks train as without one."""
    path = file.with_name("plan.json")
    try:
        plan_job(
            config_file=str(file),
            overrides=tuple(job.arguments),
            gpu=_GPU,
            world_size=job.ranks,
            budget=f"{budget_mib}MiB",
        ).save(path)
    except AutosacError as e:
        return "", str(e).partition(",")[0]
    planned = train(file, job.ranks, [*job.arguments, "--autosac.enable", "--autosac.plan", str(path)])
    if planned is None:
        log = file.with_name("rank-0.log").read_text().strip().splitlines()
        return "", f"**failed**: {log[-1] if log else 'no output'}"
    counts = ", ".join(str(rank["planned"][-1]) for rank in planned)
    if _same(planned, plain):
        return counts, "the same"
    others = [train(file, job.ranks, job.arguments) for _ in range(_AGAIN)]
    if any(other is not None and _same(planned, other) for other in others):
        return counts, "the same as some runs without a plan, which differ"
    return counts, "**differs**"


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether all ranks of two trainings did the same, whatever was checkpointed."""
    names = ("losses", "gradients", "parameters")
    return all(a[name] == b[name] for a, b in zip(one, other, strict=True) for name in names)


def main() -> None:
    """See the program's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only jobs whose description has this word")
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    arguments = parser.parse_args()
    chosen = [job for job in JOBS if arguments.only in job.describe()]
    if arguments.list:
        print("\n".join(f"{job.describe()}, {job.ranks} ranks" for job in chosen))
        return
    print(_LINE.format("job", "ranks", "budget", "checkpointed modules", "trains"))
    print("|---|--:|--:|--:|---|")
    for job in chosen:
        with temporary_folder() as folder:
            compare(job, folder)


if __name__ == "__main__":
    main()

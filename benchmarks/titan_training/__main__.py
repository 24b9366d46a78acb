"""Whether real TorchTitan jobs train under plans as without them, bit for bit.

    python -m benchmarks.titan_training [--compiled] [--only WORD] [--list]

TorchTitan's own Trainer trains its models at debug size on the CPU, with gloo, over the ways to parallelize them (`jobs`):
without a plan, and under plans for the memory of full checkpointing, and for a third and two thirds of what lies between that
and no checkpointing; jobs whose schedule divides the backward, under plans made at random (`random_plans`). Compared are
losses, norms, each rank's gradients in each step, and its parameters afterwards. Before, the job trains twice without a plan:
where that differs, nothing is told. Where a plan's differs, it trains without one again.

With `--compiled`, jobs that are compiled. A plan changes which operators Inductor fuses, and so what is rounded. Told is then
how far gradients are from those of the job without the compiler, relative to these, with the plan and without: a plan that
takes them twice as far differs. With aot_eager, which fuses nothing, bits are compared.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from autosac.errors import AutosacError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import TitanJob, plan_job, simulate_job
from benchmarks.titan_training.jobs import COMPILED, JOBS, TEXT, Job, train
from benchmarks.titan_training.random_plans import random_plan

_GPU = "h100-sxm-80gb"
_SHARES = (0.0, 1 / 3, 2 / 3)
_SEEDS = 2  # of random plans, each of layers and of modules in them
_AGAIN = 3  # trainings without a plan, if one with a plan is not as the first
_FARTHER = 2.0  # than without a plan
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
    eager = train(file, job.ranks, job._replace(backend="").arguments) if job.backend == "inductor" else None
    if job.backend:
        print(_LINE.format(job.describe(), job.ranks, "", "no plan", f"{plain[0]['graphs']} graphs"), flush=True)
    if job.at_random:
        for seed in range(2 * _SEEDS):
            found = at_random(job, file, seed, plain)
            print(_LINE.format(job.describe(), job.ranks, "at random", *found), flush=True)
        return
    for budget_mib in budgets(job, file):
        found = under(job, file, budget_mib, plain, eager)
        print(_LINE.format(job.describe(), job.ranks, f"{budget_mib} MiB", *found), flush=True)


def budgets(job: Job, file: Path) -> list[int]:
    """In MiB, see the program's docstring."""
    titan = titan_job(job, file)
    full, none = (simulate_job(titan, checkpointing=mode)[0].peak_reserved_bytes for mode in ("full", "none"))
    return [int(full + share * (none - full)) // 2**20 + 1 for share in _SHARES]


def titan_job(job: Job, file: Path) -> TitanJob:
    """The job to simulate."""
    return TitanJob.of(str(file), overrides=job.arguments, gpu=_GPU, world_size=job.ranks)


def at_random(job: Job, file: Path, seed: int, plain: list[dict[str, Any]]) -> tuple[str, str]:
    """As `under`, of a random plan: of layers for even seeds, else of the modules in them."""
    path = file.with_name("plan.json")
    random_plan(titan_job(job, file), path, seed // 2, parts=bool(seed % 2))
    return trained(job, file, path, plain)


def under(
    job: Job, file: Path, budget_mib: int, plain: list[dict[str, Any]], eager: list[dict[str, Any]] | None = None
) -> tuple[str, str]:
    """How many modules each rank's plan checkpoints, and whether its ranks train as without one; `eager`: without compiler."""
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
    return trained(job, file, path, plain, eager)


def trained(
    job: Job, file: Path, path: Path, plain: list[dict[str, Any]], eager: list[dict[str, Any]] | None = None
) -> tuple[str, str]:
    """See `under`; the plan is in a file."""
    planned = train(file, job.ranks, [*job.arguments, "--autosac.enable", "--autosac.plan", str(path)])
    if planned is None:
        log = file.with_name("rank-0.log").read_text().strip().splitlines()
        return "", f"**failed**: {log[-1] if log else 'no output'}"
    counts = ", ".join(str(rank["planned"][-1]) for rank in planned)
    graphs = f", {planned[0]['graphs']} graphs" if job.backend else ""
    if _same(planned, plain):
        return counts, f"the same{graphs}"
    if eager is not None:
        far, alone = (max(map(distance, ranks, eager)) for ranks in (planned, plain))
        said = f"{far:.1e} from eager gradients, {alone:.1e} without a plan{graphs}"
        return counts, said if far <= _FARTHER * alone else f"**differs**: {said}"
    others = [train(file, job.ranks, job.arguments) for _ in range(_AGAIN)]
    if any(other is not None and _same(planned, other) for other in others):
        return counts, "the same as some runs without a plan, which differ"
    return counts, "**differs**"


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the gradients of a rank are from those of another training: of the parameter for which that is most, relative to
    the parameter's, in the first step.
    """
    pairs = list(zip(one["sketches"][0], other["sketches"][0], strict=True))
    return max(math.dist(a, b) / (math.hypot(*b) or 1.0) for a, b in pairs)


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether all ranks of two trainings did the same, whatever was checkpointed."""
    names = ("losses", "gradients", "parameters")
    return all(a[name] == b[name] for a, b in zip(one, other, strict=True) for name in names)


def main() -> None:
    """See the program's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only jobs whose description has this word")
    parser.add_argument("--compiled", action="store_true", help="the compiled jobs")
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    arguments = parser.parse_args()
    chosen = [job for job in (COMPILED if arguments.compiled else JOBS) if arguments.only in job.describe()]
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

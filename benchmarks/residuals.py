"""What the errors of published runs have in common: ``python -m benchmarks.residuals --truth DIR``.

Simulates nothing: it reads the lines that `benchmarks.torchtitan_published` printed and two pages of ``docs`` keep, and joins
them with what is known of the runs. Errors are simulated / published - 1 of throughput, in logarithms where they are averaged.

1. **Groups**: the mean error of the runs that share a feature, and the mean of its absolute values.
2. **One job, several publications**: runs of one model, layout, batch, checkpointing and precision on one kind of GPU, which
   others measured at another time or place. What their errors differ by, no model of the job and the GPU can explain.
3. **Sources**: the variance of the errors, split into what runs of one source (a page, commit or thread: one machine, one
   release of all libraries) share, and what is left within a source. With k sources of n_j runs, N in all,

       within = sum (e - mean_j)^2 / (N - k)
       between = (sum n_j (mean_j - mean)^2 / (k - 1) - within) / ((N - sum n_j^2 / N) / (k - 1))
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from autosac.errors import UsageError
from benchmarks.ending import exit_code
from benchmarks.torchtitan_published.runs import Run, read_held_out, read_runs, read_unseen
from benchmarks.truth import truth_folder

_PAGES = tuple(Path(__file__).parent.parent / "docs" / name for name in ("published.md", "unseen.md"))
_LINE = re.compile(r"^([A-Z]+\d+)\*? [^|]*\|[^|]*\| +\d+ +\d+ +([+-][\d.]+)% \|")
_FEATURES: dict[str, Callable[[Run], str]] = {
    "all": lambda run: "runs",
    "GPU": lambda run: run.gpu,
    "compiled": lambda run: "compiled" if run.compiled else "eager",
    "precision": lambda run: run.precision.partition(" +")[0],
    "GPUs": lambda run: "up to 8" if run.gpus <= 8 else "more than 8",
    "tensor parallelism": lambda run: "yes" if run.tensor > 1 else "no",
    "experts": lambda run: "mixture" if run.is_mixture else "dense",
    "made": lambda run: "since August 2025" if run.made >= "2025-08" else "before August 2025",
    "up to 8 GPUs of Hopper without tensor parallelism": lambda run: _alone(run),
}


Key = TypeVar("Key")


def _alone(run: Run) -> str:
    if run.gpus > 8 or run.tensor > 1 or not run.gpu.startswith("h"):
        return "other"
    return f"{'compiled' if run.compiled else 'eager'}, {'since' if run.made >= '2025-08' else 'before'} 8/2025"


class Residual(NamedTuple):
    """A run and the logarithm of simulated / published throughput; `unseen`: no fit had seen it."""

    run: Run
    error: float
    unseen: bool


def read_residuals(page: str, seen: Sequence[Run], unseen: Sequence[Run]) -> list[Residual]:
    """The runs whose throughput `page` compares."""
    runs = {run.case: (run, False) for run in seen} | {run.case: (run, True) for run in unseen}
    found = []
    for line in page.splitlines():
        match = _LINE.match(line)
        if match and match[1] in runs:
            run, is_unseen = runs[match[1]]
            found.append(Residual(run, math.log1p(float(match[2]) / 100), is_unseen))
    return found


def split_by(residuals: Iterable[Residual], key: Callable[[Residual], Key]) -> dict[Key, list[Residual]]:
    """In groups, in the order of their first members."""
    groups: dict[Key, list[Residual]] = {}
    for one in residuals:
        groups.setdefault(key(one), []).append(one)
    return groups


class Spread(NamedTuple):
    """Standard deviations of errors between groups and within them, and over how many groups and runs."""

    between: float
    within: float
    groups: int
    runs: int


def components(groups: Sequence[Sequence[float]]) -> Spread:
    """By analysis of variance, see the module's docstring. UsageError if no group has two members."""
    sizes = [len(group) for group in groups]
    total, count = sum(sizes), len(sizes)
    if count < 2 or total == count:
        raise UsageError("the spread within groups needs two groups, and one with two runs")
    means = [statistics.fmean(group) for group in groups]
    mean = math.fsum(math.fsum(group) for group in groups) / total
    within = math.fsum((e - m) ** 2 for group, m in zip(groups, means, strict=True) for e in group) / (total - count)
    among = math.fsum(n * (m - mean) ** 2 for n, m in zip(sizes, means, strict=True)) / (count - 1)
    size = (total - math.fsum(n * n for n in sizes) / total) / (count - 1)
    return Spread(math.sqrt(max(0.0, (among - within) / size)), math.sqrt(within), count, total)


def _of_run(feature: Callable[[Run], str], one: Residual) -> str:
    return feature(one.run)


def _job(one: Residual) -> tuple[object, ...]:
    run = one.run
    return (run.model, run.gpu, run.gpus, run.describe(), run.checkpointing, run.compiled, run.precision)


def _percent(error: float) -> str:
    return f"{math.expm1(error):+6.1%}"


def _mean(errors: Sequence[float]) -> str:
    return f"{_percent(statistics.fmean(errors))}  {statistics.fmean(abs(math.expm1(e)) for e in errors):6.1%}"


def report(residuals: Sequence[Residual]) -> str:
    """All tables."""
    lines = [f"{'group':<68} {'runs':>4}  {'mean':>6}  {'absolute':>6}"]
    for name, feature in _FEATURES.items():
        for value, members in split_by(residuals, functools.partial(_of_run, feature)).items():
            lines.append(f"{name + ': ' + value:<68} {len(members):>4}  {_mean([one.error for one in members])}")
    lines += ["", "one job, several publications"]
    repeated = {job: ones for job, ones in split_by(residuals, _job).items() if len({o.run.source for o in ones}) > 1}
    for ones in repeated.values():
        run = ones[0].run
        kind = f"{run.model} {run.describe()} {'compiled' if run.compiled else 'eager'} {run.precision}"
        lines.append(f"{kind:<62} {', '.join(f'{o.run.case} {_percent(o.error).strip()}' for o in ones)}")
    same = components([[one.error for one in ones] for ones in repeated.values()])
    lines.append(f"standard deviation within these jobs: {same.within:.1%} ({same.runs} runs of {same.groups} jobs)")
    spread = components([[o.error for o in ones] for ones in split_by(residuals, lambda o: o.run.source).values()])
    lines += [
        "",
        f"standard deviation between sources {spread.between:.1%}, within a source {spread.within:.1%}"
        f" ({spread.runs} runs of {spread.groups} sources)",
    ]
    for source, ones in split_by(residuals, lambda o: o.run.source).items():
        if len(ones) > 2:
            lines.append(f"{source[-58:]:<58} {len(ones):>4}  {_mean([one.error for one in ones])}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Read what was asked for and print it."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in options.page or _PAGES)
    residuals = read_residuals(pages, [*read_runs(options.truth), *read_held_out()], read_unseen())
    for name, chosen in (("all runs", residuals), ("runs that no fit had seen", [o for o in residuals if o.unseen])):
        print(f"== {name}\n{report(chosen)}\n")


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.residuals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--truth", type=truth_folder("truth"), required=True, help="folder of the published figures")
    parser.add_argument("--page", type=Path, action="append", help="a page with printed lines (may be repeated)")
    return exit_code(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

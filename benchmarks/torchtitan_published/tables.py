"""The results as text and CSV: a line for each run, the ratios between ways of checkpointing, the errors overall.

Errors are simulated / published - 1; a mean is one of absolute values.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.torchtitan_published.runs import Run
from benchmarks.torchtitan_published.simulated import Result

COLUMNS = (
    *("case", "model", "gpu", "gpus", "job", "checkpointing", "era", "memory_kind"),
    *("memory_gib_published", "memory_gib_sim", "oom_published", "oom_sim"),
    *("tokens_per_s_published", "tokens_per_s_sim", "step_ms_published", "step_ms_sim", "verdict"),
)


def header() -> str:
    """The heading of `line`."""
    return (
        f"{'case':<6} {'model':<14} {'job':<22} {'checkpointing':<13} {'era':<7} |"
        f" {'GiB':>6} {'published':>9} {'error':>7} | {'tokens/s':>8} {'published':>9} {'error':>7} |"
    )


def line(result: Result) -> str:
    """One result. Allocated instead of reserved GiB are marked ``a``."""
    run = result.run
    published = "OOM" if run.oom else _figure(run.memory_gib, 2) + ("a" if run.allocated and run.memory_gib else "")
    simulated = "OOM" if result.oom else f"{result.memory_gib:.2f}"
    speed = run.tokens_per_second
    if speed is None and run.step_ms is not None:
        speed = result.tokens_per_second * result.step_ms / run.step_ms
    return (
        f"{_names(run)} | {simulated:>6} {published:>9} {_percent(result.memory_error):>7} |"
        f" {result.tokens_per_second:8.0f} {_figure(speed, 0):>9} {_percent(result.throughput_error):>7} |"
        + (f" {run.not_compared}" if run.not_compared else "")
    )


def missing_line(run: Run, reason: str) -> str:
    """A run that is not reproduced."""
    return f"{_names(run)} | not reproduced: {reason}"


def _names(run: Run) -> str:
    case = run.case + ("" if run.launched else "*")
    return f"{case:<6} {run.model:<14} {run.describe():<22} {run.checkpointing:<13} {run.era.name:<7}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}%"


def ratios(results: Sequence[Result]) -> list[tuple[Result, Result, float]]:
    """Pairs of runs that differ in checkpointing only: (a, b, error of the ratio of their throughputs)."""
    found = []
    for a, b in itertools.combinations(results, 2):
        if a.run.group == b.run.group and a.run.checkpointing != b.run.checkpointing:
            first, second = a.run.tokens_per_second, b.run.tokens_per_second
            if first and second:
                simulated = a.tokens_per_second / b.tokens_per_second
                found.append((a, b, simulated / (first / second) - 1))
    return found


def memory_differences(results: Sequence[Result]) -> list[tuple[Result, Result, float, float]]:
    """Each run against the first of the same job, where notes are all that differs: (first, run, GiB, published)."""
    found: list[tuple[Result, Result, float, float]] = []
    firsts: dict[tuple[object, ...], Result] = {}
    for result in results:
        run = result.run
        if run.memory_gib is None:
            continue
        first = firsts.setdefault((*run.group, run.checkpointing), result)
        if first is not result and first.run.memory_gib is not None:
            found.append((first, result, result.memory_gib - first.memory_gib, run.memory_gib - first.run.memory_gib))
    return found


def summary(results: Sequence[Result]) -> str:
    """Errors over all results, differences within a job, and ratios."""
    lines = []
    for a, b, simulated, published in memory_differences(results):
        lines.append(f"memory {b.run.case} - {a.run.case}: {simulated:+.2f} GiB, published {published:+.2f}")
    pairs = ratios(results)
    for a, b, error in pairs:
        names = f"{a.run.case}/{b.run.case} ({a.run.checkpointing} against {b.run.checkpointing})"
        assert a.run.tokens_per_second and b.run.tokens_per_second
        lines.append(
            f"throughput {names}: {a.tokens_per_second / b.tokens_per_second:.3f}, published"
            f" {a.run.tokens_per_second / b.run.tokens_per_second:.3f} ({100 * error:+.1f}%)"
        )
    known = [r for r in results if r.run.oom or r.run.memory_gib is not None or r.run.tokens_per_second is not None]
    right = sum(r.oom == r.run.oom for r in known)
    lines.append(f"out of memory or not: {right} of {len(known)} outcomes right")
    lines += [
        _mean("reserved memory", [r.memory_error for r in results if not r.run.allocated]),
        _mean("allocated memory", [r.memory_error for r in results if r.run.allocated]),
        _mean("throughput", [r.throughput_error for r in results]),
        _mean("ratios of throughput", [error for _, _, error in pairs]),
    ]
    return "\n".join(text for text in lines if text)


def _mean(name: str, errors: Iterable[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return ""
    return f"{name}: mean error {100 * sum(sizes) / len(sizes):.1f}%, worst {100 * max(sizes):.1f}% ({len(sizes)} runs)"


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """One row for each result."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for result in results:
            run = result.run
            writer.writerow(
                {
                    "case": run.case,
                    "model": run.model,
                    "gpu": run.gpu,
                    "gpus": run.gpus,
                    "job": run.describe(),
                    "checkpointing": run.checkpointing,
                    "era": run.era.name,
                    "memory_kind": "allocated" if run.allocated else "reserved",
                    "memory_gib_published": "" if run.memory_gib is None else run.memory_gib,
                    "memory_gib_sim": round(result.memory_gib, 3),
                    "oom_published": run.oom,
                    "oom_sim": result.oom,
                    "tokens_per_s_published": run.tokens_per_second or "",
                    "tokens_per_s_sim": round(result.tokens_per_second, 1),
                    "step_ms_published": run.step_ms or "",
                    "step_ms_sim": round(result.step_ms, 2),
                    "verdict": result.verdict,
                }
            )

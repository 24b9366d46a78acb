"""The table in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from autosac.memory_sim import Outcome
from benchmarks.coverage.measure import Result
from benchmarks.coverage.rows import Row

_HEAD = """# What of TorchTitan is covered

For users of TorchTitan who want to know whether their kind of job works. Every row is a TorchTitan job that `autosac simulate`
runs through TorchTitan's unmodified code, in a process of its own. GPUs are H100 SXM 80 GB, 8 in a node, unless the row says
otherwise. Checkpointing is off, except in rows about it and jobs with "full AC". Printed by `python -m benchmarks.coverage`.

- *outcome*: whether the job fits; if it cannot run, the error that the command prints.
- *ranks*: the number of captured ranks, one of each pipeline stage.
- *CPU*: seconds of user time of all processes of the command, imports of PyTorch and TorchTitan included.
- *operators*: operators of all captured ranks that launch something.
- *peak*: memory that the caching allocator of the fullest rank would reserve if the GPU never ran out. With less memory it
  gives cached blocks back and tries again before it fails.
- *step*: simulated time of the whole job's step.

{runs}
"""
_COLUMNS = ("setting", "job", "outcome", "ranks", "CPU s", "operators", "peak GiB", "step ms")
_TITLES = {"small": "Small jobs (debug models)", "real": "Real sizes"}


def markdown(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """The page."""
    return "\n".join([_HEAD.format(runs=_runs(results.values())), *_sections(rows, results)])


def _runs(results: Iterable[Result]) -> str:
    """When the rows were run, and with which packages."""
    found = Counter(result.ran or "before the CPU time was kept, with an earlier commit" for result in results)
    return "\n".join(f"- {count} rows: {ran}" for ran, count in sorted(found.items()))


def _sections(rows: Sequence[Row], results: Mapping[str, Result]) -> Iterator[str]:
    for size, title in _TITLES.items():
        found = [row for row in rows if row.size == size and row.key in results]
        if not found:
            continue
        yield f"## {title}\n"
        yield f"{len(found)} jobs: {_count(found, results)}.\n"
        for group, members in groupby(found, key=lambda row: row.group):
            yield f"### {group}\n"
            yield f"| {' | '.join(_COLUMNS)} |"
            yield "|---|---|---|" + "---:|" * (len(_COLUMNS) - 3)
            yield from (_line(row, results[row.key]) for row in members)
            yield ""


def _count(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    outcomes = [results[row.key].outcome for row in rows]
    words = {
        Outcome.FITS.value: "fit",
        Outcome.FITS_AFTER_RETRY.value: "fit after a retry",
        Outcome.OUT_OF_MEMORY.value: "are out of memory",
        "error": "end with an error",
        "left out": "are left out",
    }
    return ", ".join(f"{outcomes.count(key)} {text}" for key, text in words.items() if key in outcomes)


def _line(row: Row, result: Result) -> str:
    start = [f"{row.name} ({row.note})" if row.note else row.name, _job(row)]
    if result.outcome in ("error", "left out"):
        reason = result.reason.replace("|", "\\|").replace("<", "&lt;")
        return f"| {' | '.join([*start, f'no: {reason}', '', '', '', '', ''])} |"
    figures = [
        result.outcome,
        str(result.ranks),
        f"{result.cpu_s:.0f}" if result.cpu_s else "",
        f"{result.operators:,}",
        f"{result.peak_bytes / 2**30:.2f}",
        f"{result.step_ms:,.1f}",
    ]
    return f"| {' | '.join([*start, *figures])} |"


def _job(row: Row) -> str:
    """Model, GPUs, and how it is checkpointed where that is not what the row is about."""
    kind = "" if row.gpu.startswith("h100") else f" ({row.gpu})"
    full = row.size == "real" and row.group != "Activation checkpointing" and row.arguments[-1] == "full"
    return f"{row.model}, {row.gpus} GPU{'s' if row.gpus > 1 else ''}{kind}{', full AC' if full else ''}"


def as_expected(row: Row, result: Result) -> bool:
    """The row works, or fails with the words that it has to fail with; what is left out is neither."""
    if result.outcome == "error":
        return bool(row.expect) and row.expect in result.reason
    return result.outcome == "left out" or not row.expect

"""Whole training steps on one CUDA device beside what AutoSAC predicts of them: unseen jobs, and the H100 study's.

    python -m benchmarks.gpu.steps measure --out DIR [--only KIND] [--truth DIR] [--minutes 8]   # on the GPU
    python -m benchmarks.gpu.steps predict --out DIR [--only ...] [--truth DIR] [--gpu PROFILE]                  # anywhere

`measure` trains every job in a process of its own and writes ``steps-eager.json`` (and so on): the median step of five after
two, the peaks of active and reserved bytes from the first step on, and in ``traces/`` PyTorch's profiler's record of one more
step. A process imports its libraries while the one before it trains. `--stride 0/2` takes every second job. Compiled jobs
are compiled side by side first, into Inductor's cache. `predict` simulates the jobs of these files without a GPU and prints
both as Markdown. Kinds: eager, compiled (`benchmarks.gpu.unseen`), later, third (`unseen_later`, `unseen_third`; compiled:
later-compiled, third-compiled), study. The study's jobs need `transformers==4.46.2`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autosac.bench.measure import timed_on_cuda
from autosac.errors import AutosacError
from autosac.files.writing import write_text_atomically
from autosac.simulation import Simulation
from benchmarks.gpu.children import Child, before, one_by_one, told
from benchmarks.gpu.common import environment, write_result
from benchmarks.truth import truth_folder

_KINDS = ("eager", "compiled", "study", "later", "later-compiled", "third", "third-compiled")
_LISTS = {"later": "unseen_later", "third": "unseen_third"}
_WARM_UP, _STEPS, _LONGEST_S = 2, 5, 120
_SIDE_BY_SIDE = 4
_LIBRARIES = ("triton", "transformers", "timm", "torchvision")
_GIB = 2**30
Result = dict[str, Any]


def jobs_of(kind: str, truth: Path | None) -> list[tuple[str, Callable[[Any], Any]]]:
    """Names and functions that make the step, of one kind."""
    if kind == "study":
        from benchmarks.h100_study.configs import read_configs
        from benchmarks.h100_study.step import make_step

        if truth is None:
            raise AutosacError("the study's jobs need --truth, the folder of its configurations")
        return [(c.describe(), functools.partial(make_step, c)) for c in read_configs(truth)]
    module = importlib.import_module(f"benchmarks.gpu.{_LISTS.get(kind.split('-')[0], 'unseen')}")
    return [(job.name, job.make_step) for job in module.JOBS if job.compiled == kind.endswith("compiled")]


# ---- the device -----------------------------------------------------------------------------------------------------------


def train(make_step: Callable[[Any], Any], steps: int, trace: Path | None) -> Result:
    """Train for real on the current CUDA device; times, peaks, and the profiler's record of one more step."""
    import torch

    device = torch.device("cuda")
    made = make_step(device)
    step = made[1] if isinstance(made, tuple) else made
    began = time.perf_counter()
    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    times_ms = timed_on_cuda(step, steps)
    stats = torch.cuda.memory_stats()
    found: Result = {
        "step_ms": statistics.median(times_ms) if times_ms else None,
        "steps_ms": times_ms,
        "warm_up_s": first_s,
        "peak_active_bytes": stats["active_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_requested_bytes": stats["requested_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }
    if trace is not None:
        _profile(step, trace)
    return found


def _profile(step: Callable[[], Any], trace: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(trace, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)


def child(kind: str, number: int, steps: int, truth: Path | None, trace: Path | None, result: Path) -> None:
    """One job, in a process of its own."""
    name, make_step = jobs_of(kind, truth)[number]
    for library in _LIBRARIES if kind != "study" else ("transformers",):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    told()
    try:
        found = train(make_step, steps, trace)
    except Exception as e:
        found = {"error": "out of memory" if "out of memory" in str(e) else f"{type(e).__name__}: {str(e)[:300]}"}
    print(name, found)
    result.write_text(json.dumps(found))


def _command(options: argparse.Namespace, kind: str, number: int, steps: int, trace: Path | None) -> list[str]:
    return ["benchmarks.gpu.steps", "child", kind, str(number), str(steps), str(options.truth or ""), str(trace or "")]


def measure(options: argparse.Namespace, kind: str) -> None:
    """Train the jobs of one kind, write after each."""
    until = time.monotonic() + 60 * options.minutes
    part, parts = map(int, options.stride.split("/"))
    names = [name for name, _ in jobs_of(kind, options.truth)]
    numbers = range(part, len(names), parts)
    traces = options.out.resolve() / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    environment("cuda")
    if kind.endswith("compiled"):
        _compile([_command(options, kind, number, 0, None) for number in numbers], until)
    files = {number: None if options.no_traces else traces / f"{kind}-{number:02d}.json.gz" for number in numbers}
    runs = one_by_one(_command(options, kind, number, _STEPS, files[number]) for number in numbers)
    rows: list[Result] = []
    for number, run in zip(numbers, runs, strict=True):
        measured = before(until, run, _LONGEST_S)
        file = files[number]
        rows.append({"job": names[number], "trace": file and file.name, "measured": measured})
        print(names[number], {k: v for k, v in measured.items() if k != "steps_ms"}, flush=True)
        suffix = "" if parts == 1 else f"-{part}"
        write_result(options.out / f"steps-{kind}{suffix}.json", "cuda", rows)


def _compile(commands: Sequence[Sequence[str]], until: float) -> None:
    """Compile all jobs, a few at a time, so that the measured runs find their kernels in Inductor's cache."""
    running: list[Child] = []
    for command in commands:
        if len(running) == _SIDE_BY_SIDE:
            print(running.pop(0).result(_LONGEST_S), flush=True)
        if time.monotonic() < until:
            running.append(Child(command))
            running[-1].go()
    for started in running:
        print(started.result(_LONGEST_S), flush=True)


# ---- anywhere -------------------------------------------------------------------------------------------------------------


def predict(options: argparse.Namespace, kind: str) -> None:
    """Simulate the jobs of one kind, write after each, and print both sides as a table."""
    import autosac

    known: dict[str, Result] = {}
    for path in sorted(options.out.glob(f"steps-{kind}*.json")):
        known |= {row["job"]: row["measured"] for row in json.loads(path.read_text())["rows"]}
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Result] = []
    for name, make_step in jobs_of(kind, options.truth):
        if options.match not in name or (known and "peak_active_bytes" not in known.get(name, {})):
            continue
        began = time.perf_counter()
        try:
            predicted = figures_of(autosac.simulate(make_step, gpu=options.gpu, allocator=options.allocator))
        except AutosacError as e:
            predicted = {"error": str(e).splitlines()[0]}
        predicted["seconds"] = round(time.perf_counter() - began, 1)
        rows.append({"job": name, "predicted": predicted, "measured": known.get(name, {})})
        print(row_of(rows[-1]), flush=True)
        write_text_atomically(options.out / f"predicted-{kind}.json", json.dumps(rows, indent=1) + "\n")
    print("\n".join(["", *table_of(rows)]))


def figures_of(simulation: Simulation) -> Result:
    """What is compared with a measurement."""
    report = simulation.unlimited_allocation
    return {
        "step_ms": simulation.step_ms,
        "peak_active_bytes": report.active_peak_bytes,
        "peak_reserved_bytes": report.reserved_peak_bytes,
    }


HEADING = (
    "| job | step (ms) | predicted | error | active (GiB) | predicted | error | reserved (GiB) | predicted | error | note |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
)
_COLUMNS = (("step_ms", 1, 1), ("peak_active_bytes", _GIB, 2), ("peak_reserved_bytes", _GIB, 2))


def table_of(rows: Sequence[Result]) -> list[str]:
    """Measured and predicted as Markdown, and the errors in words."""
    lines = [*HEADING, *map(row_of, rows), ""]
    for key, _, _ in _COLUMNS:
        errors = [error for row in rows if (error := _error(row, key)) is not None]
        if errors:
            sizes = sorted(map(abs, errors))
            lines.append(
                f"- {key}: median error {statistics.median(sizes):.2%}, mean {statistics.mean(sizes):.2%}, worst "
                f"{max(errors, key=abs):+.1%} ({len(errors)} jobs)"
            )
    return lines


def row_of(row: Result) -> str:
    """One job as a line of the table."""
    cells = [row["job"]]
    for key, scale, digits in _COLUMNS:
        both = (row["measured"].get(key), row["predicted"].get(key))
        cells += [f"{value / scale:,.{digits}f}" if value else "" for value in both]
        error = _error(row, key)
        cells.append("" if error is None else f"{error:+.1%}")
    cells.append(row["predicted"].get("error") or row["measured"].get("error") or row["measured"].get("note") or "")
    return "| " + " | ".join(cells) + " |"


def _error(row: Result, key: str) -> float | None:
    real, said = row["measured"].get(key), row["predicted"].get(key)
    return said / real - 1 if real and said else None


def main() -> None:
    """`measure` or `predict`; `child` is one process of `measure`."""
    if sys.argv[1:2] == ["child"]:
        kind, number, steps, truth, trace, result = sys.argv[2:]
        child(
            kind, int(number), int(steps), Path(truth) if truth else None, Path(trace) if trace else None, Path(result)
        )
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("measure", "predict"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=_KINDS, action="append")
    parser.add_argument("--truth", type=truth_folder("truth"))
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--allocator", default="")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--stride", default="0/1")
    parser.add_argument("--match", default="")
    parser.add_argument("--no-traces", action="store_true")
    options = parser.parse_args()
    for kind in options.only or ("eager", "compiled"):
        (measure if options.command == "measure" else predict)(options, kind)


if __name__ == "__main__":
    main()

"""Simulate the study's configurations and set the figures beside the measured ones.

Each configuration is captured as a plain PyTorch step in a process of its own. Of the simulation come

- the active peak: the caching allocator's live blocks, as ``active_bytes.all.peak`` counts them,
- the reserved peak on an 80-GB device (``reserved_bytes.all.peak``),
- the step time.

Errors are (simulated - measured) / measured; a mean is one of absolute values over the rows that were measured.
"""

from __future__ import annotations

import csv
import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import autosac
from benchmarks.h100_study.configs import Measured, StudyConfig
from benchmarks.h100_study.step import make_step

GPU = "h100-sxm-80gb"
MIB = 1 << 20

COLUMNS = (
    *("model", "batch_size", "seq_len", "image_size", "precision", "activation_checkpointing"),
    *("step_ms_measured", "active_bytes_peak_measured", "reserved_bytes_peak_measured", "n_runs"),
    *("torchsim_learned_ms", "torchsim_benchmark_ms", "torchsim_roofline_ms", "torchsim_memory_bytes"),
    *("active_bytes_sim", "reserved_bytes_sim", "step_ms_sim", "simulate_seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One simulated configuration; `measured` is None where the study's file has no figures.

    `verdict` is the allocator's on an 80-GB device; `seconds` is the wall time of capture and simulation.
    """

    config: StudyConfig
    active_bytes: int
    reserved_bytes: int
    step_ms: float
    verdict: str
    seconds: float
    measured: Measured | None

    def errors(self) -> tuple[float, float, float] | None:
        """Relative errors of active peak, reserved peak and step time; None if nothing was measured."""
        if self.measured is None:
            return None
        return (
            self.active_bytes / self.measured.active_bytes - 1,
            self.reserved_bytes / self.measured.reserved_bytes - 1,
            self.step_ms / self.measured.step_ms - 1,
        )

    def row(self) -> dict[str, str | int | float]:
        """The row of the CSV file."""
        row = dict(self.measured.row) if self.measured else {k: str(v) for k, v in asdict(self.config).items()}
        return {
            **row,
            "active_bytes_sim": self.active_bytes,
            "reserved_bytes_sim": self.reserved_bytes,
            "step_ms_sim": round(self.step_ms, 3),
            "simulate_seconds": round(self.seconds, 2),
        }


def as_in_2024() -> None:
    """PyTorch of late 2024, which the study was measured with, did not prefer cuDNN's attention on an H100; 2.11 does."""
    os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"


def simulate(config: StudyConfig, measured: Measured | None = None) -> Result:
    """Simulate one configuration. CaptureError if its step cannot be captured."""
    as_in_2024()
    began = time.perf_counter()
    simulation = autosac.simulate(functools.partial(make_step, config), gpu=GPU)
    report = simulation.unlimited_allocation
    verdict = str(simulation.allocation.verdict)
    if simulation.allocation.retries and verdict.startswith("fits"):
        report = simulation.allocation  # what was reserved is what the full device left after its retries
    return Result(
        config=config,
        active_bytes=report.active_peak_bytes,
        reserved_bytes=report.reserved_peak_bytes,
        step_ms=simulation.step_ms,
        verdict=verdict,
        seconds=time.perf_counter() - began,
        measured=measured,
    )


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """Write one row for each result, with the columns of the measured file and the simulated figures."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(result.row() for result in results)


def header() -> str:
    """The heading of the lines that `line` makes."""
    groups = "".join(f" | {name + ' (MiB)':>20} {'measured':>10} {'error':>8}" for name in ("active", "reserved"))
    return f"{'configuration':<34}{groups} | {'step (ms)':>9} {'measured':>9} {'error':>7} | {'s':>5}"


def line(result: Result) -> str:
    """One result as a line of the table."""
    measured, errors = result.measured, result.errors()
    cells = [f"{result.config.describe():<34}"]
    for i, (simulated, known) in enumerate(
        (
            (result.active_bytes, measured and measured.active_bytes),
            (result.reserved_bytes, measured and measured.reserved_bytes),
        )
    ):
        real = f"{known / MIB:10.1f} {100 * errors[i]:+7.3f}%" if known and errors else f"{'-':>10} {'-':>8}"
        cells.append(f"{simulated / MIB:20.1f} {real}")
    time_real = f"{measured.step_ms:9.1f} {100 * errors[2]:+6.1f}%" if measured and errors else f"{'-':>9} {'-':>7}"
    cells.append(f"{result.step_ms:9.1f} {time_real}")
    note = "" if result.verdict == "fits" else f"  {result.verdict}"
    return " | ".join([*cells, f"{result.seconds:5.1f}"]) + note


def summary(results: Sequence[Result]) -> str:
    """Mean and worst absolute errors for each model and for all, over the measured rows."""
    by_model: dict[str, list[tuple[float, float, float]]] = {}
    for result in results:
        errors = result.errors()
        if errors is not None:
            by_model.setdefault(result.config.model, []).append(errors)
    if not by_model:
        return "none of these configurations has measured figures"
    rows: Mapping[str, list[tuple[float, float, float]]] = {
        **dict(sorted(by_model.items())),
        "all": [errors for group in by_model.values() for errors in group],
    }
    lines = [f"{'mean (worst) error':<20} {'runs':>4} {'active':>20} {'reserved':>20} {'step time':>20}"]
    for name, group in rows.items():
        cells = []
        for column in zip(*group, strict=True):
            sizes = [abs(error) for error in column]
            cells.append(f"{100 * sum(sizes) / len(sizes):9.3f}% ({100 * max(sizes):6.2f}%)")
        lines.append(f"{name:<20} {len(group):>4} " + " ".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)

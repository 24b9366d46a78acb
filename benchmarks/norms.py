"""Norms in bfloat16 as NVIDIA measured them: ``python -m benchmarks.norms --frontend DIR``.

DIR is a checkout of NVIDIA/cudnn-frontend (3929da2); its ``benchmark/norms/results`` hold the kernels' times of PyTorch's
RMS norms and layer norms on an H200, a GB200 and a GB300, forward and backward, eager and compiled, with an empty cache
(PyTorch of December 2025, before Inductor took the sums of both directions in one kernel). Each norm is captured and priced.
Prices have the gap before the next kernel, of about a microsecond, which the table has not: means are over norms of 10 us
and more.

Marked with a star is what was used in fits: the compiled forwards of RMS norms on the H200 and the GB200
(``estimator/generated.py``), and every second of their eager backwards (``estimator/kernels/norms.py``).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._inductor import config as inductor

import autosac
from autosac.trace import Op, Phase

_RESULTS = "benchmark/norms/results"
_GPUS = {"NVIDIA H200": "h200-sxm-141gb", "NVIDIA GB200": "gb200-186gb", "NVIDIA GB300": "gb300-288gb"}
_BACKENDS = {"pytorch": "eager", "torch_compile": "compiled"}
_DIRECTIONS = ("forward", "backward")
_LEAST_MS = 0.010
_HELD_OUT = "gb300-288gb"


class Row(NamedTuple):
    """A measured norm of `rows` rows of `columns` numbers, forward and backward (ms)."""

    gpu: str
    kind: str
    compiled: bool
    rows: int
    columns: int
    forward_ms: float
    backward_ms: float


def rows_of(folder: Path) -> list[Row]:
    """PyTorch's rows of all tables, without sizes that several models share."""
    found = {}
    for path in sorted((folder / _RESULTS).glob("*/*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["backend"] in _BACKENDS and row["success"] == "True":
                    gpu, kind, compiled = _GPUS[row["gpu_name"]], row["norm_type"], row["backend"] == "torch_compile"
                    size = int(row["N"]), int(row["C"])
                    times = float(row["fwd_time_ms"]), float(row["bwd_time_ms"])
                    found[gpu, kind, compiled, size] = Row(gpu, kind, compiled, *size, *times)
    return sorted(found.values())


def fitted(rows: list[Row]) -> set[tuple[Row, str]]:
    """What was used in fits, by direction."""
    norms = [row for row in rows if row.kind == "rms_norm" and row.gpu != _HELD_OUT]
    found = {(row, "forward") for row in norms if row.compiled}
    for gpu in {row.gpu for row in norms}:
        eager = [row for row in norms if row.gpu == gpu and not row.compiled]
        found |= {(row, "backward") for row in eager[::2]}
    return found


def make_step_of(row: Row) -> Callable[[torch.device], tuple[nn.Module, Callable[[], Any]]]:
    """A step that does what the table's program does."""

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], Any]]:
        norm = nn.RMSNorm if row.kind == "rms_norm" else nn.LayerNorm
        model = norm(row.columns, eps=1e-5, device=device, dtype=torch.bfloat16)
        called: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model) if row.compiled else model

        def step() -> None:
            x, gradient = (torch.randn(row.rows, row.columns, dtype=torch.bfloat16, device=device) for _ in range(2))
            called(x.requires_grad_()).backward(gradient)
            model.zero_grad()

        return model, step

    return make_step


def priced_ms(row: Row) -> tuple[float, float]:
    """The price of the norm's operators, forward and backward."""
    with inductor.patch({"triton.mix_order_reduction": False}):
        found = autosac.simulate(make_step_of(row), gpu=row.gpu)
    sums = dict.fromkeys(Phase, 0.0)
    for event, ms in zip(found.trace.events, found.pricing.event_ms, strict=True):
        if type(event) is Op:
            sums[event.phase] += float(ms)
    return sums[Phase.FORWARD], sums[Phase.BACKWARD]


def main() -> None:
    """Print a line for each row, and the errors of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frontend", type=Path, required=True, metavar="DIR", help="a checkout of NVIDIA/cudnn-frontend"
    )
    folder = parser.parse_args().frontend
    rows = rows_of(folder)
    if not rows:
        parser.error(f"there are no tables below {folder / _RESULTS}")
    in_fits = fitted(rows)
    errors: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        form, kind = "compiled" if row.compiled else "eager", row.kind.replace("_", " ")
        for direction, ms, priced in zip(_DIRECTIONS, (row.forward_ms, row.backward_ms), priced_ms(row), strict=True):
            star, error = "*" if (row, direction) in in_fits else " ", priced / ms - 1
            if ms >= _LEAST_MS:
                errors[star, row.gpu, form, direction].append(error)
            size = f"{row.rows:>7,} x {row.columns:>6,}"
            print(
                f"{star} {row.gpu:<15} {kind:<10} {form:<8} {direction:<8} {size} {priced:>7.3f} ms {ms:>7.3f} {error:>+7.1%}"
            )
    print()
    for (star, gpu, form, direction), found in errors.items():
        mean = f"mean {statistics.mean(found):>+6.1%}, absolute {statistics.mean(map(abs, found)):>5.1%}"
        print(f"{star} {gpu:<15} {form:<8} {direction:<8} {mean} ({len(found)} sizes)")


if __name__ == "__main__":
    main()

"""cuDNN's attention and FlashAttention-2 on Hopper as PyTorch runs them: ``python -m benchmarks.hopper_attention [--truth DIR]
[--fit]``.

- *one by one*: on an H200 (`benchmarks/gpu/products.py`, 20 sizes each way); those up to 16,384 positions were fitted.
- *H100's steps*, *H200's steps*: kernels of cuDNN's inside profiled steps (`benchmarks/step_kinds`), held out. The Llamas of
  the H200 ran at the power limit, which these prices leave out.
- *table*: NVIDIA's of an H200 with cuDNN (2 sequences, 64 heads, 8 of keys, in the folder that ``--truth`` names). Held out.
- *pages*: FlashAttention-2 as its authors and others measured it (`benchmarks/flash_attention.py`), held out. The authors'
  build is 4 % faster than the one in PyTorch.

All of FlashAttention-2's are bursts, and are compared with prices without the 7 % that its tiles take longer in steps.

Prints the errors of each group; with ``--fit`` the parameters are fitted again.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autosac.estimator.attention_times import IN_STEPS, BlockTimes
from autosac.estimator.work import attention_shape, work_of
from autosac.trace import Signature
from benchmarks import flash_attention
from benchmarks.attention_fit import fitted_times
from benchmarks.gpu.attention import Shape, full_clock_us, signature_of
from benchmarks.step_kinds import evidence
from benchmarks.truth import truth_folder

_FOLDER = Path(__file__).parent
_PRODUCTS = _FOLDER / "gpu" / "results" / "h200-2026-11-26" / "products.json"
_STEPS = {"h100-sxm-80gb": "h100_2026_11_23.json.gz", "h200-sxm-141gb": "h200_2026_11_26.json.gz"}
_TABLE = "sdpa_train_llama31_bf16_a100pcie_h200.csv"
_ALONE, _LONGEST = "h200-sxm-141gb", 16384


class Row(NamedTuple):
    """One measured kernel."""

    source: str
    gpu: str
    name: str
    fitted: bool
    measured_us: float
    signature: Signature

    @property
    def kernel(self) -> str:
        """Whose, and in which direction."""
        backward = "backward" if "backward" in self.signature.name else "forward"
        return f"{'cudnn' if 'cudnn' in self.signature.name else 'flash'} {backward}"

    @property
    def causal(self) -> bool:
        """Whether half of the pairs are left out."""
        shape = attention_shape(self.signature)
        return shape is not None and shape.causal


def rows(truth: Path | None = None) -> Iterator[Row]:
    """All rows; those of NVIDIA's table are in a file below `truth`."""
    yield from _one_by_one()
    if truth is not None:
        yield from _table(truth / _TABLE)
    for gpu, file in _STEPS.items():
        for kind in evidence.load(_FOLDER / "step_kinds" / file):
            shape = attention_shape(kind.signature) if "attention" in kind.signature.name else None
            if shape is not None and shape.backend in ("cudnn", "flash") and shape.dtype in ("float16", "bfloat16"):
                yield Row(f"{gpu[:4].upper()}'s steps", gpu, kind.job, False, kind.us, kind.signature)
    for series in flash_attention.SERIES:
        if series.kernel == "FA2" and series.gpu.startswith("h100"):
            for length, tera in series.measured.items():
                signature = flash_attention.signature_of(series, length)
                us = work_of(signature).flops / tera / 1e6
                yield Row("pages", series.gpu, f"{length} x {series.head_size}", False, us, signature)


def _one_by_one() -> Iterator[Row]:
    for row in json.loads(_PRODUCTS.read_text())["rows"]:
        kind = row["kind"]
        if "attention" not in kind or "us" not in row:
            continue
        sizes, _, mask = row["name"].partition(", ")
        batch, heads, _, length, size = map(int, sizes.split(" x "))
        shape = Shape(kind.split()[0].lower(), batch, heads, heads, length, length, size, bool(mask))
        signature = signature_of(shape, backward="backward" in kind)
        yield Row("one by one", _ALONE, row["name"], length <= _LONGEST, row["us"], signature)


def _table(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if "H200" in row["gpu_name"] and row["backend"] == "cudnn" and row["deterministic_bwd"] == "False":
                heads, length = int(row["num_q_heads"]), int(row["q_seqlen"])
                sizes = (int(row["batch_size"]), heads, int(row["num_kv_heads"]), length, int(row["kv_seqlen"]))
                shape = Shape("cudnn", *sizes, int(row["head_dim"]), row["attn_mask"] == "top_left")
                signature = signature_of(shape, backward=row["pass"] != "fwd")
                yield Row("table", _ALONE, f"{length} positions", False, 1e3 * float(row["time_ms"]), signature)


def prices_us(measured: Sequence[Row]) -> list[float]:
    """Of all rows, at full clock."""
    prices: dict[tuple[str, Signature], float] = {}
    for gpu in {row.gpu for row in measured}:
        signatures = [row.signature for row in measured if row.gpu == gpu]
        prices |= {(gpu, s): us for s, us in zip(signatures, full_clock_us(gpu, signatures), strict=True)}
    return [prices[row.gpu, row.signature] for row in measured]


def fit(measured: Sequence[Row], kernel: str) -> BlockTimes:
    """All times of a kernel again; the tiles of heads of 192 are half way."""
    backend, direction = kernel.split()
    backward = direction == "backward"
    by_size = kernel == "cudnn backward"

    def changed(known: BlockTimes, values: Sequence[float]) -> BlockTimes:
        start, block, diagonal, narrow, wide, widest = values
        tiles = (narrow, wide, round((wide + widest) / 2, 3), widest)
        blocks = (0.0, block) if by_size else (block, 0.0)
        return known._replace(start=start, block=blocks[0], by_size=blocks[1], diagonal=diagonal, tiles=tiles)

    pairs = [(row.signature, row.measured_us) for row in measured if row.fitted and row.kernel == kernel]
    first = [23.0, 6.0, 0.9, 3.0, 5.0, 12.0] if backward else [3.0, 1.5, 1.2, 1.3, 2.0, 4.0]
    return fitted_times(_ALONE, backend, pairs, backward, changed, first)


def main() -> None:
    """Print a line for each group, or the parameters."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the parameters again and print them")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--truth", type=truth_folder("ops"), help="folder of NVIDIA's table")
    options = parser.parse_args()
    measured = list(rows(options.truth))
    if options.fit:
        for kernel in ("cudnn forward", "cudnn backward", "flash forward", "flash backward"):
            print(kernel, fit(measured, kernel))
        return
    errors: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row, price in zip(measured, prices_us(measured), strict=True):
        error = price / (IN_STEPS if row.kernel.startswith("flash") else 1.0) / row.measured_us - 1
        errors[row.kernel, row.source, "causal" if row.causal else "whole", "*" if row.fitted else " "].append(error)
        if options.rows:
            mask = "causal" if row.causal else ""
            print(
                f"{row.kernel:<15} {row.source:<13} {row.name:<40.40} {mask:<6} {row.measured_us:>9.1f} {error:>+7.1%}"
            )
    for (kernel, source, mask, star), found in sorted(errors.items()):
        mean, size = statistics.mean(found), statistics.mean(map(abs, found))
        print(
            f"{star} {kernel:<15} {source:<13} {mask:<7} {len(found):>3} sizes  mean {mean:>+6.1%}  absolute {size:>5.1%}"
        )


if __name__ == "__main__":
    main()

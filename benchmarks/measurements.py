"""Reads the measured operators and collectives that the shipped models are fitted to, and splits them.

`--data` is a folder with `ops/` and `comm/` as described in `estimator/data/SOURCES.md`. A shape belongs to the
held-out 15 % by a checksum of its dimensions, so that every program draws the same line; no model sees those shapes.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
GPUS = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "l40s": "l40s",
    "b200-sxm-180gb": "b200_sxm",
}
_HELD_OUT_PERCENT = 15


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Shapes (one row each) and the milliseconds that each framework measured (columns; NaN where it did not)."""

    shapes: Array
    ms: Array
    frameworks: tuple[str, ...]

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which shapes no model may see."""
        return np.array([is_held_out(row) for row in self.shapes])

    @property
    def repeats(self) -> NDArray[np.int64]:
        """How many frameworks measured each shape."""
        return np.isfinite(self.ms).sum(axis=1)


def is_held_out(shape: Array) -> bool:
    """Whether a shape is in the held-out 15 %."""
    text = ",".join(str(int(value)) for value in shape)
    return zlib.crc32(text.encode()) % 100 < _HELD_OUT_PERCENT


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, gzipped or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


def measured_ms(row: dict[str, str], column: str, path: Path) -> float:
    """A measured time. ValueError, which names the file and the row, if it is not a positive number."""
    try:
        ms = float(row[column])
    except ValueError:
        ms = math.nan
    if not math.isfinite(ms) or ms <= 0:
        where = ", ".join(f"{name}={value}" for name, value in row.items() if name != column)
        raise ValueError(f"{path}: {column} must be a positive number, not {row[column]!r} ({where[:200]})")
    return ms


def _collect(found: dict[tuple[float, ...], dict[str, float]], frameworks: tuple[str, ...]) -> Measured:
    present = tuple(name for name in frameworks if any(name in times for times in found.values()))
    shapes = sorted(found)
    ms = np.array([[found[shape].get(name, np.nan) for name in present] for shape in shapes])
    return Measured(shapes=np.array(shapes, dtype=np.float64), ms=ms, frameworks=present)


def gemm(data: Path, gpu: str, dtype: str) -> Measured:
    """y[m, n] = x[m, k] W[n, k]^T: columns m, n, k. The frameworks call the same cuBLAS kernels (fp8: their own)."""
    found: dict[tuple[float, ...], dict[str, float]] = {}
    path = data / "ops" / f"gemm_{GPUS[gpu]}.csv.gz"
    for row in rows(path):
        if row["gemm_dtype"] == dtype:
            shape = (float(row["m"]), float(row["n"]), float(row["k"]))
            found.setdefault(shape, {})[row["framework"]] = measured_ms(row, "latency_ms", path)
    return _collect(found, ("TRTLLM", "VLLM", "SGLang"))


def attention(data: Path, gpu: str) -> Measured:
    """Attention forward, bf16: columns batch, heads, kv heads, query length, key length, head size, causal."""
    found: dict[tuple[float, ...], dict[str, float]] = {}
    for causal, kind in ((1.0, "causal"), (0.0, "noncausal")):
        path = data / "ops" / f"attn_{kind}_fwd_{GPUS[gpu]}.csv.gz"
        for row in rows(path) if path.exists() else ():
            if "decode" in row["kernel_source"]:
                continue
            length, heads = float(row["seq_len"]), float(row["num_heads"])
            kv_heads = float(row.get("num_key_value_heads") or heads)
            shape = (float(row["batch_size"]), heads, kv_heads, length, length, float(row["head_dim"]), causal)
            found.setdefault(shape, {})[row["framework"]] = measured_ms(row, "latency_ms", path)
    return _collect(found, ("VLLM", "SGLang"))


def attention_training(data: Path) -> list[dict[str, str]]:
    """Attention forward and backward in training: the rows of two cuDNN-frontend benchmarks, not deterministic."""
    path = data / "ops" / "sdpa_train_llama31_bf16_a100pcie_h200.csv"
    chosen = [row for row in rows(path) if row["deterministic_bwd"] == "False"]
    return [row for row in chosen if measured_ms(row, "time_ms", path)]


def eager(data: Path) -> list[dict[str, str]]:
    """Eager PyTorch in Liger-Kernel's benchmarks: times of single modules."""
    path = data / "ops" / "liger_fused_vs_eager.csv.gz"
    providers = ("huggingface", "torch")
    chosen = [r for r in rows(path) if r["metric_name"] == "speed" and r["kernel_provider"] in providers]
    return [row for row in chosen if measured_ms(row, "y_value_50", path)]


def hand_written(data: Path) -> list[dict[str, str]]:
    """Liger-Kernel's own Triton kernels in the same benchmarks."""
    path = data / "ops" / "liger_fused_vs_eager.csv.gz"
    chosen = [r for r in rows(path) if r["metric_name"] == "speed" and r["kernel_provider"].startswith("liger")]
    return [row for row in chosen if measured_ms(row, "y_value_50", path)]


def norms(data: Path) -> list[dict[str, str]]:
    """RMSNorm and LayerNorm on an H200, PyTorch's own kernels."""
    (path,) = (data / "ops").glob("norms__h200*.csv")
    return [r for r in rows(path) if r["backend"] == "pytorch" and r["success"] == "True"]


def collectives(data: Path) -> list[dict[str, str]]:
    """nccl-tests inside a node, half precision; large transfers on L40S are known to be wrong and left out."""
    path = data / "comm" / "nccl_intranode.csv.gz"
    return [
        row
        for row in rows(path)
        if row["nccl_dtype"] == "half"
        and not (row["system"] == "l40s" and float(row["bytes"]) > 2**25)
        and measured_ms(row, "latency_ms", path)
    ]

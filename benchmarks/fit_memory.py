"""Fits the memory-bound models: the slowdowns of families other than elementwise kernels.

The measurements are of modules, not of kernels, so each is written down as the eager kernels that it launches
(`RECIPES`): a family and how often a tensor of the stated size is read or written. All were made with a cold L2 for the
first kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autosac.estimator import load_hardware
from autosac.estimator.memory_bound import Slowdown, row_features
from autosac.estimator.streamed import Streamed
from benchmarks.measurements import eager, norms

_LARGE_VOCABULARY = 32768
_REFERENCE = "h100-sxm-80gb"
_GPUS = {
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA B200": "b200-sxm-180gb",
}


class Row(NamedTuple):
    """One measurement: kernels of (family, bytes), the bytes of a reduced row, the GPU, milliseconds."""

    gpu: str
    kernels: tuple[tuple[str, float], ...]
    row_bytes: float
    ms: float


def _item(config: dict[str, Any]) -> int:
    return 4 if config.get("dtype") == "torch.float32" else 2


def _relu_squared(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """relu, square; backward: pow, a multiplication by two, one by the gradient, threshold_backward."""
    size = config["M"] * x * _item(config)
    passes = {"forward": [2, 2], "backward": [2, 2, 3, 3]}[mode]
    return [("elementwise", p * size) for p in passes], 0.0


def _swiglu(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Silu of one half of each row, and its product with the other half: both halves are slices."""
    assert mode == "forward"
    half = config["S"] * config["B"] * x * 2
    return [("strided", 2 * half), ("strided", 3 * half)], 0.0


def _llama4_rope(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """For queries and keys: a cast to float32, a complex product with a broadcast table, a cast back."""
    length, hidden = (config["seq_len"], x) if "seq_len" in config else (x, config["hidden_size"])
    size = length * hidden * 2
    kernels = []
    for share in (1.0, config["num_kv_heads"] / config["num_q_heads"]):
        n = size * share
        kernels += [("elementwise", 3 * n), ("strided", 4 * n), ("elementwise", 3 * n)]
    return kernels, 0.0


def _layer_norm(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    size = config["M"] * x * _item(config)
    kernel = ("norm", 2 * size) if mode == "forward" else ("norm_backward", 1.5 * 3 * size)
    return [kernel], x * _item(config)


def _softmax(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    return [("softmax", 2 * config["M"] * x * _item(config))], x * _item(config)


def _cross_entropy(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """log_softmax in float32; the loss itself is small beside it for the vocabularies taken here."""
    assert x >= _LARGE_VOCABULARY
    return [("softmax", 2 * config["B"] * config["T"] * x * 4)], x * 4


def _embedding(mode: str, x: float, config: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    return [("gather", 2 * config["B"] * config["T"] * config["D"] * _item(config))], 0.0


_RECIPES: dict[tuple[str, str], Callable[[str, float, dict[str, Any]], tuple[list[tuple[str, float]], float]]] = {
    ("relu_squared", "forward"): _relu_squared,
    ("relu_squared", "backward"): _relu_squared,
    ("megatron_swiglu", "forward"): _swiglu,
    ("llama4_rope", "forward"): _llama4_rope,
    ("layer_norm", "forward"): _layer_norm,
    ("layer_norm", "backward"): _layer_norm,
    ("softmax", "forward"): _softmax,
    ("cross_entropy", "forward"): _cross_entropy,
    ("embedding", "forward"): _embedding,
}


def read(data: Path) -> list[Row]:
    """Every measurement that has a recipe."""
    found = []
    for row in eager(data):
        recipe = _RECIPES.get((row["kernel_name"], row["kernel_operation_mode"]))
        if recipe is None or row["gpu_name"] not in _GPUS:
            continue
        if row["kernel_name"] == "cross_entropy" and float(row["x_value"]) < _LARGE_VOCABULARY:
            continue
        config = json.loads(row["extra_benchmark_config_str"])
        kernels, reduced = recipe(row["kernel_operation_mode"], float(row["x_value"]), config)
        found.append(Row(_GPUS[row["gpu_name"]], tuple(kernels), reduced, float(row["y_value_50"])))
    for row in norms(data):
        rows, columns = float(row["N"]), float(row["C"])
        for family, passes, ms in (("norm", 2.0, row["fwd_time_ms"]), ("norm_backward", 4.5, row["bwd_time_ms"])):
            if math.isfinite(float(ms)):
                kernel = (family, passes * rows * columns * 2)
                found.append(Row("h200-sxm-141gb", (kernel,), columns * 2, float(ms)))
    return found


def _times(row: Row) -> NDArray[np.float64]:
    """What elementwise kernels of the same bytes take, with a cold L2."""
    streamed = Streamed(hardware=load_hardware(row.gpu), warm=False)
    return streamed.milliseconds(np.array([b for _, b in row.kernels]))


def elementwise_std(rows: list[Row]) -> float:
    """How far elementwise kernels of the reference GPU are from `streamed.py`, which was not fitted to them."""
    chosen = [r for r in rows if r.gpu == _REFERENCE and all(kind == "elementwise" for kind, _ in r.kernels)]
    return float(np.std([math.log(_times(r).sum() / r.ms) for r in chosen]))


def fit_slowdown(rows: list[Row], family: str) -> Slowdown:
    """Robust regression of log(time / elementwise time of the same bytes) on how long the rows are."""
    features, targets = [], []
    for row in rows:
        if not any(kind == family for kind, _ in row.kernels):
            continue
        times = _times(row)
        mine = sum(t for t, (kind, _) in zip(times, row.kernels, strict=True) if kind == family)
        rest = float(times.sum() - mine)
        features.append(row_features(row.row_bytes))
        targets.append(math.log(max(row.ms - rest, 0.1 * row.ms) / mine))
    x, y = np.array(features), np.array(targets)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([x @ values - y, 0.2 * values[1:]])  # the penalty keeps what no row shows at zero

    values = least_squares(residuals, np.zeros(4), loss="soft_l1", f_scale=0.1).x
    constant, per_octave, long_row, short_row = (round(float(v), 4) for v in values)
    return Slowdown(
        constant=constant,
        per_octave=per_octave,
        long_row=long_row,
        short_row=short_row,
        rel_std=round(float(np.std(x @ values - y)), 4),
    )


def fit_memory(data: Path) -> dict[str, Any]:
    """The parameters of `autosac.estimator.memory_bound`."""
    rows = read(data)
    slowdowns = {f: fit_slowdown(rows, f) for f in ("strided", "norm", "norm_backward", "softmax", "gather")}
    return {
        "reference": _REFERENCE,
        "rel_std": round(elementwise_std(rows), 4),
        "slowdowns": {name: asdict(slowdown) for name, slowdown in slowdowns.items()},
        "rows": {f: sum(any(k == f for k, _ in r.kernels) for r in rows) for f in ("elementwise", *slowdowns)},
    }

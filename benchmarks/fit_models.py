"""Fits every model that the package ships, from a folder of measurements, and writes them to
`estimator/data/models`.

    python -m benchmarks.fit_models --data DIR [--out DIR] [--only operators,float8,attention,memory,collectives]

The same data gives the same files. Held-out shapes (15 %, see `measurements.py`) are never used, so the
shipped models themselves can be judged on them (`benchmarks/operators.py`). Per GPU there is one .npz with
the trees and one .json with everything that is a handful of numbers.

Where several frameworks timed the same kernel, the target is the median of their times after each framework's
smooth offset to the first has been removed: one framework alone differs from the others by 4 to 8 % at single
shapes, which no model can predict. A shape that only one framework timed counts less in the fit.

The fitted trees are made small before they are written (`compact_trees.py`); the .json says by how much that changes
their predictions on the held-out shapes (`rounding`).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from autosac.estimator import load_hardware
from autosac.estimator.attention import accumulation_ms
from autosac.estimator.features import (
    Rates,
    attention_baseline_ms,
    attention_features,
    gemm_baseline_ms,
    gemm_features,
)
from autosac.estimator.learned import MODELS, load_bundle
from autosac.estimator.trees import TreeEnsemble, trees_of_sklearn
from autosac.files.writing import write_bytes_atomically, write_text_atomically
from benchmarks.compact_trees import compacted, short_edges
from benchmarks.fit_collectives import fit_collectives
from benchmarks.fit_memory import fit_memory
from benchmarks.measurements import GPUS, Array, Measured, attention, attention_training
from benchmarks.quantization import products

_SINGLE_WEIGHT = 0.3  # of a shape that one framework timed
_SPREAD = 0.04  # disagreement (standard deviation of the log) at which a shape's weight is halved
_STEP = 1e-3  # leaves are multiples of it, in the logarithm of time
# A split stays if it brings the sum over all shapes of squared errors (of the logarithm) down by more than this.
_SPLIT_COST = 30e-6
_FINE_SPLIT_COST = 8e-6  # where the data are so good, or so few, that it would show
_FP8_GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "l40s", "b200-sxm-180gb")


def consensus(measured: Measured) -> tuple[Array, Array]:
    """The log of the agreed time of every shape, and the shape's weight in a fit."""
    logs = np.log(measured.ms)
    train = ~measured.held_out
    position = np.log(measured.shapes + 1)
    for column in range(1, logs.shape[1]):
        offset = logs[:, column] - logs[:, 0]
        both = np.isfinite(offset) & train
        if both.sum() >= 500:
            smooth = HistGradientBoostingRegressor(
                loss="absolute_error",
                max_iter=60,
                max_leaf_nodes=15,
                min_samples_leaf=50,
                early_stopping=False,
            )
            logs[:, column] -= smooth.fit(position[both], offset[both]).predict(position)
    spread = np.nan_to_num(np.nanstd(logs, axis=1))
    single = _SINGLE_WEIGHT if (measured.repeats > 1).any() else 1.0
    weight = np.where(measured.repeats > 1, 1 / (1 + (spread / _SPREAD) ** 2), single)
    return np.nanmedian(logs, axis=1), weight


class Fitted(NamedTuple):
    """Trees as they are written, and as they were before they were made small."""

    trees: TreeEnsemble
    full: HistGradientBoostingRegressor

    def numbers(self, features: Array, measured: Array) -> dict[str, Any]:
        """The errors on held-out shapes, and by how much the small trees differ from the full ones there, in percent."""
        predicted = self.trees.predict(features)
        change = np.expm1(predicted - self.full.predict(features)) * 100
        rounding = {
            "rms_percent": round(float(np.sqrt((change**2).mean())), 3),
            "max_percent": round(float(np.abs(change).max()), 2),
        }
        return {"held_out": errors(predicted, measured), "rounding": rounding}


def boost(features: Array, target: Array, weight: Array, *, trees: int, leaves: int, cost: float) -> Fitted:
    """Gradient boosting of `target`, made small: `cost` as in `compact_trees`."""
    model = HistGradientBoostingRegressor(
        max_iter=trees,
        max_leaf_nodes=leaves,
        learning_rate=25 / trees,
        min_samples_leaf=4,
        l2_regularization=0.1,
        max_features=0.4,
        early_stopping=False,
        random_state=0,
    )
    return small(model.fit(features, target, sample_weight=weight), features, cost)


def small(model: HistGradientBoostingRegressor, features: Array, cost: float) -> Fitted:
    """A fitted model, exported and made small with the features that it was fitted to."""
    full, edges, baseline = trees_of_sklearn(model)
    columns = zip(edges, features.T, strict=True)
    bins = np.array([np.searchsorted(e, x, side="left") for e, x in columns], dtype=np.uint8).T
    few = compacted(full, bins, step=_STEP, cost=cost)
    short = [short_edges(e, x) for e, x in zip(edges, features.T, strict=True)]
    return Fitted(TreeEnsemble.from_trees(few, short, baseline=baseline, step=_STEP), model)


def errors(predicted: Array, measured: Array) -> dict[str, float]:
    """MAPE, share within 10 %, and the standard deviation of the log ratio."""
    ratio = predicted - measured
    relative = np.abs(np.expm1(ratio))
    return {
        "count": len(ratio),
        "mape_percent": round(float(relative.mean() * 100), 2),
        "within_10_percent": round(float((relative < 0.1).mean() * 100), 1),
        "rel_std": round(float(ratio.std()), 4),
    }


def fit_gemm(data: Path, gpu: str, dtype: str) -> tuple[TreeEnsemble, dict[str, Any]]:
    """The efficiency of matrix products on one GPU in "bfloat16" or "fp8"."""
    measured, certain = products(data, gpu, dtype)
    rates = Rates.of(load_hardware(gpu), "float8" if dtype == "fp8" else dtype)
    item_bytes = 1.0 if dtype == "fp8" else 2.0
    m, n, k = measured.shapes.T
    log_ms, weight = consensus(measured)
    weight = weight * certain
    target = log_ms - np.log(gemm_baseline_ms(m, n, k, item_bytes, rates))
    features = gemm_features(m, n, k, item_bytes, rates)
    train = ~measured.held_out
    # less where data is noisier
    sure = np.median(measured.repeats) >= 3
    trees, leaves, cost = (700, 255, _FINE_SPLIT_COST) if sure else (400, 63, _SPLIT_COST)
    fitted = boost(features[train], target[train], weight[train], trees=trees, leaves=leaves, cost=cost)
    test = ~train
    return fitted.trees, fitted.numbers(features[test], target[test])


def fit_attention(data: Path, gpu: str) -> tuple[TreeEnsemble, dict[str, Any]]:
    """The efficiency of attention's forward on one GPU."""
    measured = attention(data, gpu)
    rates = Rates.of(load_hardware(gpu), "bfloat16")
    log_ms, weight = consensus(measured)
    target = log_ms - np.log(attention_baseline_ms(measured.shapes, rates))
    features = attention_features(measured.shapes, rates)
    train = ~measured.held_out
    fitted = boost(features[train], target[train], weight[train], trees=400, leaves=63, cost=_FINE_SPLIT_COST)
    test = ~train
    return fitted.trees, fitted.numbers(features[test], target[test])


def fit_attention_training(data: Path, gpu: str, backend: str, machine: str) -> dict[str, Any]:
    """How a training library's forward compares with the fitted forward, and its backward with its own
    forward.

    ``log(forward / fitted) = forward``; ``log((backward - accumulation) / forward) = c``, with and without a causal
    mask. `gpu` has the trees, `machine` is where the library was measured.
    """
    bundle = load_bundle(gpu)
    assert bundle is not None
    rates = Rates.of(load_hardware(machine), "bfloat16")
    found: dict[str, dict[tuple[float, ...], float]] = {"fwd": {}, "bwd": {}}
    for row in attention_training(data):
        if row["backend"] == backend and row["gpu_name"].split()[1] == machine.split("-")[0].upper():
            shape = [float(row[c]) for c in ("batch_size", "num_q_heads", "num_kv_heads", "q_seqlen", "kv_seqlen")]
            key = (*shape, float(row["head_dim"]), float(row["attn_mask"] == "top_left"))
            found[row["pass"]][key] = float(row["time_ms"])
    shapes = np.array(sorted(found["fwd"]))
    base = np.log(attention_baseline_ms(shapes, rates))
    fitted = bundle.trees["attention"].predict(attention_features(shapes, rates)) + base
    forward = np.log([found["fwd"][tuple(s)] for s in shapes]) - fitted
    result: dict[str, Any] = {
        "forward": round(float(forward.mean()), 4),
        "forward_rel_std": round(float(forward.std()), 4),
    }
    for causal, name in ((1.0, "causal"), (0.0, "full")):
        chosen = [s for s in map(tuple, shapes) if s[-1] == causal and s in found["bwd"]]
        backward = np.array([found["bwd"][s] for s in chosen]) - accumulation_ms(np.array(chosen), rates)
        ratio = np.log(backward / [found["fwd"][s] for s in chosen])
        result[name] = round(float(ratio.mean()), 4)
        result[f"{name}_rel_std"] = round(float(ratio.std()), 4)
    return result


def fit_attention_ratios(data: Path) -> dict[str, Any]:
    """Training kernels against the fitted forward:

    FlashAttention-2 and cuDNN on an A100, cuDNN on an H200.
    """
    return {
        "flash": fit_attention_training(data, "a100-sxm-80gb", "flash_attention_2", "a100-pcie-80gb"),
        "cudnn.ampere": fit_attention_training(data, "a100-sxm-80gb", "cudnn", "a100-pcie-80gb"),
        "cudnn.hopper": fit_attention_training(data, "h200-sxm-141gb", "cudnn", "h200-sxm-141gb"),
    }


def packed(arrays: dict[str, Array]) -> bytes:
    """An .npz file that `numpy.load` reads. The same arrays give the same bytes: members have no date."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")
            file.writestr(info, member.getvalue(), compress_type=zipfile.ZIP_LZMA)
    return buffer.getvalue()


def write(out: Path, gpu: str, trees: dict[str, TreeEnsemble], numbers: dict[str, Any]) -> None:
    """One .npz and one .json for a GPU."""
    arrays = {name: array for prefix, model in trees.items() for name, array in model.arrays(prefix).items()}
    write_bytes_atomically(out / f"{gpu}.npz", packed(arrays))
    write_text_atomically(out / f"{gpu}.json", json.dumps(numbers, indent=1) + "\n")


def fit_gpu(data: Path, out: Path, gpu: str, *, only_float8: bool = False) -> None:
    """All tree models of one GPU; or only that of float8, and the others as they are."""
    begin = time.monotonic()
    trees: dict[str, TreeEnsemble] = {}
    numbers: dict[str, Any] = {"source": gpu}
    if only_float8:
        bundle = load_bundle(gpu)
        assert bundle is not None
        trees |= bundle.trees
        numbers = json.loads((MODELS / f"{gpu}.json").read_text())
    else:
        trees["gemm.bfloat16"], numbers["gemm.bfloat16"] = fit_gemm(data, gpu, "bfloat16")
        trees["attention"], numbers["attention"] = fit_attention(data, gpu)
    if gpu in _FP8_GPUS:
        trees["gemm.float8"], numbers["gemm.float8"] = fit_gemm(data, gpu, "fp8")
    write(out, gpu, dict(sorted(trees.items())), numbers)
    for name in trees:
        print(f"{gpu:16} {name:14} {numbers[name]['held_out']}  {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    """Fit what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder with ops/ and comm/")
    shipped = Path(__file__).resolve().parents[1] / "estimator" / "data" / "models"
    parser.add_argument("--out", type=Path, default=shipped, help="where to write (default: the package's own)")
    parser.add_argument("--only", default="operators,attention,memory,collectives", help="comma-separated parts")
    parser.add_argument("--gpus", default=",".join(GPUS), help="comma-separated GPUs for the part `operators`")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = arguments.only.split(",")
    if "operators" in parts or "float8" in parts:
        for gpu in arguments.gpus.split(","):
            fit_gpu(arguments.data, arguments.out, gpu, only_float8="operators" not in parts)
    if "attention" in parts:
        ratios = fit_attention_ratios(arguments.data)
        write_text_atomically(arguments.out / "attention.json", json.dumps(ratios, indent=1) + "\n")
    if "memory" in parts:
        write_text_atomically(arguments.out / "memory.json", json.dumps(fit_memory(arguments.data), indent=1) + "\n")
    if "collectives" in parts:
        fitted = fit_collectives(arguments.data)
        write_text_atomically(arguments.out / "collectives.json", json.dumps(fitted, indent=1) + "\n")


if __name__ == "__main__":
    main()

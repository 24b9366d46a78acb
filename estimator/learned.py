"""Learned models of compute-bound operators: matrix products and attention.

Both predict how far a kernel is from its roofline (`features.py`) with boosted trees (`trees.py`) that were
fitted to measured kernels (`benchmarks/fit_models.py`, `data/SOURCES.md`):

    time = baseline(work, rates of this GPU) * exp(trees(features)) * corrections

A GPU without measurements of its own uses the trees of the profile that it names (`models_of`) with its own
rates and processor count; the source then says whose trees they are ("learned:matmul@h100-sxm-80gb") and the
error bar grows.

Corrections, where the measured kernel is not the one that PyTorch would call:

- layouts: trees know y = x W^T (both operands contiguous along k). The gradients' products read one or both
operands
  across, which costs a few percent (`_LAYOUT`; an estimate, not fitted). TF32 on [m, n, k] runs as bf16 on
  [m, n, 2k]: same bytes, half the rate. A batch of products fills tiles like one product with as many rows.
- attention on Hopper and later: PyTorch's "flash" is FlashAttention-2, which uses instructions that reach
only a share of
  the peak there (`_LEGACY_SHARE`): the trees of the A100's FlashAttention-2 with that share of this GPU's
  peak. "cudnn" uses this GPU's own trees with the offset measured for cuDNN.
- attention's backward: a measured ratio to the forward that depends on length (`data/models/attention.json`).
- the memory-efficient and flex kernels, and dropout: ratios to FlashAttention-2 that are estimates
(`_BACKEND`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from autosac.estimator.features import (
    Array,
    Rates,
    attention_baseline_ms,
    attention_features,
    gemm_baseline_ms,
    gemm_features,
)
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.trees import TreeEnsemble
from autosac.estimator.work import (
    Attention,
    Matmul,
    arithmetic,
    attention_shape,
    family,
    matmul_shape,
    tensor_bytes,
)
from autosac.trace import Signature

MODELS = Path(__file__).resolve().parent / "data" / "models"
_AMPERE = "a100-sxm-80gb"
# (left transposed, right transposed) -> time relative to the layout of a linear layer's forward; estimates
_LAYOUT = {(False, True): 1.0, (False, False): 1.02, (True, False): 1.05, (True, True): 1.05}
# compute capability -> share of the peak that pre-Hopper matrix instructions reach; published FlashAttention-2 rates
_LEGACY_SHARE = {9: 0.50, 10: 0.25}
# backend -> (forward, backward) time relative to FlashAttention-2; estimates from published comparisons
_BACKEND = {"flash": (1.0, 1.0), "efficient": (1.8, 2.2), "flex": (1.15, 1.25)}
_DROPOUT = (1.3, 1.2)
_SCALED_STD, _CORRECTED_STD = 0.10, 0.10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """The trees of one GPU and the relative standard error of each, on held-out shapes."""

    name: str
    trees: dict[str, TreeEnsemble]
    rel_std: dict[str, float]


@cache
def load_bundle(name: str) -> Bundle | None:
    """The models fitted for a GPU profile; None if there are none."""
    path = MODELS / f"{name}.npz"
    if not path.exists():
        return None
    numbers = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    kinds = [kind for kind in numbers if f"{kind}.roots" in arrays]
    return Bundle(
        name=name,
        trees={kind: TreeEnsemble.from_arrays(arrays, kind) for kind in kinds},
        rel_std={kind: float(numbers[kind]["held_out"]["rel_std"]) for kind in kinds},
    )


@cache
def _attention_ratios() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((MODELS / "attention.json").read_text(encoding="utf-8"))
    return table


class LearnedCompute:
    """Matrix products and attention of one GPU. `tf32`: float32 products may use tensor cores."""

    def __init__(self, hardware: Hardware, *, tf32: bool = False) -> None:
        """Use the trees of `hardware`, or of the profile that it names; without either, know nothing."""
        self._hardware = hardware
        self._tf32 = tf32
        self._bundle = load_bundle(hardware.name) or load_bundle(hardware.models_of)
        self._sustained = dict(hardware.efficiency).get("sustained", 1.0)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of all matrix products and attentions among them that the trees cover."""
        answers: list[Estimate | None] = [None] * len(signatures)
        if self._bundle is None:
            return answers
        products: dict[str, list[tuple[int, Matmul, float]]] = {}
        attentions: list[tuple[int, Attention]] = []
        for i, signature in enumerate(signatures):
            kind = family(signature.name)
            if kind in ("matmul", "batched_matmul"):
                product = matmul_shape(signature)
                unit = arithmetic(product.dtype, tf32=self._tf32) if product else ""
                model = {"float8": "gemm.float8"}.get(unit, "gemm.bfloat16")
                if product and _is_learned(product, unit) and model in self._bundle.trees:
                    scaled = product._replace(k=2 * product.k) if unit == "tf32" else product
                    moved = tensor_bytes(signature.inputs) + tensor_bytes(signature.outputs)
                    products.setdefault(model, []).append((i, scaled, moved))
            elif kind in ("attention_forward", "attention_backward"):
                shape = attention_shape(signature)
                if shape and shape.dtype in ("float16", "bfloat16") and shape.backend != "math" and shape.flops:
                    attentions.append((i, shape))
        for model, rows in products.items():
            for (i, _, _), answer in zip(rows, self._products(model, rows), strict=True):
                answers[i] = answer
        for (i, _), answer in zip(attentions, self._attentions([s for _, s in attentions]), strict=True):
            answers[i] = answer
        return answers

    def _answer(self, ms: float, what: str, rel_std: float, bundle: Bundle) -> Estimate:
        scaled = bundle.name != self._hardware.name
        source = f"learned:{what}@{bundle.name}" if scaled else f"learned:{what}"
        return Estimate(ms, source, math.hypot(rel_std, _SCALED_STD if scaled else 0.0))

    def _products(self, model: str, rows: Sequence[tuple[int, Matmul, float]]) -> list[Estimate]:
        """Matrix products of one arithmetic, in one batch."""
        assert self._bundle is not None
        kind = model.removeprefix("gemm.")
        rates, item = Rates.of(self._hardware, kind), 1.0 if kind == "float8" else 2.0
        m, n, k = (
            np.array(c, dtype=np.float64) for c in zip(*((p.batch * p.m, p.n, p.k) for _, p, _ in rows), strict=True)
        )
        moved_ms = np.array([moved for _, _, moved in rows]) / rates.bandwidth * 1e3
        trees = self._bundle.trees[model].predict(gemm_features(m, n, k, item, rates))
        base = gemm_baseline_ms(m, n, k, item, rates)
        layout = np.array([_LAYOUT[p.a_transposed, p.b_transposed] for _, p, _ in rows])
        ms = np.maximum(base * np.exp(trees) * layout / self._sustained, moved_ms)
        std = self._bundle.rel_std[model]
        return [
            self._answer(float(t), "matmul", math.hypot(std, (f - 1) if f > 1 else 0.0), self._bundle)
            for t, f in zip(ms, layout, strict=True)
        ]

    def _attentions(self, shapes: Sequence[Attention]) -> list[Estimate]:
        """Attention forwards and backwards, in one batch for every kernel."""
        assert self._bundle is not None
        answers: list[Estimate] = []
        capability = self._hardware.compute_capability[0]
        legacy = _LEGACY_SHARE.get(capability, 1.0)
        for shape in shapes:
            own = shape.backend == "cudnn" or legacy == 1.0
            bundle = self._bundle if own else load_bundle(_AMPERE)
            assert bundle is not None
            rates = Rates.of(self._hardware, "bfloat16")
            rates = rates if own else replace(rates, flops=rates.flops * legacy)
            row = _attention_row(shape)
            ms = float(
                (
                    attention_baseline_ms(row, rates)
                    * np.exp(bundle.trees["attention"].predict(attention_features(row, rates)))
                )[0]
            )
            ms *= _attention_correction(shape, capability)
            std = bundle.rel_std["attention"]
            corrected = not own or shape.backend not in ("flash", "cudnn") or shape.dropout > 0
            answers.append(
                self._answer(
                    ms / self._sustained,
                    "attention",
                    math.hypot(std, _CORRECTED_STD if corrected else 0.03),
                    bundle,
                )
            )
        return answers


def _is_learned(product: Matmul, unit: str) -> bool:
    return unit in ("float16", "bfloat16", "tf32", "float8") and min(product.batch, product.m, product.n, product.k) > 0


def _attention_row(shape: Attention) -> Array:
    """The shape as the trees know it:

    Square attention of equal query and value sizes has the same number of operations.
    """
    size = (shape.head_size + shape.value_size) / 2
    return np.array(
        [
            [
                shape.batch,
                shape.heads,
                shape.kv_heads,
                shape.query_length,
                shape.key_length,
                size,
                float(shape.causal),
            ]
        ]
    )


def _attention_correction(shape: Attention, capability: int) -> float:
    """Time of this kernel relative to the forward that the trees predict."""
    table = _attention_ratios()
    cudnn = "cudnn.hopper" if capability >= 9 else "cudnn.ampere"
    ratios = table[cudnn if shape.backend == "cudnn" else "flash"]
    forward, backward = _BACKEND.get(shape.backend, (1.0, 1.0))
    factor = math.exp(ratios["forward"])
    if not shape.backward:
        return factor * forward * (_DROPOUT[0] if shape.dropout > 0 else 1.0)
    constant, slope = ratios["causal" if shape.causal else "full"]
    octaves = min(max(math.log2(max(shape.key_length, 1) / 8192), -4.0), 2.0)
    factor *= math.exp(constant + slope * octaves)
    return factor * backward * (_DROPOUT[1] if shape.dropout > 0 else 1.0)

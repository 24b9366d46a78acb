"""Learned models of matrix products, and the fitted trees that they and attention share.

Boosted trees (`trees.py`), fitted to measured kernels (`benchmarks/fit_models.py`, `data/SOURCES.md`), predict how far
a kernel is from its roofline (`features.py`):

    time = baseline(work, rates of this GPU) * exp(trees(features)) * layout / sustained + start

A GPU without measurements of its own uses the trees of the profile that it names (`models_of`) with its own rates and
processor count; the source then says whose trees they are ("learned:matmul@h100-sxm-80gb") and the error bar grows.

The trees know y = x W^T (both operands contiguous along k). The gradients' products read one or both operands across, which
costs a few percent before Hopper (`_LAYOUT`; an estimate, not fitted). TF32 on [m, n, k] runs as bf16 on [m, n, 2k]: same
bytes, half the rate. A batch of products fills tiles like one product with as many rows. `sustained` (a profile's
`efficiency.sustained`) is the share of the measured rates that a GPU keeps up; above one where a GPU reaches more of its own
peak than the one whose trees it borrows. Products in 8 bits that promote their partial sums (`use_fast_accum` is false, as in
the gradients of tensor-wise scaled layers) take longer before compute capability 10.

Rows of an operand or of the result that do not begin at multiples of 16 bytes (a vocabulary of 50,257) cannot be loaded
as the fast kernels do. Hopper's then serve no tile at all and the library falls back to Ampere's (`_UNALIGNED`). These load
at least 4 bytes at once without passing registers; rows of an odd number of 16-bit elements cannot even do that
(`_ODD_ROWS`). Hopper multiplies TF32 only along k: other layouts fall back, too (`_TF32_LAYOUT`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autosac.estimator import grouped
from autosac.estimator.features import Array, Rates, gemm_baseline_ms, gemm_features
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.trees import TreeEnsemble
from autosac.estimator.work import Matmul, arithmetic, base_name, family, item_bytes, matmul_shape, tensor_bytes
from autosac.trace import Signature

MODELS = Path(__file__).resolve().parent / "data" / "models"
# (left transposed, right transposed) -> time relative to the layout of a linear layer's forward; estimates. Hopper's kernels
# in 8 and 16 bits take each layout as fast: forward, both gradients and the recomputation of Llama's layers in one step on an
# H200, within 1 % of each other; held out: the products of 20 steps on an H100 (off by 33 ms of 773 before, 27 ms after).
_LAYOUT = {(False, True): 1.0, (False, False): 1.02, (True, False): 1.05, (True, True): 1.05}
# `benchmarks/gpu/power.py` on an H200 (cuBLAS 13): 8,192 x 4,096 x 14,336 in 672.6 us with exact sums, 630.3 without. Products
# with a scale for each row take the same kernels there: 1.00 of those with one scale, where they fill the GPU.
_PROMOTED = 1.07
# The trees' float8 was measured with the quantisation of the left factor in it, which `benchmarks/quantization.py` takes out.
# Some stays: at most a fifth of the price and 10 us. Fitted to 33 products with one scale on that H200 (15.3 -> 5.8 %); held
# out: 32 others (14.1 -> 4.9 %), 65 with a scale for each row (12.9 -> 9.0 %).
_QUANTIZED = (0.2, 0.010)
_ROW_BYTES = 16  # what rows must be aligned to
# first compute capability -> time relative to aligned rows, with its relative error. Hopper: 130.6 us against 37.0 for
# [9477, 588] x [588, 1152] in bf16, published with github.com/m87-labs/kestrel/pull/143. Before: padding GPT-2's vocabulary
# from 50,257 to 50,304 made the whole step of nanoGPT a quarter faster on A100s, of which these products are 46 %.
_UNALIGNED = {9: (3.5, 0.3), 7: (1.5, 0.2)}
# The same for rows of multiples of 4 bytes: 2.75, BERT's vocabulary of 30,522 on an H100 (torch 2.11). Of rows of odd length:
# 3.0, two batches of products in TraceLens's OWLv2 on an H100 (171dd747; 2.7 and 3.3; held out: two in its TimeSformer, 2.5
# both); and at most so many FLOPs a cycle and processor, Whisper's vocabulary of 51,865 in float16 on an H100; checked on
# GPT-2's steps there. These kernels are Ampere's on every GPU since: held out, a step of GPT-2 on an A100 (-10.6 -> -3.7 %).
_EVEN_ROWS, _ODD_ROWS, _ODD_CYCLE = {9: 2.75}, {9: 3.0}, {8: 552.7}
# Relative to a linear layer's forward, on Hopper: 19 kinds of products in one step with TF32. Nothing is held out.
_TF32_LAYOUT = {(False, True): 1.0, (False, False): 1.1, (True, False): 1.6, (True, True): 1.6}
# TF32 on an A100, where one wave of tiles of 128 x 128 holds the result: 3.0 ns more for each k, 1.5 us sooner ready. Fitted
# to 45 aligned kinds of `mm` and `addmm` in an A100's trace (11.1 -> 5.0 %); 44 others of it were held out (11.8 -> 4.8 %).
_TF32_LOOP_MS, _TF32_SOONER_MS, _TILE = 3.0e-6, 1.5e-3, 128
# No product is faster than the peak at the highest clock, which is above the data sheet's: the fastest square products that
# owners of GeForce cards measured (`benchmarks/square_products.py`) reach 1.00 (RTX 4090), 1.08 (3090) and 1.12 (5090) of it.
_HIGHEST_CLOCK = 1.08
# The trees know kernels that were timed back to back, where one starts while the one before it drains. Between other kernels
# products of less than 15 us took longer by 2.2 to 4.0 us (quartiles) in TraceLens's H100 traces (171dd747), by 2.6 to 3.4 on
# its B200 and by 4.3 to 5.0 on the A100s of HolisticTraceAnalysis's trace (f4d0062c): by a short kernel's time and 0.4 us,
# which was fitted to the first. There most added a bias (`addmm`). Those that do not take 1.0 us longer on Hopper, the gap
# between two kernels: 67 kinds of less than 12 us in the even steps on an H100; held out: the odd ones, and TraceLens's.
_START_MS, _PLAIN_START_MS = 0.0004, {9: 0.001}
_LEAST_MS = 0.0024  # of the tables' products: their start, whatever the alignment of rows
_SCALED_STD = 0.10  # of trees that were fitted to another GPU


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
    kinds = [kind for kind in numbers if f"{kind}.constants" in arrays]
    return Bundle(
        name=name,
        trees={kind: TreeEnsemble.from_arrays(arrays, kind) for kind in kinds},
        rel_std={kind: float(numbers[kind]["held_out"]["rel_std"]) for kind in kinds},
    )


def scaled_estimate(hardware: Hardware, bundle: Bundle, ms: float, what: str, rel_std: float) -> Estimate:
    """An answer of a bundle's trees; says so if they were fitted to another GPU."""
    if bundle.name == hardware.name:
        return Estimate(ms, f"learned:{what}", rel_std)
    return Estimate(ms, f"learned:{what}@{bundle.name}", math.hypot(rel_std, _SCALED_STD))


def sustained(hardware: Hardware) -> float:
    """What this GPU keeps up, relative to the rates that the trees know."""
    return dict(hardware.efficiency).get("sustained", 1.0)


class _Product(NamedTuple):
    """A product among the signatures: its place, its shape as the trees know it, bytes moved, bytes that its rows are aligned
    to, the unit that multiplies; `promotes`: its partial sums are promoted on the way; `adds`: another tensor is added, or
    scales are applied.
    """

    place: int
    shape: Matmul
    moved_bytes: float
    alignment: int
    promotes: bool
    adds: bool
    unit: str

    @property
    def aligned(self) -> bool:
        """Whether rows begin where the fast kernels need it."""
        return self.alignment >= _ROW_BYTES


class LearnedMatmul:
    """Matrix products in 16 and 8 bits on one GPU, and in TF32 if `tf32`."""

    def __init__(self, hardware: Hardware, *, tf32: bool = False) -> None:
        """Use the trees of `hardware`, or of the profile that it names; without either, know nothing."""
        self._hardware = hardware
        self._tf32 = tf32
        self._bundle = load_bundle(hardware.name) or load_bundle(hardware.models_of)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of all matrix products among them that the trees cover."""
        answers: list[Estimate | None] = [None] * len(signatures)
        if self._bundle is None:
            return answers
        products: dict[str, list[_Product]] = {}
        groups: dict[int, Signature] = {}
        for i, signature in enumerate(signatures):
            product = matmul_shape(signature) if family(signature.name) in ("matmul", "batched_matmul") else None
            if product is None:
                continue
            if grouped.is_grouped(signature) and self._hardware.compute_capability[0] >= 9:
                groups[i], product = signature, grouped.as_one(signature, product)
            unit = arithmetic(product.dtype, tf32=self._tf32)
            model = "gemm.float8" if unit == "float8" else "gemm.bfloat16"
            if self._is_learned(product, unit) and model in self._bundle.trees:
                deep = product._replace(k=2 * product.k) if unit == "tf32" else product
                moved = 0.0 if i in groups else float(tensor_bytes(signature.inputs) + tensor_bytes(signature.outputs))
                promotes = unit == "float8" and promotes_sums(signature, self._hardware)
                products.setdefault(model, []).append(
                    _Product(i, deep, moved, row_alignment(signature), promotes, _adds(signature), unit)
                )
        for model, rows in products.items():
            for row, answer in zip(rows, self._products(self._bundle, model, rows), strict=True):
                answers[row.place] = answer
        for place, signature in groups.items():
            if (one := answers[place]) is not None:
                answers[place] = one._replace(ms=grouped.grouped_ms(signature, one.ms, self._hardware))
        return answers

    def _is_learned(self, product: Matmul, unit: str) -> bool:
        """Products without elements are not, nor are those in bfloat16 where nothing multiplies that (`tiled.py`)."""
        known = unit in ("float16", "tf32", "float8") or (unit == "bfloat16" and self._hardware.half == unit)
        return known and min(product.batch, product.m, product.n, product.k) > 0

    def _products(self, bundle: Bundle, model: str, rows: Sequence[_Product]) -> list[Estimate]:
        """Matrix products of one arithmetic, in one batch."""
        kind = model.removeprefix("gemm.")
        unit, item = ("float8", 1.0) if kind == "float8" else (self._hardware.half, 2.0)
        rates = Rates.of(self._hardware, unit)
        m, n, k = np.array([(r.shape.batch * r.shape.m, r.shape.n, r.shape.k) for r in rows], dtype=np.float64).T
        moved_ms = np.array([row.moved_bytes for row in rows]) / rates.bandwidth * 1e3
        efficiency = np.exp(bundle.trees[model].predict(gemm_features(m, n, k, item, rates)))
        layout = np.array([self._layout(r) for r in rows])
        fallback, fallback_std = self._unaligned()
        factors = {_ROW_BYTES: 1.0, 4: self._since(_EVEN_ROWS, fallback), 2: self._since(_ODD_ROWS, fallback)}
        slower = np.array([factors.get(row.alignment, fallback) - 1 for row in rows])
        ms = gemm_baseline_ms(m, n, k, item, rates) * efficiency * layout / sustained(self._hardware)
        ms = np.maximum(ms, 2 * m * n * k / (_HIGHEST_CLOCK * rates.flops) * 1e3)
        ms *= np.where([row.promotes for row in rows], _PROMOTED, 1.0)
        if kind == "float8" and self._hardware.compute_capability[0] == 9:
            ms -= np.minimum(_QUANTIZED[0] * ms, _QUANTIZED[1])
        ms += slower * np.maximum(ms - _LEAST_MS, 0.0)
        ms = np.maximum(ms, self._odd_ms(rows))
        start = self._hardware.kernel_us * 1e-3 + _START_MS
        plain = self._since(_PLAIN_START_MS, start) if self._hardware.compute_capability[0] == 9 else start
        ms = np.maximum(ms, moved_ms) + np.where([row.adds for row in rows], start, plain)
        ms += [self._loop_ms(row) for row in rows]
        estimates = []
        for row, t, f in zip(rows, ms, layout, strict=True):
            what, known = ("matmul", 0.0) if row.aligned else ("unaligned-matmul", fallback_std)
            std = math.hypot(bundle.rel_std[model], f - 1, known)
            estimates.append(scaled_estimate(self._hardware, bundle, float(t), what, std))
        return estimates

    def _since(self, table: Mapping[int, float], otherwise: float) -> float:
        """What holds from a compute capability on."""
        return next((v for since, v in table.items() if self._hardware.compute_capability[0] >= since), otherwise)

    def _layout(self, row: _Product) -> float:
        hopper = self._hardware.compute_capability[0] == 9
        if hopper and row.unit != "tf32":
            return 1.0
        return (_TF32_LAYOUT if hopper else _LAYOUT)[row.shape.a_transposed, row.shape.b_transposed]

    def _loop_ms(self, row: _Product) -> float:
        """What TF32's loop over k takes beside the trees' bf16, see `_TF32_LOOP_MS`; `row.shape.k` counts bf16 elements."""
        if row.unit != "tf32" or self._hardware.compute_capability != (8, 0) or not row.aligned:
            return 0.0
        shape = row.shape
        tiles = shape.batch * math.ceil(shape.m / _TILE) * math.ceil(shape.n / _TILE)
        return _TF32_LOOP_MS * shape.k / 2 * (tiles < self._hardware.sm_count) - _TF32_SOONER_MS

    def _odd_ms(self, rows: Sequence[_Product]) -> Array:
        """The least that products take whose rows have an odd number of 16-bit elements."""
        rate = self._since(_ODD_CYCLE, math.inf) * self._hardware.sm_count * self._hardware.boost_mhz * 1e6
        flops = [2.0 * r.shape.batch * r.shape.m * r.shape.n * r.shape.k * (r.alignment == 2) for r in rows]
        return np.array(flops) / rate * 1e3

    def _unaligned(self) -> tuple[float, float]:
        """How much slower unaligned rows are on this GPU, and the relative error of that."""
        return next((v for since, v in _UNALIGNED.items() if self._hardware.compute_capability[0] >= since), (1.0, 0.0))


def promotes_sums(signature: Signature, hardware: Hardware) -> bool:
    """Whether a product in 8 bits adds its partial sums up in registers, see the module's docstring."""
    fast = dict(signature.arguments).get("use_fast_accum", False)
    return not fast and hardware.vendor == "NVIDIA" and hardware.compute_capability[0] < 10


def _adds(signature: Signature) -> bool:
    return base_name(signature.name) not in ("mm", "bmm")


def row_alignment(signature: Signature) -> int:
    """The bytes of which the rows of both operands and of the result begin at multiples, at most 16."""
    pitches = [
        max(meta.stride[-2:]) * item_bytes(meta.dtype)
        for meta in (*signature.inputs, *signature.outputs)
        if len(meta.shape) >= 2 and min(meta.shape[-2:]) > 1
    ]
    return math.gcd(_ROW_BYTES, *pitches)

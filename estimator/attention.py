"""Learned models of attention.

The trees know the forward of the kernels that serving libraries run: FlashAttention-2 on an A100 (head size 128,
causal) and an L40S (also 64 to 80, and without a mask), FlashAttention-3 on Hopper, TensorRT-LLM's and FlashAttention-4
on Blackwell. What PyTorch runs is derived from them, where `tiled_attention` does not know it (it knows cuDNN's,
FlashAttention's and flexible attention on Hopper and Blackwell):

    cudnn      this GPU's own trees, which are of kernels as fast as cuDNN's; the measured offset of cuDNN from them
    flash      FlashAttention-2. Before Hopper this GPU's own trees. From Hopper on its instructions reach only a share of
               the peak (`_LEGACY_SHARE`): the A100's trees with that share. What the A100's trees do not know (other head
               sizes, no mask) is taken as a ratio from the L40S's.
    efficient, flex   ratios to FlashAttention-2 (`_EFFICIENT`, fitted; `_BACKEND`, estimates)

    forward  = trees * exp(offset of the training library from the serving one)
    backward = forward * exp(c) + accumulation                  both measured (`data/models/attention.json`)

The backward adds up the queries' gradient in float32: one kernel before it reads the output and its gradient and clears
the sum, one after it converts the sum. Their traffic grows with the length where the rest grows with its square; with
it, what remains of backward / forward is the same number from 2k to 32k.

Dropout inside the kernel costs a constant factor (`_DROPOUT`, an estimate). Pairs that a window or a mask of flexible
attention leaves out take no time, but what is read and written does: no price is below that.

With context parallelism a rank attends to its own keys, then to those that it receives, of which it takes one half, or
one half of its queries. These chunks take longer than kernels of their size do (`_RECEIVED`). Why is not known: neither
rotation nor merging the results is a fourth of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from autosac.estimator.features import Array, Rates, attention_baseline_ms, attention_features
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.learned import MODELS, Bundle, load_bundle, scaled_estimate, sustained
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, AttentionShape, attention_shape, family
from autosac.trace import Signature

_AMPERE, _ADA = "a100-sxm-80gb", "l40s"
# compute capability -> share of the peak that pre-Hopper matrix instructions reach; published FlashAttention-2 rates
_LEGACY_SHARE = {9: 0.50, 10: 0.25}
# backend -> (forward, backward) time relative to FlashAttention-2; estimates from published comparisons
_BACKEND = {"flash": (1.0, 1.0), "flex": (1.15, 1.25)}
# The memory-efficient kernel's (forward, backward) at many keys; what is beside the products of n keys takes as long as in
# FlashAttention-2: of what is above 1, n / (n + 1,650). From steps of Llama-3.2-1B with both kernels on an H200
# (cudnn-frontend, `benchmark/Llama-3.2-1B-Training`). Held out: docs/causes.md.
_EFFICIENT, _EFFICIENT_KEYS = (2.155, 2.73), 1650
# Beyond this head size the memory-efficient backward has no room for its sums in registers: it adds them up in memory, tile by
# tile, and loads operands when they are needed. From one published run, DeepSeek-V3 16B on 8 H100s (heads of 192; TorchTitan
# f738a03bf): between its first steps, at 7,008 tokens/s, and its last, at 6,720. Held out: docs/causes.md.
_ACCUMULATED_SIZE, _IN_MEMORY, _IN_MEMORY_STD = 128, 2.57, 0.25
_DROPOUT = (1.3, 1.2)
_QUERY_TILE, _KEY_TILE = 128, 64
_SIZE_TILE = 32  # of a head, as the accumulated gradient is laid out
_ACCUMULATION = 2 + 2 + 4 + 4 + 2  # bytes an element: output and its gradient, float32 written and read, the result
_CORRECTED_STD, _TRAINING_STD = 0.10, 0.03
# TorchTitan's tables of December 2024 (Llama 3.1 8B, float8, compiled, 32,768 tokens a rank): a step takes 22.2 s longer with
# 4 ranks than with 1. That is 231 ms for each layer and chunk, of which kernels that run like those of the rank's own keys
# explain 170 ms, and merging and rotation 15 ms. Held out (`docs/causes.md`): 2 and 8 ranks, and Llama 3.1 405B.
_RECEIVED, _RECEIVED_STD = 1.27, 0.25


@cache
def _ratios() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((MODELS / "attention.json").read_text(encoding="utf-8"))
    return table


class LearnedAttention:
    """Fused attention in 16 bits on one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        """Use the trees of `hardware`, or of the profile that it names; without either, know nothing."""
        self._hardware = hardware
        self._bundle = load_bundle(hardware.name) or load_bundle(hardware.models_of)
        self._rates = Rates.of(hardware, hardware.half)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the fused attentions among them."""
        answers: list[Estimate | None] = [None] * len(signatures)
        if self._bundle is None:
            return answers
        fused: list[tuple[int, AttentionShape]] = []
        for i, signature in enumerate(signatures):
            if family(signature.name) in ("attention_forward", "attention_backward"):
                shape = attention_shape(signature)
                if shape and shape.dtype in ("float16", "bfloat16") and shape.backend != "math" and shape.flops:
                    fused.append((i, shape))
        capability = self._hardware.compute_capability[0]
        legacy = capability >= 9 or self._bundle.name == _AMPERE  # FlashAttention-2 comes from the A100's trees
        for by_ampere in (False, True):
            mine = [(i, shape) for i, shape in fused if (legacy and shape.backend != "cudnn") == by_ampere]
            if mine:
                prices = self._prices(self._bundle, [shape for _, shape in mine], by_ampere)
                for (i, _), price in zip(mine, prices, strict=True):
                    answers[i] = price
        return answers

    def _prices(self, own: Bundle, shapes: Sequence[AttentionShape], by_ampere: bool) -> list[Estimate]:
        """Shapes that are priced by the same trees, in one batch."""
        capability = self._hardware.compute_capability[0]
        rows = np.concatenate([_row(shape) for shape in shapes])
        if by_ampere:
            bundle = _bundle(_AMPERE)
            times = self._flash_two(bundle, rows, _LEGACY_SHARE.get(capability, 1.0))
        else:
            bundle, times = own, _forward_ms(own, rows, self._rates)
        added = accumulation_ms(rows, self._rates)
        estimates = []
        for shape, ms, accumulation in zip(shapes, times.tolist(), added.tolist(), strict=True):
            exact = shape.backend in ("flash", "cudnn") and shape.dropout == 0 and capability not in _LEGACY_SHARE
            std = math.hypot(bundle.rel_std["attention"], _TRAINING_STD if exact else _CORRECTED_STD)
            if _adds_up_in_memory(shape):
                std = math.hypot(std, _IN_MEMORY_STD)
            corrected = ms * _correction(shape, capability) / sustained(self._hardware) * shape.share
            if shape.share < 1:
                corrected = max(corrected, _moved(shape) / (self._rates.bandwidth * STREAMED) * 1e3)
            corrected += accumulation if shape.backward else 0.0
            estimates.append(scaled_estimate(self._hardware, bundle, corrected, "attention", std))
        return estimates

    def _flash_two(self, ampere: Bundle, rows: Array, share: float) -> Array:
        """FlashAttention-2 by the A100's trees; head sizes and masks that they do not know by ratios of the L40S's."""
        known = rows.copy()
        known[:, 5:] = (128.0, 1.0)
        ms = _forward_ms(ampere, known, replace(self._rates, flops=self._rates.flops * share))
        other = (rows != known).any(axis=1)
        if other.any():
            ada, rates = (
                _bundle(_ADA),
                replace(Rates.of(load_hardware(_ADA), "bfloat16"), sm_count=self._hardware.sm_count),
            )
            ms[other] *= _forward_ms(ada, rows[other], rates) / _forward_ms(ada, known[other], rates)
        return ms


def received_chunk(signature: Signature, estimate: Estimate) -> Estimate:
    """The price of an operator in a step with context parallelism: more for attention to keys of another rank, of which there
    are fewer or more than queries.
    """
    if family(signature.name) not in ("attention_forward", "attention_backward"):
        return estimate
    shape = attention_shape(signature)
    if shape is None or shape.causal or shape.backend == "flex" or shape.query_length == shape.key_length:
        return estimate
    return estimate._replace(ms=estimate.ms * _RECEIVED, rel_std=math.hypot(estimate.rel_std, _RECEIVED_STD))


def _bundle(name: str) -> Bundle:
    bundle = load_bundle(name)
    assert bundle is not None
    return bundle


def _forward_ms(bundle: Bundle, rows: Array, rates: Rates) -> Array:
    efficiency = np.exp(bundle.trees["attention"].predict(attention_features(rows, rates)))
    return np.asarray(attention_baseline_ms(rows, rates) * efficiency)


def _row(shape: AttentionShape) -> Array:
    """The shape as the trees know it: lengths in whole tiles, since a kernel computes whole tiles.

    A value size of its own counts by the mean, which has as many operations.
    """
    size = (shape.head_size + shape.value_size) / 2
    query = math.ceil(shape.query_length / _QUERY_TILE) * _QUERY_TILE
    key = math.ceil(shape.key_length / _KEY_TILE) * _KEY_TILE
    return np.array([[shape.batch, shape.heads, shape.kv_heads, query, key, size, shape.causal]], dtype=np.float64)


def _moved(shape: AttentionShape) -> float:
    """Bytes that a kernel reads and writes at the least; a backward twice as many as a forward."""
    rows = shape.heads * shape.query_length + shape.kv_heads * shape.key_length
    return 2.0 * shape.batch * rows * (shape.head_size + shape.value_size) * (2 if shape.backward else 1)


def _adds_up_in_memory(shape: AttentionShape) -> bool:
    return shape.backward and shape.backend == "efficient" and shape.head_size > _ACCUMULATED_SIZE


def _correction(shape: AttentionShape, capability: int) -> float:
    """Time of this kernel relative to the forward that the trees predict."""
    cudnn = "cudnn.hopper" if capability >= 9 else "cudnn.ampere"
    ratios = _ratios()[cudnn if shape.backend == "cudnn" else "flash"]
    forward, backward = _BACKEND.get(shape.backend, (1.0, 1.0))
    if shape.backend == "efficient":
        share = shape.key_length / (shape.key_length + _EFFICIENT_KEYS)
        forward, backward = (1 + share * (ratio - 1) for ratio in _EFFICIENT)
    factor = math.exp(ratios["forward"])
    if not shape.backward:
        return factor * forward * (_DROPOUT[0] if shape.dropout > 0 else 1.0)
    ratio = math.exp(ratios["causal" if shape.causal else "full"])
    if _adds_up_in_memory(shape):
        backward *= _IN_MEMORY
    return factor * ratio * backward * (_DROPOUT[1] if shape.dropout > 0 else 1.0)


def accumulated_bytes(shape: AttentionShape) -> float:
    """What a backward moves to add up the queries' gradient."""
    return float(_accumulated(_row(shape))[0])


def accumulation_ms(rows: Array, rates: Rates) -> Array:
    """Time of the kernels before and after a backward, in milliseconds; columns of `rows` as in `attention_features`."""
    return np.asarray(_accumulated(rows) / (STREAMED * rates.bandwidth) * 1e3)


def _accumulated(rows: Array) -> Array:
    batch, heads, _, query, _, size, _ = rows.T
    elements = batch * heads * np.ceil(query / _QUERY_TILE) * _QUERY_TILE * np.ceil(size / _SIZE_TILE) * _SIZE_TILE
    return np.asarray(_ACCUMULATION * elements)

"""Learned models of attention.

The trees know the forward of the kernels that serving libraries run: FlashAttention-2 on an A100 (head size 128,
causal) and an L40S (also 64 to 80, and without a mask), FlashAttention-3 on Hopper, TensorRT-LLM's and FlashAttention-4
on Blackwell. What PyTorch runs is derived from them:

    cudnn      this GPU's own trees, which are of kernels as fast as cuDNN's; the measured offset of cuDNN from them
    flash      FlashAttention-2. Before Hopper this GPU's own trees. From Hopper on its instructions reach only a share
    of
               the peak (`_LEGACY_SHARE`): the A100's trees with that share. What the A100's trees do not know (other
               head sizes, no mask) is taken as a ratio from the L40S's.
    efficient, flex   ratios to FlashAttention-2 (`_BACKEND`, estimates)

    forward  = trees * exp(offset of the training library from the serving one)
    backward = forward * exp(c0 + c1 log2(length / 8192))       both measured (`data/models/attention.json`)

Dropout inside the kernel costs a constant factor (`_DROPOUT`, an estimate).
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
from autosac.estimator.work import Attention, attention_shape, family
from autosac.trace import Signature

_AMPERE, _ADA = "a100-sxm-80gb", "l40s"
# compute capability -> share of the peak that pre-Hopper matrix instructions reach; published FlashAttention-2 rates
_LEGACY_SHARE = {9: 0.50, 10: 0.25}
# backend -> (forward, backward) time relative to FlashAttention-2; estimates from published comparisons
_BACKEND = {"flash": (1.0, 1.0), "efficient": (1.8, 2.2), "flex": (1.15, 1.25)}
_DROPOUT = (1.3, 1.2)
_QUERY_TILE, _KEY_TILE = 128, 64
_CORRECTED_STD, _TRAINING_STD = 0.10, 0.03


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
        self._rates = Rates.of(hardware, "bfloat16")

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the fused attentions among them."""
        answers: list[Estimate | None] = [None] * len(signatures)
        for i, signature in enumerate(signatures):
            if self._bundle is None or family(signature.name) not in ("attention_forward", "attention_backward"):
                continue
            shape = attention_shape(signature)
            if shape and shape.dtype in ("float16", "bfloat16") and shape.backend != "math" and shape.flops:
                answers[i] = self._price(self._bundle, shape)
        return answers

    def _price(self, own: Bundle, shape: Attention) -> Estimate:
        capability = self._hardware.compute_capability[0]
        legacy = shape.backend != "cudnn" and (capability >= 9 or own.name == _AMPERE)
        if legacy:
            bundle = load_bundle(_AMPERE)
            assert bundle is not None
            ms = self._flash_two(bundle, shape, _LEGACY_SHARE.get(capability, 1.0))
        else:
            bundle, ms = own, _forward_ms(own, _row(shape), self._rates)
        exact = shape.backend in ("flash", "cudnn") and shape.dropout == 0 and capability not in _LEGACY_SHARE
        std = math.hypot(bundle.rel_std["attention"], _TRAINING_STD if exact else _CORRECTED_STD)
        ms *= _correction(shape, capability) / sustained(self._hardware)
        return scaled_estimate(self._hardware, bundle, ms, "attention", std)

    def _flash_two(self, ampere: Bundle, shape: Attention, share: float) -> float:
        """FlashAttention-2 by the A100's trees; head sizes and masks that they do not know by ratios of the L40S's."""
        known = _row(shape)
        known[0, 5:] = (128.0, 1.0)
        ms = _forward_ms(ampere, known, replace(self._rates, flops=self._rates.flops * share))
        row = _row(shape)
        if (row == known).all():
            return ms
        ada = load_bundle(_ADA)
        assert ada is not None
        rates = replace(Rates.of(load_hardware(_ADA), "bfloat16"), sm_count=self._hardware.sm_count)
        return ms * _forward_ms(ada, row, rates) / _forward_ms(ada, known, rates)


def _forward_ms(bundle: Bundle, row: Array, rates: Rates) -> float:
    efficiency = np.exp(bundle.trees["attention"].predict(attention_features(row, rates)))
    return float((attention_baseline_ms(row, rates) * efficiency)[0])


def _row(shape: Attention) -> Array:
    """The shape as the trees know it: lengths in whole tiles, since a kernel computes whole tiles.

    A value size of its own counts by the mean, which has as many operations.
    """
    size = (shape.head_size + shape.value_size) / 2
    query = math.ceil(shape.query_length / _QUERY_TILE) * _QUERY_TILE
    key = math.ceil(shape.key_length / _KEY_TILE) * _KEY_TILE
    return np.array([[shape.batch, shape.heads, shape.kv_heads, query, key, size, shape.causal]], dtype=np.float64)


def _correction(shape: Attention, capability: int) -> float:
    """Time of this kernel relative to the forward that the trees predict."""
    cudnn = "cudnn.hopper" if capability >= 9 else "cudnn.ampere"
    ratios = _ratios()[cudnn if shape.backend == "cudnn" else "flash"]
    forward, backward = _BACKEND.get(shape.backend, (1.0, 1.0))
    factor = math.exp(ratios["forward"])
    if not shape.backward:
        return factor * forward * (_DROPOUT[0] if shape.dropout > 0 else 1.0)
    constant, slope = ratios["causal" if shape.causal else "full"]
    octaves = min(max(math.log2(max(shape.key_length, 1) / 8192), -4.0), 2.0)
    return factor * math.exp(constant + slope * octaves) * backward * (_DROPOUT[1] if shape.dropout > 0 else 1.0)

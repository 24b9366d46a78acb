"""Attention with heads that are wider than what a kernel keeps in registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from autosac.estimator import LearnedAttention, load_hardware
from autosac.estimator.attention import accumulation_ms
from autosac.estimator.features import Rates
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")


def test_wide_heads_in_the_memory_efficient_backward(meta: Callable[..., TensorMeta]) -> None:
    """Without what is added up in float32, it takes 1 + 1.73 * 4096 / (4096 + 1650) = 2.233 times FlashAttention-2's time with
    heads of 128, and 2.57 times that with 192; a forward 1 + 1.155 * 0.713 times, one of few keys hardly more than that time.
    """
    rates = Rates.of(H100, "bfloat16")
    many = 4096 / (4096 + 1650)
    for size, factor in ((128, 1 + 1.73 * many), (192, (1 + 1.73 * many) * 2.57)):
        x, sums = meta((2, 16, 4096, size)), np.array([[2.0, 16.0, 16.0, 4096.0, 4096.0, size, 1.0]])
        names = (f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in ("flash", "efficient"))
        backwards = [Signature(name, (x,) * 5, (x,) * 3, (("is_causal", True),)) for name in names]
        flash, efficient = LearnedAttention(H100).estimate(backwards)
        assert flash is not None and efficient is not None
        (added,) = accumulation_ms(sums, rates)
        assert (efficient.ms - added) / (flash.ms - added) == pytest.approx(factor)
    for keys, share in ((4096, many), (128, 128 / (128 + 1650))):
        x = meta((2, 16, keys, 128))
        names = (f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("flash", "efficient"))
        forwards = [Signature(name, (x,) * 3, (x,), (("is_causal", True),)) for name in names]
        flash, efficient = LearnedAttention(H100).estimate(forwards)
        assert flash is not None and efficient is not None
        assert efficient.ms / flash.ms == pytest.approx(1 + 1.155 * share)

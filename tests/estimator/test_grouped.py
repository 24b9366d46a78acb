"""Grouped products on Hopper, from the price of one product and what the groups add."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest

from autosac.estimator import load_hardware
from autosac.estimator.features import Rates, gemm_baseline_ms, gemm_features
from autosac.estimator.learned import LearnedMatmul, load_bundle
from autosac.trace import Signature, TensorMeta

Meta: TypeAlias = Callable[..., TensorMeta]
H100 = load_hardware("h100-sxm-80gb")


def _ms(signature: Signature, gpu: str = "h100-sxm-80gb") -> float:
    (answer,) = LearnedMatmul(load_hardware(gpu)).estimate([signature])
    assert answer is not None
    return answer.ms


def _forward(meta: Meta, experts: int, rows: int, k: int, n: int) -> Signature:
    weights = TensorMeta((experts, k, n), (k * n, 1, k), "bfloat16")
    return Signature(
        "aten._grouped_mm.default", (meta((rows, k)), weights, meta((experts,), "int32")), (meta((rows, n)),)
    )


def _product(meta: Meta, batch: int, m: int, k: int, n: int) -> Signature:
    right = TensorMeta((batch, k, n), (k * n, 1, k), "bfloat16")
    left, out = (meta((batch, m, size)) for size in (k, n))
    return Signature("aten.bmm.default", (left, right), (out,))


@pytest.mark.parametrize(("rows", "whole"), [(128, 128), (100, 128), (129, 256), (1024, 1024)])
def test_a_groups_last_tile_counts_as_a_whole_one(meta: Meta, rows: int, whole: int) -> None:
    """64 groups of 100 rows multiply as long as 64 of 128, those of 129 as 64 of 256; reading is paid beside that."""
    k, n = 2048, 1408
    moved = 2 * 64 * (rows * k + k * n + rows * n) + 4 * 64
    read = moved / (0.85 * H100.mem_bandwidth_gbps * 1e9) * 1e3
    assert _ms(_forward(meta, 64, 64 * rows, k, n)) == pytest.approx(math.hypot(1.05 * _alone(64 * whole, n, k), read))


def _alone(m: int, n: int, k: int) -> float:
    """What the trees say of a product, without what it reads at least, and a start as after other kernels."""
    bundle = load_bundle("h100-sxm-80gb")
    assert bundle is not None
    rates = Rates.of(H100, "bfloat16")
    sizes = [np.array([float(size)]) for size in (m, n, k)]
    efficiency = np.exp(bundle.trees["gemm.bfloat16"].predict(gemm_features(*sizes, 2.0, rates)))
    (ms,) = gemm_baseline_ms(*sizes, 2.0, rates) * efficiency
    return float(ms) + H100.kernel_us * 1e-3 + 0.0004


def test_a_gradient_of_weights_writes_after_its_sums(meta: Meta) -> None:
    """The sums of all groups are those of one long product; every group's result is written beside them."""
    rows, k, n, experts = 32768, 2048, 1408, 64
    left = TensorMeta((n, rows), (1, n), "bfloat16")
    out = meta((experts, n, k))
    signature = Signature("aten._grouped_mm.default", (left, meta((rows, k)), meta((experts,), "int32")), (out,))
    one, written = _alone(n, k, rows), 2 * experts * n * k / (16.7e3 * 132) / 1e3
    assert _ms(signature) == pytest.approx((one**1.3 + written**1.3) ** (1 / 1.3))


def test_blackwells_gradients_take_twice_as_long_as_a_product(meta: Meta) -> None:
    """On a B200 the loop takes 1.19 times the one product with all rows, and a gradient 1.9 times, whatever it writes."""
    rows, k, n, experts = 32768, 4096, 8192, 8
    b200 = "b200-sxm-180gb"
    start = (load_hardware(b200).kernel_us + 0.4) * 1e-3
    weights = TensorMeta((k, n), (1, k), "bfloat16")
    one = _ms(Signature("aten.mm.default", (meta((rows, k)), weights), (meta((rows, n)),)), b200)
    forward = _forward(meta, experts, rows, k, n)
    moved = 2 * (rows * k + experts * k * n + rows * n) + 4 * experts
    read_ms = moved / (0.85 * load_hardware(b200).mem_bandwidth_gbps * 1e9) * 1e3
    assert _ms(forward, b200) == pytest.approx(math.hypot(1.19 * one, read_ms), rel=0.01)
    left = TensorMeta((n, rows), (1, n), "bfloat16")
    gradient = Signature(
        "aten._grouped_mm.default", (left, meta((rows, k)), meta((experts,), "int32")), (meta((experts, n, k)),)
    )
    plain = _ms(Signature("aten.mm.default", (left, meta((rows, k))), (meta((n, k)),)), b200)
    assert _ms(gradient, b200) == pytest.approx(1.9 * plain, abs=2 * start, rel=0.01)


def test_gpus_before_hopper_have_no_such_kernel(meta: Meta) -> None:
    """On an A100 the price is that of a batch of products."""
    signature = _forward(meta, 64, 64 * 128, 2048, 1408)
    a100 = "a100-sxm-80gb"
    assert _ms(signature, a100) == pytest.approx(_ms(_product(meta, 64, 128, 2048, 1408), a100), rel=0.02)

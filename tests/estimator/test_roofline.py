"""The roofline model: numbers worked out by hand, and that it knows everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator import load_hardware
from autosac.estimator.roofline import Roofline
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")


def test_a_large_product_is_bound_by_arithmetic(mm: Callable[..., Signature]) -> None:
    """8192^3: 2*8192^3 / (989e12 * 0.72) seconds."""
    (answer,) = Roofline(H100).estimate([mm(8192, 8192, 8192)])
    assert answer.ms == pytest.approx(2 * 8192**3 / (989e12 * 0.72) * 1e3 + 0.0026, rel=1e-12)
    assert answer.source == "roofline"


def test_a_float32_product_uses_the_plain_rate_unless_told(mm: Callable[..., Signature]) -> None:
    """67 TFLOP/s without, 494.5 with TF32."""
    product = mm(8192, 8192, 8192, "float32")
    (plain,) = Roofline(H100).estimate([product])
    (tf32,) = Roofline(H100, tf32=True).estimate([product])
    assert (plain.ms - 0.0026) / (tf32.ms - 0.0026) == pytest.approx(494.5 / 67)


def test_an_addition_is_bound_by_memory(meta: Callable[..., TensorMeta]) -> None:
    """Three times 2^28 float32 at 3350 GB/s * 0.88."""
    x = meta((2**28,), "float32")
    (answer,) = Roofline(H100).estimate([Signature("aten.add.Tensor", (x, x), (x,))])
    assert answer.ms == pytest.approx(3 * 2**30 / (3350e9 * 0.88) * 1e3 + 0.0026, rel=1e-12)


def test_a_tiny_operator_takes_the_shortest_kernel(meta: Callable[..., TensorMeta]) -> None:
    """Four elements: 2.6 microseconds, and 16 bytes."""
    x = meta((4,))
    (answer,) = Roofline(H100).estimate([Signature("aten.relu.default", (x,), (x,))])
    assert answer.ms == pytest.approx(0.0026 + 16 / (3350e9 * 0.88) * 1e3)


def test_an_unknown_operator_is_charged_for_its_bytes(meta: Callable[..., TensorMeta]) -> None:
    """It is never free, and its source says so."""
    x = meta((2**28,), "float32")
    (answer,) = Roofline(H100).estimate([Signature("mylib.fancy.default", (x,), (x,))])
    assert answer.source == "bytes"
    assert answer.ms == pytest.approx(2 * 2**30 / (3350e9 * 0.88) * 1e3 + 0.0026, rel=1e-12)


def test_a_biases_gradient_is_slower_than_a_sum_over_rows(meta: Callable[..., TensorMeta]) -> None:
    """Reducing the slow dimension reaches 42 % of the bandwidth, the fast one 80 %."""
    x, row, column = meta((2**14, 2**14)), meta((2**14,)), meta((2**14,))
    outer, inner = Roofline(H100).estimate(
        [
            Signature("aten.sum.dim_IntList", (x,), (row,), (("dim", (0,)),)),
            Signature("aten.sum.dim_IntList", (x,), (column,), (("dim", (-1,)),)),
        ]
    )
    assert (outer.ms - 0.0026) / (inner.ms - 0.0026) == pytest.approx(0.80 / 0.42)


def test_attention_is_computed_in_whole_tiles(meta: Callable[..., TensorMeta]) -> None:
    """257 tokens of size 80 cost as much as 320 of size 96, in float32."""
    name = "aten._scaled_dot_product_efficient_attention.default"
    odd, even = (meta((64, 16, length, size), "float32") for length, size in ((257, 80), (320, 96)))
    first, second = Roofline(H100).estimate([Signature(name, (q, q, q), (q,)) for q in (odd, even)])
    assert first.ms == pytest.approx(second.ms)


def test_a_copy_to_the_host_moves_at_the_rate_of_pcie(meta: Callable[..., TensorMeta]) -> None:
    """2^30 bytes at 63 GB/s * 0.8."""
    x, y = meta((2**28,), "float32"), meta((2**28,), "float32", "cpu")
    (answer,) = Roofline(H100).estimate([Signature("aten._to_copy.default", (x,), (y,))])
    assert answer.ms == pytest.approx(2**30 / (63e9 * 0.8) * 1e3, rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(m=st.integers(1, 4096), n=st.integers(1, 4096), k=st.integers(1, 4096), more=st.integers(1, 512))
def test_more_work_never_takes_less_time(mm: Callable[..., Signature], m: int, n: int, k: int, more: int) -> None:
    """The roofline grows with every dimension."""
    base, taller, wider, deeper = Roofline(H100).estimate(
        [mm(m, n, k), mm(m + more, n, k), mm(m, n + more, k), mm(m, n, k + more)]
    )
    assert base.ms <= min(taller.ms, wider.ms, deeper.ms)
    assert base.ms > 0


@settings(deadline=None, max_examples=30)
@given(gpu=st.sampled_from(["a100-sxm-80gb", "h200-sxm-141gb", "mi300x", "rtx-3090"]), size=st.integers(1, 10**8))
def test_every_gpu_prices_every_family(meta: Callable[..., TensorMeta], gpu: str, size: int) -> None:
    """No GPU lacks a rate that an operator needs."""
    x, w = meta((1, 1, 1, size), "float8_e5m2"), meta((size, 4), "float8_e5m2")
    names = ["aten.relu.default", "aten.sum.default", "aten._softmax.default", "aten.sort.default", "x.y.z"]
    names += ["aten.mm.default", "aten.convolution.default", "aten.zero_.default", "aten.index_put_.default"]
    answers = Roofline(load_hardware(gpu)).estimate([Signature(name, (x, w), (x,)) for name in names])
    assert all(answer.ms > 0 for answer in answers)

"""Batches of thin products: figures worked out by hand for an H100 of 132 processors and an A100 of 108."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
H100, A100 = load_hardware("h100-sxm-80gb"), load_hardware("a100-sxm-40gb")


def _us(signature: Signature) -> float | None:
    (answer,) = Kernels(Streams(H100)).estimate([signature])
    return None if answer is None else answer.ms * 1e3


def _product(left: TensorMeta, right: TensorMeta) -> Signature:
    batch, m, n = left.shape[0], left.shape[1], right.shape[2]
    return Signature("aten.bmm.default", (left, right), (TensorMeta((batch, m, n), (m * n, n, 1), left.dtype),))


@pytest.mark.parametrize(
    ("m", "k", "n", "blocks", "resident"),
    [
        (1, 8, 2048, 32, 16),  # sums of eight rows: two threads for a result, 64 results a block
        (1, 64, 2048, 128, 16),  # of many: eight threads, 16 results
        (8, 1, 2048, 16, 4),  # a column by a row: tiles of 128 x 32
    ],
)
def test_short_blocks_take_turns(meta: Meta, m: int, k: int, n: int, blocks: int, resident: int) -> None:
    """Of 2^20 products; a block takes 1.4 us of an H100, a tile 3 us; before them 1 us, and 10 ns for each term."""
    streams = Streams(H100)
    signature = _product(meta((2**20, m, k), "float32"), meta((2**20, k, n), "float32"))
    threads = {8: 2, 64: 8, 1: 1}[k]
    expected = 2.6 + streams.slower * (
        1.0 + 2**20 * blocks / (132 * resident) * (3.0 if k == 1 else 1.4) + k / threads * 0.01
    )
    moved = 4 * 2**20 * (m * k + k * n + m * n)
    assert _us(signature) == pytest.approx(max(expected, streams.plain_us(moved)))


def test_dots_of_long_rows_are_bound_by_memory(meta: Meta) -> None:
    """A row by the transposed outputs of eight experts: a block for each token, which reads 64 KiB."""
    tokens = 2**14
    right = TensorMeta((tokens, 2048, 8), (2048 * 8, 1, 2048), "float32")
    moved = 4 * tokens * (2048 + 2048 * 8 + 8)
    assert _us(_product(meta((tokens, 1, 2048), "float32"), right)) == pytest.approx(Streams(H100).plain_us(moved))


def test_other_products_are_left_to_their_models(meta: Meta) -> None:
    """One product, and a batch of products of two rows."""
    assert _us(_product(meta((1, 1, 64), "float32"), meta((1, 64, 64), "float32"))) is None
    assert _us(_product(meta((64, 2, 64), "float32"), meta((64, 64, 64), "float32"))) is None


def test_products_of_mamba_on_an_h100(meta: Meta) -> None:
    """Measured in a step: sums of 2,048 rows, a column by a row, and dots of 16 terms."""
    across = TensorMeta((4, 16, 2048), (32768, 1, 16), "bfloat16")
    measured = {
        6.2: _product(across, meta((4, 2048, 1))),
        3.7: _product(meta((4, 2048, 1)), meta((4, 1, 16))),
        3.4: _product(meta((4, 2048, 16)), meta((4, 16, 1))),
    }
    assert [_us(product) for product in measured.values()] == pytest.approx(list(measured), rel=0.3)


@pytest.mark.parametrize(("transposed", "measured"), [(False, 8.0), (True, 11.0)])
def test_products_in_an_a100s_trace(meta: Meta, transposed: bool, measured: float) -> None:
    """HolisticTraceAnalysis (f4d0062c): 1,024 rows by matrices of 32 x 32, and by their transposes."""
    right = TensorMeta((1024, 32, 32), (1024, 1, 32) if transposed else (1024, 32, 1), "float32")
    signature = _product(meta((1024, 1, 32), "float32"), right)
    (answer,) = first_estimates(default_models(A100).operators, [signature])
    assert answer.source.startswith("kernels:thin")
    assert answer.ms * 1e3 == pytest.approx(measured, rel=0.3)

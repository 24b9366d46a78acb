"""Operators that wait: figures worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.latencies import Latencies
from autosac.trace import Signature, TensorMeta

H100, MI300X = load_hardware("h100-sxm-80gb"), load_hardware("mi300x")
Meta = Callable[..., TensorMeta]


def _us(signature: Signature, gpu: str = "h100-sxm-80gb") -> float:
    (answer,) = Latencies(load_hardware(gpu)).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


@pytest.mark.parametrize(
    ("dim", "dtype", "waits", "bytes_per_us"),
    [
        (1, "bfloat16", 7500, 3350e3 * 0.88),
        (0, "float32", 19700, 2.9 * 4 * 132 * 1830),
        (0, "bfloat16", 19700, 2.9 * 2 * 132 * 1830),
    ],
)
def test_a_sum_waits_for_its_tree(meta: Meta, dim: int, dtype: str, waits: int, bytes_per_us: float) -> None:
    """Cycles of waiting, then its bytes at the memory's rate, or at what its threads hold in flight."""
    x, out = meta((2**14, 2**14), dtype), meta((2**14,), dtype)
    item = 4 if dtype == "float32" else 2
    moved = (2**28 + 2**14) * item
    expected = waits / 1830 + moved / min(bytes_per_us, 3350e3 * 0.88)
    assert _us(Signature("aten.sum.dim_IntList", (x,), (out,), (("dim", (dim,)),))) == pytest.approx(expected)


def test_a_small_sum_comes_from_the_cache(meta: Meta) -> None:
    """2^20 halves fit half of the L2: read at twice the memory's rate."""
    x, out = meta((2**10, 2**10)), meta((2**10,))
    us = _us(Signature("aten.sum.dim_IntList", (x,), (out,), (("dim", (-1,)),)))
    assert us == pytest.approx(7500 / 1830 + (2**20 + 2**10) * 2 / (2 * 3350e3 * 0.88))


def test_a_channel_is_one_blocks_work(meta: Meta) -> None:
    """64 channels of 125,440 elements in 245 turns of 512, 0.58 us each and 16 us more; 1.56 and 5.5 backwards."""
    x = meta((10, 64, 112, 112))
    forward = Signature("aten.native_batch_norm.default", (x,), (x,))
    backward = Signature("aten.native_batch_norm_backward.default", (x, x), (x,))
    assert _us(forward, "mi300x") == pytest.approx(16 + 245 * 0.58)
    assert _us(backward, "mi300x") == pytest.approx(5.5 + 245 * 1.56)


def test_a_library_shares_a_channel_among_blocks(meta: Meta) -> None:
    """CuDNN's batch norm is bound by bandwidth: its statistics read once more."""
    x = meta((64, 64, 112, 112), "float16")
    us = _us(Signature("aten.cudnn_batch_norm.default", (x,), (x,)))
    assert us == pytest.approx(2.6 + 3 * 2 * 64 * 64 * 112**2 / (3350e3 * 0.88))


def test_known_statistics_leave_two_passes(meta: Meta) -> None:
    """A batch norm that does not train reads and writes every element once, in any type."""
    x = meta((64, 64, 112, 112))
    us = _us(Signature("aten.native_batch_norm.default", (x,), (x,), (("training", False),)))
    assert us == pytest.approx(2.6 + 2 * 2 * 64 * 64 * 112**2 / (3350e3 * 0.88))


@pytest.mark.parametrize(("rows", "share"), [(32, 0.5), (50000, 1 / 50000)])
def test_one_thread_adds_up_the_sums_of_a_row(meta: Meta, rows: int, share: float) -> None:
    """A million indices: half of them name one of 32 rows, or each of 50,000 rows has as many."""
    gradient, indices, table = meta((2**20, 16), "float32"), meta((2**20,), "int64"), meta((rows, 16), "float32")
    us = _us(Signature("aten.embedding_dense_backward.default", (gradient, indices), (table,)))
    traffic = (rows * 64 + 3 * 2**26) / (3350e3 * 0.88)
    assert us == pytest.approx(2.6 + traffic + 60 + 2**20 * share / 10 * 0.12)


def test_a_copy_from_unpinned_memory_is_staged(meta: Meta) -> None:
    """64 KiB at once, the rest at 36 % of the link; 80 % of it if it does not block, which only pinned memory can keep."""
    device, host = meta((2**28,), "float32"), meta((2**28,), "float32", "cpu")
    staged = Signature("aten._to_copy.default", (host,), (device,))
    pinned = Signature("aten._to_copy.default", (host,), (device,), (("non_blocking", True),))
    at_once = 2**16 / (63e3 * 0.8)
    assert _us(staged) == pytest.approx(3.4 + at_once + (2**30 - 2**16) / (63e3 * 0.36))
    assert _us(pinned) == pytest.approx(2.2 + 2**30 / (63e3 * 0.8))


def test_reading_one_number_is_a_small_copy(meta: Meta) -> None:
    """As long as a copy to unpinned memory takes to start."""
    assert _us(Signature("aten._local_scalar_dense.default", (meta((), "float32"),), ())) == pytest.approx(3.4)


def test_other_operators_and_processors_are_left_to_others(meta: Meta) -> None:
    """A product is not answered, nor is anything on a CPU."""
    x = meta((64, 64))
    total = Signature("aten.sum.default", (x,), (meta(()),))
    assert Latencies(H100).estimate([Signature("aten.mm.default", (x, x), (x,))]) == [None]
    assert Latencies(H100).estimate([total]) != [None]
    assert Latencies(MI300X).estimate([total]) != [None]

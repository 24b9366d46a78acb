"""Operators on AMD's GPUs: figures worked out by hand for an MI300X of 304 units at 2,100 MHz and 5,300 GB/s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autosac.estimator import load_hardware, rocm
from autosac.estimator.hardware import Hardware
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
MI300X = load_hardware("mi300x")
STREAM, ISSUE = 0.9 * 5300e3, 304 * 2100  # bytes, and one element a cycle and unit, in a microsecond


def _us(signature: Signature, hardware: Hardware = MI300X) -> float:
    (answer,) = rocm.Rocm(hardware).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def test_one_wave_of_tiles(mm: Callable[..., Signature]) -> None:
    """[16*256, 19*256] has 304 tiles of 256 x 256 for 304 units; 79 % of writing the result lies beside it."""
    rate = 1307e6 / 304 * 0.614 * 256**2 / (256**2 + 40 * 512)
    written = 4096 * 4864 * 2 / STREAM
    assert _us(mm(4096, 4864, 8192)) == pytest.approx(4.7 + 2.0 + 2 * 256**2 * 8192 / rate + 0.79 * written)


def test_further_waves_begin_beside_the_ones_before(mm: Callable[..., Signature]) -> None:
    """[16*256, 38*256] has 608 tiles: two waves, of which the second begins in 0.45 us."""
    rate = 1307e6 / 304 * 0.614 * 256**2 / (256**2 + 40 * 512)
    written = 4096 * 9728 * 2 / STREAM
    expected = 4.7 + 2.0 + 0.45 + 2 * 2 * 256**2 * 8192 / rate + 0.79 * written
    assert _us(mm(4096, 9728, 8192)) == pytest.approx(expected)


def test_one_tile_is_split_along_k(mm: Callable[..., Signature]) -> None:
    """One tile of 16 x 16 with k = 4,096 in 16 parts of 256, which another kernel adds."""
    rate = 1307e6 / 304 * 0.614 * 256 / (256 + 40 * 32)
    part = 2.0 + 2 * 256 * 256 / rate
    added = 2.0 + 17 * 256 * 4 / STREAM
    assert _us(mm(16, 16, 4096)) == pytest.approx(4.7 + part + added + 0.79 * 512 / STREAM)


def test_few_rows_read_their_weights_slowly(mm: Callable[..., Signature]) -> None:
    """Two rows times a matrix of 512 MiB: its bytes at 60 % of the rate that many rows reach."""
    read, written = (2 + 16384) * 16384 * 2, 2 * 16384 * 2
    assert _us(mm(2, 16384, 16384)) == pytest.approx(4.7 + read / (0.6 * STREAM) + 1.79 * written / STREAM)


def test_rows_of_odd_length_take_twice_as_long(meta: Meta) -> None:
    """Scores of 4,097 keys times values: the scores' rows begin at every second byte."""

    def product(keys: int) -> Signature:
        inputs = (meta((64, 4096, keys)), meta((64, keys, 64)))
        return Signature("aten.bmm.default", inputs, (meta((64, 4096, 64)),))

    fixed = 4.7 + 0.79 * 64 * 4096 * 64 * 2 / STREAM
    assert _us(product(4097)) - fixed == pytest.approx(2 * (_us(product(4096)) - fixed), rel=2e-3)


@pytest.mark.parametrize(("name", "cycles"), [("relu", 0.0), ("silu", 0.83), ("tanh", 1.78)])
def test_functions_take_their_traffic_or_their_cycles(meta: Meta, name: str, cycles: float) -> None:
    """2^28 elements in 16 bits: 4 bytes each, or as many cycles."""
    x = meta((2**28,))
    us = _us(Signature(f"aten.{name}.default", (x,), (x,)))
    assert us == pytest.approx(2.3 + max(2**30 / STREAM, 2**28 * cycles / ISSUE))


def test_small_kernels_take_the_shortest_time(meta: Meta) -> None:
    """Sixteen elements are added in the time of any small kernel."""
    x = meta((16,))
    assert _us(Signature("aten.add.Tensor", (x, x), (x,))) == pytest.approx(4.4)


def test_addresses_take_cycles(meta: Meta) -> None:
    """A copy of every second column takes 0.68 cycles an element, a transposed one 4.9; a sum with one more 1.02."""
    out = meta((4096, 4096))
    gaps, turned = TensorMeta((4096, 4096), (8192, 1), "bfloat16"), TensorMeta((4096, 4096), (1, 4096), "bfloat16")
    assert _us(Signature("aten.clone.default", (gaps,), (out,))) == pytest.approx(5.8 + 2**24 * 0.68 / ISSUE)
    assert _us(Signature("aten.clone.default", (turned,), (out,))) == pytest.approx(5.8 + 2**24 * 4.9 / ISSUE)
    assert _us(Signature("aten.add.Tensor", (gaps, out), (out,))) == pytest.approx(5.8 + 2**24 * 1.02 / ISSUE)


@pytest.mark.parametrize(
    ("stride", "cycles"), [((8192 * 1024, 1024, 1), 0.68), ((2**24, 2048, 1), 1.5), ((2**23, 1, 8192), 3.3)]
)
def test_concatenations_walk_by_their_longest_tensor(meta: Meta, stride: tuple[int, ...], cycles: float) -> None:
    """One row and 8,192 others: contiguous, with gaps, or transposed."""
    rows = TensorMeta((1, 8192, 1024), stride, "bfloat16")
    out = meta((1, 8193, 1024))
    us = _us(Signature("aten.cat.default", (meta((1, 1, 1024)), rows), (out,), (("dim", 1),)))
    elements = 8193 * 1024
    assert us == pytest.approx(5.8 + max(4 * elements / STREAM, elements * cycles / ISSUE), rel=1e-3)


def test_rows_of_a_softmax(meta: Meta) -> None:
    """Rows of 1,024 take traffic at 83 % of the rate, longer ones 2.1 cycles an element; tiny rows 15 cycles each."""
    short, long, tiny = meta((2**18, 1024)), meta((2**17, 2048)), meta((2**20, 8))

    def softmax(x: TensorMeta) -> float:
        return _us(Signature("aten._softmax.default", (x,), (x,), (("dim", -1),)))

    assert softmax(short) == pytest.approx(2.3 + 2**30 / STREAM / 0.83)
    assert softmax(long) == pytest.approx(5.8 + 2**28 * 2.1 / ISSUE)
    assert softmax(tiny) == pytest.approx(5.8 + 2**20 * 15 / ISSUE)


def test_layer_norms_stream_slowly_or_wait_for_one_row(meta: Meta) -> None:
    """1.4 TB/s over many rows; one row of 1 MiB in one block, whose gradient reads it three times."""
    x, weight = meta((2**16, 1024)), meta((1024,))
    many = Signature("aten.native_layer_norm.default", (x, weight, weight), (x,), (("normalized_shape", (1024,)),))
    assert _us(many) == pytest.approx(5.0 + 2**28 / (0.264 * 5300e3), rel=1e-3)
    row = meta((1, 2**18), "float32")
    one = Signature("aten.native_layer_norm.default", (row,), (row,), (("normalized_shape", (2**18,)),))
    assert _us(one) == pytest.approx(5.0 + 2**20 / 8900)
    back = "aten.native_layer_norm_backward.default"
    gradient = Signature(back, (row, row), (row,), (("normalized_shape", (2**18,)),))
    assert _us(gradient) == pytest.approx(6.0 + 3 * 2**20 / 8900)
    rms = Signature("aten._fused_rms_norm.default", (x, weight), (x,), (("normalized_shape", (1024,)),))
    assert _us(rms) == pytest.approx(6.0 + 2**28 / (0.264 * 5300e3), rel=1e-3)


def test_batch_norms_in_bfloat16_have_a_model_of_their_own(meta: Meta) -> None:
    """They are left to the walk of one block for each channel; those in float32 take six microseconds for each kernel."""

    def norm(dtype: str) -> Signature:
        return Signature(
            "aten.native_batch_norm.default", (meta((8, 16, 32, 32), dtype),), (meta((8, 16, 32, 32), dtype),)
        )

    assert rocm.Rocm(MI300X).estimate([norm("bfloat16")]) == [None]
    assert _us(norm("float32")) >= 18.0


def test_sums_wait_for_the_block_of_a_row(meta: Meta) -> None:
    """15 rows of 151,936: their traffic, and one block for each; the sum of all has blocks enough."""
    x, sums = meta((15, 151_936), "float32"), meta((15,), "float32")
    traffic = 15 * (151_936 + 1) * 4 / STREAM
    rows = Signature("aten.sum.dim_IntList", (x,), (sums,), (("dim", (1,)),))
    assert _us(rows) == pytest.approx(5.5 + traffic + 151_936 * 4 / 8900)
    whole = Signature("aten.sum.default", (x,), (meta((), "float32"),))
    assert _us(whole) == pytest.approx(5.5 + traffic, rel=1e-4)


def test_rows_are_looked_up_by_blocks(meta: Meta) -> None:
    """8,192 rows of 1,024: 250 cycles each and 0.6 an element."""
    inputs = (meta((50_000, 1024)), meta((8192,), "int64"))
    us = _us(Signature("aten.embedding.default", inputs, (meta((8192, 1024)),)))
    assert us == pytest.approx(5.0 + 8192 * (250 + 0.6 * 1024) / ISSUE)


def _attention(meta: Meta, heads: int, length: int, size: int, causal: bool) -> Signature:
    q = meta((1, heads, length, size))
    arguments = (("dropout_p", 0.0), ("is_causal", causal))
    return Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), (q,), arguments)


def test_attention_walks_its_keys(meta: Meta) -> None:
    """76 heads of 4,096: four waves of 64 steps; half of them and the diagonal's with a causal mask; few blocks are one."""
    waves = 76 * 32 / 608
    assert _us(_attention(meta, 76, 4096, 64, causal=False)) == pytest.approx(2.3 + waves * (10 + 64 * 3.9))
    assert _us(_attention(meta, 76, 4096, 64, causal=True)) == pytest.approx(2.3 + waves * (10 + 33 * 3.9))
    assert _us(_attention(meta, 1, 128, 256, causal=False)) == pytest.approx(2.3 + 10 + 2 * 3.9 * 2)


def test_what_is_not_known(mm: Callable[..., Signature], meta: Meta) -> None:
    """Other vendors' GPUs, wider products, lists and copies to the host are left to other models."""
    x = meta((64, 64), "float32")
    host = meta((64, 64), "float32", "host")
    assert rocm.Rocm(load_hardware("h100-sxm-80gb")).estimate([mm(64, 64, 64)]) == [None]
    others = [
        mm(64, 64, 64, "float32"),
        Signature("aten._foreach_add_.List", (x, x), (), mutates=(0,)),
        Signature("aten._to_copy.default", (x,), (host,)),
        Signature("aten.convolution.default", (x, x), (x,)),
    ]
    assert rocm.Rocm(MI300X).estimate(others) == [None] * 4


def test_memory_bound_kernels_of_older_gpus_are_left_to_their_profiles(
    meta: Meta, mm: Callable[..., Signature]
) -> None:
    """An MI210 has its own shares of the peak for them; its products and softmaxes are priced by these rules."""
    x = meta((4096, 1024))
    model = rocm.Rocm(load_hardware("mi210"))
    add, softmax = (
        Signature("aten.add.Tensor", (x, x), (x,)),
        Signature("aten._softmax.default", (x,), (x,), (("dim", 1),)),
    )
    assert [answer is None for answer in model.estimate([add, softmax, mm(64, 64, 64)])] == [True, False, False]
    assert _us(softmax, load_hardware("mi210")) == pytest.approx(2.3 + 2**24 / (0.73 * 1638.4e3) / 0.83, rel=1e-2)


def test_another_gpu_of_amd_scales_the_rates(meta: Meta) -> None:
    """Half of the units issue half of the elements; the source says whose measurements they are."""
    half = replace(MI300X, name="half", sm_count=152)
    x = meta((2**28,))
    tanh = Signature("aten.tanh.default", (x,), (x,))
    assert _us(tanh, half) - 2.3 == pytest.approx(2 * (_us(tanh) - 2.3))
    (answer,) = rocm.Rocm(half).estimate([tanh])
    assert answer is not None
    assert answer.source == "rocm:elementwise@mi300x"

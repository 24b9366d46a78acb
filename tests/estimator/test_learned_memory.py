"""The fitted model of kernels that memory binds: segments, slowdowns, how a kernel walks its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator import LearnedMemory, load_hardware
from autosac.estimator.memory_bound import Slowdown, row_bytes
from autosac.estimator.sectors import overfetched_bytes
from autosac.estimator.streamed import Streamed
from autosac.estimator.walks import access
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")
START_MS = 0.003  # of a product that is not timed back to back
LEARNED = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"]
Meta = Callable[..., TensorMeta]


def test_traffic_by_hand() -> None:
    """1 MB comes from the L2 (18 bytes a cycle from each of 132 processors), 1 GB from memory (89.5 % of 3,350 GB/s)."""
    small, large = Streamed(hardware=H100).milliseconds(np.array([1e6, 1e9]))
    assert small == pytest.approx(0.0026 + 1e6 / (18 * 132 * 1830e3))
    assert large == pytest.approx(0.0026 + 1e9 / (0.895 * 3350e6))


def test_between_cache_and_memory_the_share_of_hits_falls_with_the_logarithm() -> None:
    """All hits at 0.68 of the L2, none at 1.66 times, half of them at the geometric mean; none at all without a warm cache."""
    sizes = np.array([0.68, math.sqrt(0.68 * 1.66), 1.66]) * H100.l2_bytes
    assert Streamed(hardware=H100).cached(sizes) == pytest.approx([1.0, 0.5, 0.0])
    assert Streamed(hardware=H100, warm=False).cached(sizes) == pytest.approx([0.0, 0.0, 0.0])


def test_traffic_scales_with_bandwidth_only_where_it_leaves_the_cache() -> None:
    """With 4,000 of 3,350 GB/s 1 MB takes as long and 1 GB less; the L2 is never slower than the memory."""
    gpus = [replace(H100, mem_bandwidth_gbps=gbps) for gbps in (3350.0, 4000.0, 6000.0)]
    same, faster, fastest = (Streamed(hardware=gpu).traffic_ms(np.array([1e6, 1e9])) for gpu in gpus)
    assert faster[0] == pytest.approx(same[0])
    assert faster[1] == pytest.approx(same[1] * 3350 / 4000)
    assert fastest[0] == pytest.approx(fastest[1] / 1000)


def test_slowdown_by_hand() -> None:
    """Rows of 32 KiB are two octaves above 8 KiB; of 512 bytes two below 2 KiB; of 128 KiB one above 64 KiB."""
    slowdown = Slowdown(constant=0.0, per_octave=0.1, long_row=0.5, short_row=0.3)
    assert math.log(slowdown.factor(32768)) == pytest.approx(0.2)
    assert math.log(slowdown.factor(512)) == pytest.approx(0.6)
    assert math.log(slowdown.factor(131072)) == pytest.approx(0.3 + 0.5)
    assert slowdown.factor(0) == 1.0


def test_how_a_kernel_walks_its_memory(meta: Meta) -> None:
    """Vectorised if layouts agree, strided if one is transposed or sliced, broadcast or assembled if smaller, converted
    if it has fewer bits.
    """
    x = meta((64, 32), "float32")
    across = TensorMeta((64, 32), (1, 64), "float32")
    sliced = TensorMeta((64, 32), (64, 1), "float32")
    row = meta((32,), "float32")
    expanded = TensorMeta((64, 32), (0, 1), "float32")
    table = meta((1, 32), "complex64")
    scalar = meta((), "float32", "cpu")
    cases = [(x, "elementwise"), (across, "strided"), (sliced, "strided"), (row, "broadcast"), (expanded, "broadcast")]
    cases += [(meta((64, 32), "bfloat16"), "converted"), (table, "strided"), (scalar, "elementwise")]
    for other, expected in cases:
        assert access(Signature("aten.mul.Tensor", (x, other), (x,))) == expected
    down = Signature("aten._to_copy.default", (x,), (meta((64, 32), "bfloat16"),))
    assert access(down) == "elementwise"  # vectorised since 2024, unlike the other direction
    assert access(Signature("aten.cat.default", (x, x), (meta((128, 32), "float32"),))) == "assembled"
    assert access(Signature("aten.constant_pad_nd.default", (x,), (meta((64, 40), "float32"),))) == "assembled"


def test_single_elements_are_broadcast_and_numbers_are_not(meta: Meta) -> None:
    """A tensor of one element is repeated, unless the result has one too; a number has no dimension and a wide type."""
    x, scalar, number = meta((64, 32), "float32"), meta((), "float32"), meta((), "float64")
    for other in (scalar, meta((1,), "float32"), meta((1, 1), "bfloat16")):
        assert access(Signature("aten.mul.Tensor", (x, other), (x,))) == "broadcast"
    assert access(Signature("aten.mul.Tensor", (x, number), (x,))) == "elementwise"
    assert access(Signature("aten.add.Tensor", (scalar, scalar), (scalar,))) == "elementwise"


def test_kernels_that_change_types_are_not_vectorised(meta: Meta) -> None:
    """Inputs of two types, and copies between integers or to a wider type; comparisons have no type to change."""
    half, full, whole = (meta((64, 32), dtype) for dtype in ("bfloat16", "float32", "int64"))
    assert access(Signature("aten.add_.Tensor", (half, full), (half,))) == "converted"
    assert access(Signature("aten._to_copy.default", (whole,), (full,))) == "converted"
    assert access(Signature("aten._to_copy.default", (full,), (half,))) == "elementwise"
    assert access(Signature("aten.gt.Tensor", (whole, whole), (meta((64, 32), "bool"),))) == "elementwise"


def walked_ms(elements: float, cycles: float, nbytes: float) -> float:
    """A kernel on an H100 that is not vectorised and moves more than its L2: see `walks.py`."""
    walk, traffic = elements * cycles / (132 * 1830e3), nbytes / (0.895 * 3350e6)
    return 0.0026 + 1850 / 1830e3 + float((walk**2.2 + traffic**2.2) ** (1 / 2.2))


def test_addresses_cost_a_start_and_divisions(meta: Meta) -> None:
    """1,850 cycles more than a vectorised kernel's start; 0.043 cycles for the third and for the fourth dimension; half of the
    traffic is loads, which wait 0.13 cycles.
    """
    tiny, small = meta((4, 4), "float32"), TensorMeta((4, 4), (1, 4), "float32")
    plain, across = LearnedMemory(H100).estimate([Signature("aten.neg.default", (m,), (tiny,)) for m in (tiny, small)])
    assert plain is not None and across is not None
    assert across.ms - plain.ms == pytest.approx(1850 / 1830e3, rel=0.01)
    out = meta((64, 16, 512, 64))
    rows = TensorMeta((64, 16, 512, 64), (524288, 64, 1024, 1), "bfloat16")  # heads beside positions: four dimensions
    (answer,) = LearnedMemory(H100).estimate([Signature("aten.clone.default", (rows,), (out,))])
    assert answer is not None
    assert answer.ms == pytest.approx(walked_ms(2**25, 0.484 + 2 * 0.043 + 0.13 / 2, 2**27))


def test_a_walk_across_sectors_is_bound_by_loads(meta: Meta) -> None:
    """A transposed copy: 1.78 cycles an element. Turns of 40 elements use half of the sectors again."""
    across, x = TensorMeta((4096, 8192), (1, 4096), "bfloat16"), meta((4096, 8192))
    short, y = TensorMeta((2**17, 32, 40), (1280, 1, 32), "bfloat16"), meta((2**17, 32, 40))
    answers = LearnedMemory(H100).estimate(
        [Signature("aten.clone.default", (a,), (b,)) for a, b in ((across, x), (short, y))]
    )
    assert answers[0] is not None and answers[1] is not None
    moved = 2**27 + overfetched_bytes(Signature("aten.clone.default", (across,), (x,)), H100.l2_bytes)
    assert answers[0].ms == pytest.approx(walked_ms(2**25, 1.78, moved))
    assert answers[1].ms == pytest.approx(walked_ms(2**22 * 40, 1.78 / 2, 2**24 * 40))


def test_operands_of_several_types_cost_a_cast_if_one_is_repeated(meta: Meta) -> None:
    """0.40 cycles an element for bfloat16 times a float32 row; a mask of truth values is not cast."""
    x, row, mask = meta((2**14, 2**12)), meta((2**12,), "float32"), meta((2**14, 1), "bool")
    product, masked = LearnedMemory(H100).estimate(
        [
            Signature("aten.mul.Tensor", (x, row), (meta((2**14, 2**12), "float32"),)),
            Signature("aten.masked_fill_.Scalar", (x, mask), (x,), mutates=(0,)),
        ]
    )
    assert product is not None and masked is not None
    loaded = 2 / 6  # of the traffic, but for the row
    assert product.ms == pytest.approx(walked_ms(2**26, 0.484 + 0.014 + 0.40 + 0.13 * loaded, 6 * 2**26), rel=1e-3)
    assert masked.ms == pytest.approx(walked_ms(2**26, 0.484 + 0.014 + 0.13 / 2, 4 * 2**26), rel=1e-3)


def test_masking_copies_and_padding_nothing_clones(meta: Meta) -> None:
    """`masked_fill` is a copy and `masked_fill_`; a tensor that is padded by nothing is cloned, otherwise filled before."""
    x, mask, wide = meta((2**14, 2**12)), meta((2**14, 1), "bool"), meta((2**14, 2**12 + 64))
    signatures = [
        Signature("aten.masked_fill.Scalar", (x, mask), (x,)),
        Signature("aten.masked_fill_.Scalar", (x, mask), (x,), mutates=(0,)),
        Signature("aten.clone.default", (x,), (x,)),
        Signature("aten.constant_pad_nd.default", (x,), (x,), (("pad", (0, 0)),)),
        Signature("aten.constant_pad_nd.default", (x,), (wide,), (("pad", (0, 64)),)),
    ]
    masked, in_place, copy, unpadded, padded = (a.ms for a in LearnedMemory(H100).estimate(signatures) if a is not None)
    assert masked == pytest.approx(in_place + copy)
    assert unpadded == copy
    assert padded > 1.4 * copy


def test_a_starved_processor_is_not_slowed_down_by_itself(meta: Meta) -> None:
    """Norms take 1.48 times an elementwise kernel's time on an H100. An RTX 4090's memory offers a processor 22 % of the bytes
    in a cycle: there both take the same time.
    """
    x = meta((8192, 4096), "float32")
    norm = Signature("aten.native_layer_norm.default", (x,), (x,), (("normalized_shape", (4096,)),))
    for gpu, expected in (("h100-sxm-80gb", math.exp(0.2954 + 0.0999)), ("rtx-4090", 1.0)):
        times = LearnedMemory(load_hardware(gpu)).estimate([norm, Signature("aten.clone.default", (x,), (x,))])
        assert times[0] is not None and times[1] is not None
        assert times[0].ms == pytest.approx(expected * times[1].ms)


@pytest.mark.parametrize(
    ("name", "row", "dtype", "factor"),
    [
        ("_softmax", 1024, "float32", 1.0),  # in registers
        ("_softmax", 2048, "float32", math.exp(0.12)),  # in shared memory
        ("_softmax", 2050, "float32", math.exp(0.72)),  # begins between two multiples of 16 bytes: read three times
        ("_softmax", 2050, "bfloat16", math.exp(1.25)),  # and by halves of a word
        ("_log_softmax", 65536, "float32", math.exp(0.72)),  # too long for shared memory
        (
            "_log_softmax_backward_data",
            65536,
            "float32",
            1.5 * math.exp(0.3),
        ),  # three tensors, of which one is read twice
        ("_softmax_backward_data", 1024, "float32", 3.0),  # three tensors, and a product of two before
    ],
)
def test_softmax_has_three_regimes(meta: Meta, name: str, row: int, dtype: str, factor: float) -> None:
    """Time relative to an elementwise kernel that reads and writes as many rows, far beyond the L2."""
    x = meta((2**30 // row, row), dtype)
    inputs = (x, x) if "backward" in name else (x,)
    copy, softmax = LearnedMemory(H100).estimate(
        [
            Signature("aten.neg.default", (x,), (x,)),
            Signature(f"aten.{name}.default", inputs, (x,), (("dim", -1),)),
        ]
    )
    assert copy is not None and softmax is not None
    assert softmax.ms == pytest.approx(factor * copy.ms, rel=2e-3)  # one start, whatever the passes
    assert softmax.source == "learned:softmax"


def test_a_stride_fetches_whole_sectors_again_if_the_cache_has_lost_them(meta: Meta) -> None:
    """The heads of a [16, 2048, 2048] bias in float32 are its fastest dimension: neighbours are 64 bytes apart, and 2048^2
    sectors lie between two heads, more than half of the L2 of an H100. With a plane of 256^2 they stay there.
    """
    for length, extra in ((2048, 15), (256, 0)):
        scores = meta((16, length, length), "float32")
        bias = TensorMeta(scores.shape, (1, 16 * length, 16), "float32")
        add = Signature("aten.add_.Tensor", (scores, bias), (scores,), mutates=(0,))
        assert overfetched_bytes(add, H100.l2_bytes) == extra * 4 * 16 * length**2
    assert overfetched_bytes(Signature("aten.add.Tensor", (scores, scores), (scores,)), H100.l2_bytes) == 0


def test_rows_of_norms_and_softmax(meta: Meta) -> None:
    """The normalised shape, or the dimension that the softmax runs over, in bytes."""
    x = meta((8, 64, 128), "float32")
    norm = Signature("aten.native_layer_norm.default", (x,), (x,), (("normalized_shape", (64, 128)),))
    softmax = Signature("aten._softmax.default", (x,), (x,), (("dim", 1),))
    assert row_bytes(norm) == 64 * 128 * 4
    assert row_bytes(softmax) == 64 * 4


def test_scalars_have_no_rows(meta: Meta) -> None:
    """A softmax of a 0-dimensional tensor, over its only dimension or its last one, and an operator without inputs."""
    scalar = meta((), "float32")
    for dim in (0, -1):
        assert row_bytes(Signature("aten._softmax.default", (scalar,), (scalar,), (("dim", dim),))) == 0.0
    assert row_bytes(Signature("aten._softmax.default", (), (scalar,))) == 0.0
    assert row_bytes(Signature("aten._softmax.default", (meta((8,), "float32"),), (), (("dim", 1),))) == 8 * 4


def test_a_large_addition_runs_near_the_memory_bandwidth(meta: Meta) -> None:
    """3 GiB at 85 to 95 % of 3350 GB/s; the same with a transposed operand takes longer."""
    x, flipped = meta((2**14, 2**14), "float32"), TensorMeta((2**14, 2**14), (1, 2**14), "float32")
    plain, strided = LearnedMemory(H100).estimate(
        [Signature("aten.add.Tensor", (x, x), (x,)), Signature("aten.add.Tensor", (x, flipped), (x,))]
    )
    assert plain is not None and strided is not None
    assert 0.85 < 3 * 2**30 / 3350e6 / plain.ms < 0.95
    assert strided.ms > plain.ms
    assert (plain.source, strided.source) == ("learned:elementwise", "learned:strided")


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 2**28), more=st.integers(0, 2**26), gpu=st.sampled_from(LEARNED))
def test_more_bytes_never_take_less_time(meta: Meta, size: int, more: int, gpu: str) -> None:
    """Elementwise kernels and softmaxes of fixed rows are monotone."""
    signatures: Sequence[Signature] = [
        Signature("aten.relu.default", (meta((n,)),), (meta((n,)),)) for n in (size, size + more)
    ]
    small, large = LearnedMemory(load_hardware(gpu)).estimate(signatures)
    assert small is not None and large is not None
    assert 0 < small.ms <= large.ms


def test_other_vendors_and_other_families_are_left_to_the_roofline(meta: Meta) -> None:
    """AMD's kernels were not measured, nor were sorts, nor copies to the host."""
    x = meta((1024,), "float32")
    host = meta((1024,), "float32", "cpu")
    relu = Signature("aten.relu.default", (x,), (x,))
    others = [Signature("aten.sort.default", (x,), (x,)), Signature("aten._to_copy.default", (x,), (host,))]
    assert LearnedMemory(load_hardware("mi300x")).estimate([relu]) == [None]
    assert LearnedMemory(H100).estimate(others) == [None, None]

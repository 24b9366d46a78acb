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
from autosac.estimator.memory_bound import ScaledSegments, Segments, Slowdown, access, row_bytes
from autosac.estimator.sectors import overfetched_bytes
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")
START_MS = 0.003  # of a product that is not timed back to back
LEARNED = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"]
Meta = Callable[..., TensorMeta]


def test_three_segments_by_hand() -> None:
    """Knots at 1 and 16 MB, 1000 GB/s: 16 us at 16 MB, a quarter of that at 1 MB (slope 1/2), flat below."""
    segments = Segments(slope1=0.0, slope2=0.5, knot1_bytes=1e6, knot2_bytes=16e6, bandwidth_gbps=1000.0)
    times = segments.milliseconds(np.array([1e3, 1e6, 4e6, 16e6, 64e6]))
    assert times == pytest.approx([0.004, 0.004, 0.008, 0.016, 0.064])


def test_segments_scale_with_cache_and_bandwidth() -> None:
    """An H200 has the same cache and processors and 4800/3350 of the bandwidth: only large kernels are faster, by that."""
    segments = Segments(slope1=0.1, slope2=0.5, knot1_bytes=1e6, knot2_bytes=16e6, bandwidth_gbps=3350.0)
    h200 = replace(load_hardware("h200-sxm-141gb"), boost_mhz=H100.boost_mhz)
    same, faster = (ScaledSegments(segments=segments, source=H100, target=gpu) for gpu in (H100, h200))
    sizes = np.array([1.0, 5e5, 1e9])
    assert same.milliseconds(sizes) == pytest.approx(np.maximum(segments.milliseconds(sizes), 0.0026))
    assert faster.milliseconds(sizes[:2]) == pytest.approx(same.milliseconds(sizes[:2]))
    assert faster.milliseconds(sizes[2:])[0] == pytest.approx(1e9 / 4800e6)


def test_small_kernels_follow_the_clock() -> None:
    """With half the clock, what 1 MB takes beyond the shortest kernel (16 us / 4 - 2.6 us) doubles."""
    segments = Segments(slope1=0.0, slope2=0.5, knot1_bytes=1e6, knot2_bytes=16e6, bandwidth_gbps=1000.0)
    slow = replace(H100, boost_mhz=H100.boost_mhz / 2, kernel_us=3.0)
    scaled = ScaledSegments(segments=segments, source=H100, target=slow)
    assert scaled.milliseconds(np.array([1e6]))[0] == pytest.approx(0.003 + 2 * (0.004 - 0.0026))
    assert scaled.milliseconds(np.array([16e6]))[0] == pytest.approx(0.016)


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


def test_addresses_cost_a_start_and_divisions(meta: Meta) -> None:
    """1,850 cycles more than a vectorised kernel's start, and 8 % of an element's issue for the third and fourth dimension."""
    tiny, small = meta((4, 4), "float32"), TensorMeta((4, 4), (1, 4), "float32")
    plain, across = LearnedMemory(H100).estimate([Signature("aten.neg.default", (m,), (tiny,)) for m in (tiny, small)])
    assert plain is not None and across is not None
    assert across.ms - plain.ms == pytest.approx(1850 / 1830e3)
    out = meta((64, 16, 512, 64))
    rows = TensorMeta((64, 16, 512, 64), (524288, 64, 1024, 1), "bfloat16")  # heads beside positions: four dimensions
    issued = math.prod(out.shape) / (1.5 * 132 * 1830e3)
    (answer,) = LearnedMemory(H100).estimate([Signature("aten.clone.default", (rows,), (out,))])
    assert answer is not None
    assert answer.ms == pytest.approx(1850 / 1830e3 + issued * 1.16)


def test_a_walk_across_sectors_is_bound_by_loads(meta: Meta) -> None:
    """A transposed copy: 0.52 elements a cycle and processor. Turns of 40 elements use half of the sectors again."""
    across, x = TensorMeta((4096, 2048), (1, 4096), "bfloat16"), meta((4096, 2048))
    short, y = TensorMeta((2**17, 32, 40), (1280, 1, 32), "bfloat16"), meta((2**17, 32, 40))
    answers = LearnedMemory(H100).estimate(
        [Signature("aten.clone.default", (a,), (b,)) for a, b in ((across, x), (short, y))]
    )
    late, cycle = 1850 / 1830e3, 132 * 1830e3
    assert answers[0] is not None and answers[1] is not None
    assert answers[0].ms == pytest.approx(late + 2**23 / (0.52 * cycle))
    assert answers[1].ms == pytest.approx(late + 2**22 * 40 / (0.52 / 0.5 * cycle))


def test_a_starved_processor_is_not_slowed_down_by_itself(meta: Meta) -> None:
    """Norms take 1.43 times an elementwise kernel's time on an H100. An RTX 4090's memory offers a processor 22 % of the bytes
    in a cycle: there both take the same time. A stride costs on both.
    """
    x, across = meta((8192, 4096), "float32"), TensorMeta((8192, 4096), (8192, 1), "float32")
    norm = Signature("aten.native_layer_norm.default", (x,), (x,), (("normalized_shape", (4096,)),))
    copies = [Signature("aten.clone.default", (source,), (x,)) for source in (x, across)]
    for gpu, expected in (("h100-sxm-80gb", math.exp(0.3549 + 0.0513)), ("rtx-4090", 1.0)):
        hardware = load_hardware(gpu)
        times = [a.ms for a in LearnedMemory(hardware).estimate([norm, *copies]) if a is not None]
        shortest_ms, late_ms = hardware.kernel_us * 1e-3, 1850 / (hardware.boost_mhz * 1e3)
        assert times[0] == pytest.approx(expected * times[1])
        assert times[2] - late_ms - shortest_ms == pytest.approx(math.exp(0.26) * (times[1] - shortest_ms))


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
    assert softmax.ms == pytest.approx(factor * copy.ms)
    assert softmax.source == "learned:softmax"


def test_a_kernel_that_computes_every_address_is_bound_by_what_it_issues(meta: Meta) -> None:
    """2^28 halves times a row, on 132 processors at 1,830 MHz: 1.5 elements a cycle and processor, 1,850 cycles late."""
    x, row = meta((2**16, 2**12)), meta((2**12,))
    (answer,) = LearnedMemory(H100).estimate([Signature("aten.mul.Tensor", (x, row), (x,))])
    assert answer is not None
    assert answer.ms == pytest.approx((2**28 / (1.5 * 132) + 1850) / 1830e3)


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
    """3 GiB at 75 to 95 % of 3350 GB/s; the same with a transposed operand takes longer."""
    x, flipped = meta((2**14, 2**14), "float32"), TensorMeta((2**14, 2**14), (1, 2**14), "float32")
    plain, strided = LearnedMemory(H100).estimate(
        [Signature("aten.add.Tensor", (x, x), (x,)), Signature("aten.add.Tensor", (x, flipped), (x,))]
    )
    assert plain is not None and strided is not None
    assert 0.75 < 3 * 2**30 / 3350e6 / plain.ms < 0.95
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

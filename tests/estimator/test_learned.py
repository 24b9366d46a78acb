"""The fitted operator models: sensible numbers, the right corrections, honest sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator import LearnedAttention, LearnedMatmul, LearnedMemory, load_hardware
from autosac.estimator.attention import accumulation_ms
from autosac.estimator.features import Rates
from autosac.estimator.memory_bound import ScaledSegments, Segments, Slowdown, access, row_bytes
from autosac.estimator.sectors import overfetched_bytes
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")
START_MS = 0.003  # of a product that is not timed back to back
LEARNED = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"]
Meta = Callable[..., TensorMeta]


def _attention(
    meta: Meta, kind: str, length: int, *, backward: bool = False, dropout: float = 0.0, batch: int = 2
) -> Signature:
    q = meta((batch, 16, length, 128))
    name = f"aten._scaled_dot_product_{kind}_attention{'_backward' if backward else ''}.default"
    inputs = (q, q, q, q, q) if backward else (q, q, q)
    return Signature(name, inputs, (q,), (("dropout_p", dropout), ("is_causal", True)))


def _tflops(flops: float, ms: float) -> float:
    return flops / ms * 1e-9


@pytest.mark.parametrize("gpu", LEARNED)
def test_large_products_reach_a_plausible_share_of_the_peak(gpu: str, mm: Callable[..., Signature]) -> None:
    """An 8192^3 bf16 product sustains between 50 and 100 % of the dense peak on every fitted GPU."""
    hardware = load_hardware(gpu)
    (answer,) = LearnedMatmul(hardware).estimate([mm(8192, 8192, 8192)])
    assert answer is not None
    assert 0.5 < 2 * 8192**3 / (answer.ms * 1e-3) / hardware.peak_flops("bfloat16") < 1.0
    assert answer.source == "learned:matmul"
    assert 0 < answer.rel_std < 0.2


def test_layouts_of_the_gradients_cost_more(meta: Meta) -> None:
    """Y = x W^T is the fastest; dx = dy W costs 2 % more, dW = dy^T x 5 % more, for cubes of one size."""
    plain, flipped = meta((4096, 4096)), TensorMeta((4096, 4096), (1, 4096), "bfloat16")
    forward, dgrad, wgrad = (
        Signature("aten.mm.default", operands, (plain,))
        for operands in ((plain, flipped), (plain, plain), (flipped, plain))
    )
    answers = LearnedMatmul(H100).estimate([forward, dgrad, wgrad])
    times = [answer.ms - START_MS for answer in answers if answer is not None]
    assert times == pytest.approx([times[0], 1.02 * times[0], 1.05 * times[0]])


@pytest.mark.parametrize(("gpu", "slower"), [("h100-sxm-80gb", 3.5), ("a100-sxm-80gb", 1.5)])
@pytest.mark.parametrize("which", ["left", "right", "result"])
def test_rows_that_are_not_aligned_cost_the_fast_kernels(meta: Meta, gpu: str, slower: float, which: str) -> None:
    """Rows of 4100 bf16 elements, of either operand or of the result, take 3.5 times as long on Hopper, 1.5 on Ampere."""
    square, padded = meta((4096, 4096)), TensorMeta((4096, 4096), (4100, 1), "bfloat16")
    left, right, out = (padded if name == which else square for name in ("left", "right", "result"))
    signatures = [
        Signature("aten.mm.default", (a, b), (c,)) for a, b, c in ((square, square, square), (left, right, out))
    ]
    aligned, unaligned = LearnedMatmul(load_hardware(gpu)).estimate(signatures)
    assert aligned is not None and unaligned is not None
    start_ms = load_hardware(gpu).kernel_us * 1e-3 + 0.0004
    least_ms = 0.0024  # no kernel takes less, and that much does not grow
    assert unaligned.ms - start_ms - least_ms == pytest.approx(slower * (aligned.ms - start_ms - least_ms))
    assert unaligned.rel_std > aligned.rel_std
    assert (aligned.source, unaligned.source) == ("learned:matmul", "learned:unaligned-matmul")


@pytest.mark.parametrize(("pitch", "slower"), [(4098, 2.75), (4100, 3.5)])
def test_hoppers_unaligned_rows_by_what_they_are_aligned_to(meta: Meta, pitch: int, slower: float) -> None:
    """Multiples of 4 bytes 2.75 times as long, of 8 bytes 3.5: each from its own measurement."""
    square, padded = meta((4096, 4096)), TensorMeta((4096, 4096), (pitch, 1), "bfloat16")
    signatures = [Signature("aten.mm.default", (a, square), (square,)) for a in (square, padded)]
    aligned, unaligned = LearnedMatmul(H100).estimate(signatures)
    assert aligned is not None and unaligned is not None
    least_ms = START_MS + 0.0024
    assert unaligned.ms - least_ms == pytest.approx(slower * (aligned.ms - least_ms))


def test_rows_of_odd_length_reach_a_seventh_of_the_peak(meta: Meta) -> None:
    """13.5 % of the dense rate: elements of two bytes, one at a time."""
    square, odd = meta((8192, 8192)), TensorMeta((8192, 8192), (8193, 1), "bfloat16")
    (answer,) = LearnedMatmul(H100).estimate([Signature("aten.mm.default", (odd, square), (square,))])
    assert answer is not None
    assert answer.ms == pytest.approx(START_MS + 2 * 8192**3 / (0.135 * 989e12) * 1e3)


def test_tf32_is_bf16_with_twice_the_depth(meta: Meta, mm: Callable[..., Signature]) -> None:
    """[m, n, k] in TF32 takes as long as [m, n, 2k] in bf16; plain float32 is not answered. Hopper multiplies it along k only:
    with an operand that is stored across it takes 1.1 or 1.6 times as long.
    """
    single = mm(4096, 4096, 2048, "float32")
    along, across = (TensorMeta((2048, 4096), strides, "float32") for strides in ((1, 2048), (4096, 1)))
    left, flipped = single.inputs[0], TensorMeta((4096, 2048), (1, 4096), "float32")
    layouts = [single._replace(inputs=pair) for pair in ((left, along), (left, across), (flipped, across))]
    answers = LearnedMatmul(H100, tf32=True).estimate(layouts)
    times = [answer.ms - START_MS for answer in answers if answer is not None]
    half = mm(4096, 4096, 4096)
    across_half = half.inputs[1]._replace(stride=(1, 4096))
    (bf16,) = LearnedMatmul(H100).estimate([half._replace(inputs=(half.inputs[0], across_half))])
    assert bf16 is not None
    assert times == pytest.approx([bf16.ms - START_MS, 1.1 * times[0], 1.6 * times[0]])
    assert LearnedMatmul(H100).estimate([single]) == [None]


def test_a_batch_of_products_is_one_product_with_more_rows(meta: Meta, mm: Callable[..., Signature]) -> None:
    """Eight [512, 1024] x [1024, 1024] take as long as one with 4096 rows: compute-bound, the same tiles."""
    batched = Signature("aten.bmm.default", (meta((8, 512, 1024)), meta((8, 1024, 1024))), (meta((8, 512, 1024)),))
    answers = LearnedMatmul(H100).estimate([batched, mm(4096, 1024, 1024)])
    assert answers[0] is not None and answers[1] is not None
    assert answers[0].ms == pytest.approx(answers[1].ms)


def test_efficiency_holds_beyond_the_measured_sizes(mm: Callable[..., Signature]) -> None:
    """Twice the largest measured number of rows takes twice as long, to 1 %."""
    small, large = LearnedMatmul(H100).estimate([mm(32768, 8192, 8192), mm(65536, 8192, 8192)])
    assert small is not None and large is not None
    assert large.ms == pytest.approx(2 * small.ms, rel=0.01)


def test_a_gpu_without_models_borrows_the_nearest_and_says_so(mm: Callable[..., Signature]) -> None:
    """The RTX 4090 uses the L40S's trees with its own rates and a wider error bar; the MI300X has none."""
    (borrowed,) = LearnedMatmul(load_hardware("rtx-4090")).estimate([mm(8192, 8192, 8192)])
    (own,) = LearnedMatmul(load_hardware("l40s")).estimate([mm(8192, 8192, 8192)])
    assert borrowed is not None and own is not None
    assert borrowed.source == "learned:matmul@l40s"
    assert borrowed.rel_std > own.rel_std
    assert LearnedMatmul(load_hardware("mi300x")).estimate([mm(8192, 8192, 8192)]) == [None]


def test_a_capped_part_sustains_less(mm: Callable[..., Signature]) -> None:
    """`sustained = 0.5` doubles the time of a compute-bound product."""
    capped = replace(H100, efficiency=(("sustained", 0.5),))
    (slow,) = LearnedMatmul(capped).estimate([mm(8192, 8192, 8192)])
    (fast,) = LearnedMatmul(H100).estimate([mm(8192, 8192, 8192)])
    assert slow is not None and fast is not None
    assert slow.ms - START_MS == pytest.approx(2 * (fast.ms - START_MS))


def test_promoted_sums_take_longer(meta: Meta) -> None:
    """A product in 8 bits without fast accumulation takes 1.2 times as long on an H100, and as long on a B200."""
    a, b = meta((8192, 8192), "float8_e4m3fn"), TensorMeta((8192, 8192), (1, 8192), "float8_e4m3fn")
    slow = Signature("aten._scaled_mm.default", (a, b), (meta((8192, 8192)),))
    fast = slow._replace(arguments=(("use_fast_accum", True),))
    for gpu, ratio in (("h100-sxm-80gb", 1.2), ("b200-sxm-180gb", 1.0)):
        quick, promoted = LearnedMatmul(load_hardware(gpu)).estimate([fast, slow])
        assert quick is not None and promoted is not None
        assert promoted.ms - START_MS == pytest.approx(ratio * (quick.ms - START_MS))


def test_scales_of_rows_take_another_kernel(meta: Meta) -> None:
    """A scale for each of 8,192 rows makes a product 1.2 times as long; one scale for all, and one for 64 blocks, do not."""
    a, b = meta((8192, 8192), "float8_e4m3fn"), TensorMeta((8192, 8192), (1, 8192), "float8_e4m3fn")
    one, rows, blocks = (meta(shape, "float32") for shape in ((), (8192, 1), (64, 1)))
    products = [
        Signature("aten._scaled_mm.default", (a, b, scale, scale), (meta((8192, 8192)),), (("use_fast_accum", True),))
        for scale in (one, rows, blocks)
    ]
    tensorwise, rowwise, blockwise = (e.ms for e in LearnedMatmul(H100).estimate(products) if e is not None)
    assert rowwise - START_MS == pytest.approx(1.2 * (tensorwise - START_MS))
    assert blockwise == tensorwise


@pytest.mark.parametrize("gpu", LEARNED)
def test_attention_grows_with_the_square_of_the_length(gpu: str, meta: Meta) -> None:
    """From 4096 to 16384 tokens, 16 times the operations take 10 to 18 times as long; the backward 2 to 4 forwards."""
    names = [_attention(meta, "flash", 4096), _attention(meta, "flash", 16384)]
    names.append(_attention(meta, "flash", 16384, backward=True))
    short, long, backward = (a.ms for a in LearnedAttention(load_hardware(gpu)).estimate(names) if a is not None)
    assert 10 < long / short < 18
    assert 2 < backward / long < 4


def test_a_backward_adds_up_its_gradient_in_float32() -> None:
    """257 queries of 80 are laid out as 384 of 96: 14 bytes for each of 2 x 3 heads, at 0.88 of 1 TB/s, in milliseconds."""
    rates = Rates(sm_count=1, flops=1.0, bandwidth=1e12, l2_bytes=1.0)
    (ms,) = accumulation_ms(np.array([[2.0, 3.0, 3.0, 257.0, 300.0, 80.0, 0.0]]), rates)
    assert ms == pytest.approx(14 * 2 * 3 * 384 * 96 / 0.88e9)


def test_short_attentions_have_dearer_backwards(meta: Meta) -> None:
    """Traffic grows with the length, operations with its square: backward / forward is larger at 512 than at 16384."""
    ratios = []
    for length in (512, 16384):
        passes = [_attention(meta, "cudnn", length, backward=b, batch=32) for b in (False, True)]
        forward, backward = (a.ms for a in LearnedAttention(H100).estimate(passes) if a is not None)
        ratios.append(backward / forward)
    assert ratios[0] > 1.15 * ratios[1]


def test_kernels_differ_where_they_do_on_the_gpu(meta: Meta) -> None:
    """On Hopper cuDNN beats FlashAttention-2, which beats the memory-efficient kernel; dropout costs 30 %."""
    signatures = [_attention(meta, kind, 8192) for kind in ("cudnn", "flash", "efficient")]
    signatures.append(_attention(meta, "flash", 8192, dropout=0.1))
    cudnn, flash, efficient, dropped = (a.ms for a in LearnedAttention(H100).estimate(signatures) if a is not None)
    assert cudnn < flash < efficient
    assert dropped == pytest.approx(1.3 * flash)


def test_wide_heads_in_the_memory_efficient_backward(meta: Meta) -> None:
    """Without what is added up in float32, it takes 2.2 times FlashAttention-2's time with heads of 128, 4.95 with 192."""
    rates = Rates.of(H100, "bfloat16")
    for size, factor in ((128, 2.2), (192, 2.2 * 2.25)):
        x, sums = meta((2, 16, 4096, size)), np.array([[2.0, 16.0, 16.0, 4096.0, 4096.0, size, 1.0]])
        names = (f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in ("flash", "efficient"))
        backwards = [Signature(name, (x,) * 5, (x,) * 3, (("is_causal", True),)) for name in names]
        flash, efficient = LearnedAttention(H100).estimate(backwards)
        assert flash is not None and efficient is not None
        (added,) = accumulation_ms(sums, rates)
        assert (efficient.ms - added) / (flash.ms - added) == pytest.approx(factor)


@pytest.mark.parametrize("gpu", LEARNED)
def test_a_batch_of_attentions_equals_each_alone(gpu: str, meta: Meta) -> None:
    """Kernels, head sizes, masks and passes that are priced by different trees keep their places in the batch."""
    q = meta((1, 8, 1000, 80))
    unmasked = Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), (q,), (("is_causal", False),))
    product = Signature("aten.mm.default", (meta((64, 64)), meta((64, 64))), (meta((64, 64)),))
    batch = [
        _attention(meta, kind, 2048, backward=b) for kind in ("flash", "cudnn", "efficient") for b in (False, True)
    ]
    batch = [batch[0], product, unmasked, *batch[1:]]
    model = LearnedAttention(load_hardware(gpu))
    together = model.estimate(batch)
    assert together[1] is None
    for signature, answer in zip(batch, together, strict=True):
        (alone,) = model.estimate([signature])
        assert (alone is None) == (answer is None)
        if alone is not None and answer is not None:
            assert answer.ms == pytest.approx(alone.ms, rel=1e-12)
            assert answer[1:] == alone[1:]


def test_flash_on_hopper_is_near_published_rates(meta: Meta) -> None:
    """FlashAttention-2 forward on an H100, causal, head size 128, 8192 tokens: published 300 to 420 TFLOP/s."""
    (answer,) = LearnedAttention(H100).estimate([_attention(meta, "flash", 8192)])
    assert answer is not None
    assert 300 < _tflops(2 * 2 * 16 * 8192 * 8192 * 128, answer.ms) < 420


def test_float32_attention_is_left_to_the_roofline(meta: Meta) -> None:
    """The trees know 16-bit kernels only."""
    q = meta((2, 16, 1024, 64), "float32")
    signature = Signature("aten._scaled_dot_product_efficient_attention.default", (q, q, q), (q,))
    assert LearnedAttention(H100).estimate([signature]) == [None]


@settings(deadline=None, max_examples=40)
@given(m=st.integers(1, 2**17), n=st.integers(1, 2**17), k=st.integers(1, 2**17))
def test_no_product_beats_the_peak_by_much(mm: Callable[..., Signature], m: int, n: int, k: int) -> None:
    """Whatever the shape, the time is positive and within a few percent of the peak rates or above them."""
    (answer,) = LearnedMatmul(H100).estimate([mm(m, n, k)])
    assert answer is not None
    ideal = max(2 * m * n * k / 989e12, 2 * (m * k + k * n + m * n) / 3350e9) * 1e3
    assert answer.ms > 0.95 * ideal


# ---- memory-bound -----------------------------------------------------------------------------------------------


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


def test_a_users_profile_inherits_the_models_of_its_base(tmp_path: Path, mm: Callable[..., Signature]) -> None:
    """A file based on the H100 uses the H100's trees under its own name, and says so."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-sxm-80gb"\nname = "mine"\n')
    (mine,) = LearnedMatmul(load_hardware(str(path))).estimate([mm(4096, 4096, 4096)])
    (theirs,) = LearnedMatmul(H100).estimate([mm(4096, 4096, 4096)])
    assert mine is not None and theirs is not None
    assert mine.ms == theirs.ms
    assert mine.source == "learned:matmul@h100-sxm-80gb"

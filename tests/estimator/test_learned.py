"""The fitted operator models: sensible numbers, the right corrections, honest sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator import LearnedAttention, LearnedMatmul, load_hardware
from autosac.estimator.attention import accumulation_ms
from autosac.estimator.features import Rates
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")
START_MS = 0.003  # of a product that is not timed back to back
PLAIN_START_MS = 0.001  # of one on Hopper that adds nothing
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


@pytest.mark.parametrize(("gpu", "more"), [("a100-sxm-80gb", (1.02, 1.05)), ("h100-sxm-80gb", (1.0, 1.0))])
def test_layouts_of_the_gradients_cost_more_before_hopper(meta: Meta, gpu: str, more: tuple[float, float]) -> None:
    """Y = x W^T is the fastest; dx = dy W costs 2 % more, dW = dy^T x 5 % more, for cubes of one size. Hopper: the same."""
    plain, flipped = meta((4096, 4096)), TensorMeta((4096, 4096), (1, 4096), "bfloat16")
    forward, dgrad, wgrad = (
        Signature("aten.mm.default", operands, (plain,))
        for operands in ((plain, flipped), (plain, plain), (flipped, plain))
    )
    hardware = load_hardware(gpu)
    answers = LearnedMatmul(hardware).estimate([forward, dgrad, wgrad])
    start = PLAIN_START_MS if gpu.startswith("h100") else hardware.kernel_us * 1e-3 + 0.0004
    times = [answer.ms - start for answer in answers if answer is not None]
    assert times == pytest.approx([times[0], more[0] * times[0], more[1] * times[0]])


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
    start_ms = PLAIN_START_MS if gpu.startswith("h100") else load_hardware(gpu).kernel_us * 1e-3 + 0.0004
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
    least_ms = PLAIN_START_MS + 0.0024
    assert unaligned.ms - least_ms == pytest.approx(slower * (aligned.ms - least_ms))


@pytest.mark.parametrize(("gpu", "rate"), [("h100-sxm-80gb", 132 * 1830e6), ("a100-sxm-80gb", 108 * 1410e6)])
def test_rows_of_odd_length_are_loaded_one_element_at_a_time(meta: Meta, gpu: str, rate: float) -> None:
    """By Ampere's kernel on both GPUs: 552.7 FLOPs a cycle and processor, 13.5 % of Hopper's dense rate, 27 % of an A100's."""
    square, odd = meta((8192, 8192)), TensorMeta((8192, 8192), (8193, 1), "bfloat16")
    (answer,) = LearnedMatmul(load_hardware(gpu)).estimate([Signature("aten.mm.default", (odd, square), (square,))])
    assert answer is not None
    start_ms = PLAIN_START_MS if gpu.startswith("h100") else load_hardware(gpu).kernel_us * 1e-3 + 0.0004
    assert answer.ms == pytest.approx(start_ms + 2 * 8192**3 / (552.7 * rate) * 1e3)


def test_tf32_is_bf16_with_twice_the_depth(meta: Meta, mm: Callable[..., Signature]) -> None:
    """[m, n, k] in TF32 takes as long as [m, n, 2k] in bf16; plain float32 is not answered. Hopper multiplies it along k only:
    with an operand that is stored across it takes 1.1 or 1.6 times as long.
    """
    single = mm(4096, 4096, 2048, "float32")
    along, across = (TensorMeta((2048, 4096), strides, "float32") for strides in ((1, 2048), (4096, 1)))
    left, flipped = single.inputs[0], TensorMeta((4096, 2048), (1, 4096), "float32")
    layouts = [single._replace(inputs=pair) for pair in ((left, along), (left, across), (flipped, across))]
    answers = LearnedMatmul(H100, tf32=True).estimate(layouts)
    times = [answer.ms - PLAIN_START_MS for answer in answers if answer is not None]
    half = mm(4096, 4096, 4096)
    across_half = half.inputs[1]._replace(stride=(1, 4096))
    (bf16,) = LearnedMatmul(H100).estimate([half._replace(inputs=(half.inputs[0], across_half))])
    assert bf16 is not None
    assert times == pytest.approx([bf16.ms - PLAIN_START_MS, 1.1 * times[0], 1.6 * times[0]])
    assert LearnedMatmul(H100).estimate([single]) == [None]


def test_products_that_add_start_later_on_hopper(meta: Meta, mm: Callable[..., Signature]) -> None:
    """A bias is 2 us on an H100; on an A100 both begin a shortest kernel and 0.4 us late."""
    plain = mm(4096, 4096, 4096)
    added = Signature("aten.addmm.default", (meta((4096,)), *plain.inputs), plain.outputs)
    for gpu, later_ms in (("h100-sxm-80gb", START_MS - PLAIN_START_MS), ("a100-sxm-80gb", 0.0)):
        alone, biased = LearnedMatmul(load_hardware(gpu)).estimate([plain, added])
        assert alone is not None and biased is not None
        assert biased.ms - alone.ms == pytest.approx(later_ms)


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


@pytest.mark.parametrize(("gpu", "dtype", "peak"), [("v100-sxm2-16gb", "float16", 125e12), ("t4", "float16", 65e12)])
def test_volta_and_turing_multiply_float16(mm: Callable[..., Signature], gpu: str, dtype: str, peak: float) -> None:
    """A large product reaches between a half and all of the tensor cores' peak; bfloat16 is left to the tiles of float32."""
    product = LearnedMatmul(load_hardware(gpu))
    (answer,) = product.estimate([mm(8192, 8192, 8192, dtype)])
    assert answer is not None and peak / 2 < _tflops(2 * 8192**3, answer.ms) * 1e12 < peak
    assert product.estimate([mm(8192, 8192, 8192, "bfloat16")]) == [None]


@pytest.mark.parametrize("gpu", ["rtx-3090", "rtx-4090", "rtx-5090"])
def test_a_geforce_is_no_faster_than_its_highest_clock(mm: Callable[..., Signature], gpu: str) -> None:
    """What scales the L40S's trees up ends at 1.08 of the card's own peak, which large products reach."""
    hardware = load_hardware(gpu)
    (answer,) = LearnedMatmul(hardware).estimate([mm(10240, 10240, 10240)])
    assert answer is not None
    assert _tflops(2 * 10240**3, answer.ms) * 1e12 == pytest.approx(1.08 * hardware.peak_flops("bfloat16"), rel=1e-3)


def test_a_capped_part_sustains_less(mm: Callable[..., Signature]) -> None:
    """`sustained = 0.5` doubles the time of a compute-bound product."""
    capped = replace(H100, efficiency=(("sustained", 0.5),))
    (slow,) = LearnedMatmul(capped).estimate([mm(8192, 8192, 8192)])
    (fast,) = LearnedMatmul(H100).estimate([mm(8192, 8192, 8192)])
    assert slow is not None and fast is not None
    assert slow.ms - PLAIN_START_MS == pytest.approx(2 * (fast.ms - PLAIN_START_MS))


def test_promoted_sums_take_longer(meta: Meta) -> None:
    """A product in 8 bits without fast accumulation takes 7 % longer on an H100, and as long on a B200.

    On the H100 10 us of quantisation were measured with it and are taken off.
    """
    a, b = meta((8192, 8192), "float8_e4m3fn"), TensorMeta((8192, 8192), (1, 8192), "float8_e4m3fn")
    slow = Signature("aten._scaled_mm.default", (a, b), (meta((8192, 8192)),))
    fast = slow._replace(arguments=(("use_fast_accum", True),))
    for gpu, ratio, quantized in (("h100-sxm-80gb", 1.07, 0.010), ("b200-sxm-180gb", 1.0, 0.0)):
        quick, promoted = LearnedMatmul(load_hardware(gpu)).estimate([fast, slow])
        assert quick is not None and promoted is not None
        start = START_MS - quantized
        assert promoted.ms - start == pytest.approx(ratio * (quick.ms - start))


def test_scales_of_rows_take_the_same_kernel(meta: Meta) -> None:
    """One scale for a factor, one for each row and one for 64 blocks: all take as long."""
    a, b = meta((8192, 8192), "float8_e4m3fn"), TensorMeta((8192, 8192), (1, 8192), "float8_e4m3fn")
    one, rows, blocks = (meta(shape, "float32") for shape in ((), (8192, 1), (64, 1)))
    products = [
        Signature("aten._scaled_mm.default", (a, b, scale, scale), (meta((8192, 8192)),), (("use_fast_accum", True),))
        for scale in (one, rows, blocks)
    ]
    tensorwise, rowwise, blockwise = (e.ms for e in LearnedMatmul(H100).estimate(products) if e is not None)
    assert rowwise == blockwise
    assert rowwise == pytest.approx(tensorwise, rel=1e-3)


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


def test_a_users_profile_inherits_the_models_of_its_base(tmp_path: Path, mm: Callable[..., Signature]) -> None:
    """A file based on the H100 uses the H100's trees under its own name, and says so."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-sxm-80gb"\nname = "mine"\n')
    (mine,) = LearnedMatmul(load_hardware(str(path))).estimate([mm(4096, 4096, 4096)])
    (theirs,) = LearnedMatmul(H100).estimate([mm(4096, 4096, 4096)])
    assert mine is not None and theirs is not None
    assert mine.ms == theirs.ms
    assert mine.source == "learned:matmul@h100-sxm-80gb"

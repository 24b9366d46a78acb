"""Pooling, nearest neighbours, sorts, scans and losses as kernels: figures worked out by hand for an H100."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.estimator.memory_bound import LearnedMemory
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
H100 = load_hardware("h100-sxm-80gb")
SHORTEST, ISSUE = 2.6, 132 * 1830  # microseconds; one element a cycle and processor, in a microsecond
TWO = (("kernel_size", (2, 2)), ("stride", (2, 2)))


def _us(signature: Signature, gpu: str = "h100-sxm-80gb") -> float:
    (answer,) = Kernels(Streams(load_hardware(gpu))).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def test_pooling_by_the_elements_and_their_window(meta: Meta) -> None:
    """2.1 + 0.2 * 4 cycles for the largest of four, 1.85 + 0.2 * 4 for their mean, 0.7 * 8 in three dimensions."""
    image, half = meta((64, 64, 128, 128)), meta((64, 64, 64, 64))
    count = 64**4
    largest = Signature("aten.max_pool2d_with_indices.default", (image,), (half, meta((64, 64, 64, 64), "int64")), TWO)
    assert _us(largest) == pytest.approx(SHORTEST + count * 2.9 / ISSUE)
    mean = Signature("aten.avg_pool2d.default", (image,), (half,), (("kernel_size", 2),))
    assert _us(mean) == pytest.approx(SHORTEST + count * 2.65 / ISSUE)
    cube, part = meta((2, 32, 64, 64, 64)), meta((2, 32, 32, 32, 32))
    volume = Signature("aten.max_pool3d_with_indices.default", (cube,), (part,), (("kernel_size", (2, 2, 2)),))
    assert _us(volume) == pytest.approx(SHORTEST + 2**21 * 5.6 / ISSUE)


@pytest.mark.parametrize(("size", "step", "windows"), [(2, 2, 1), (3, 2, 4), (3, 1, 9)])
def test_a_pools_gradient_asks_every_window_of_an_element(meta: Meta, size: int, step: int, windows: int) -> None:
    """2.21 cycles for an element of the image, and 0.14 for each window that it may lie in."""
    image, half = meta((64, 64, 128, 128)), meta((64, 64, 64, 64))
    how = (("kernel_size", (size, size)), ("stride", (step, step)))
    inputs = (half, image, meta((64, 64, 64, 64), "int64"))
    gradient = Signature("aten.max_pool2d_with_indices_backward.default", inputs, (image,), how)
    assert _us(gradient) == pytest.approx(SHORTEST + 2**26 * (2.21 + 0.14 * windows) / ISSUE)


def test_pools_of_amd_take_twice_as_many_cycles(meta: Meta) -> None:
    """304 processors at 2,100 MHz with half as many lanes, after a shortest kernel of 4.4 us; but not for nearest
    neighbours. A gradient that is a part of another is copied there, too.
    """
    image, half = meta((64, 64, 128, 128)), meta((64, 64, 64, 64))
    mean = Signature("aten.avg_pool2d_backward.default", (half, image), (image,), (("kernel_size", (2, 2)),))
    assert _us(mean, "mi300x") == pytest.approx(4.4 + 2**26 * 8.0 / (304 * 2100))
    up = Signature("aten.upsample_nearest2d.default", (half,), (image,), ())
    assert _us(up, "mi300x") == pytest.approx(4.4 + 2**26 * 0.8 / (304 * 2100))
    strided = TensorMeta(image.shape, (2 * 64 * 128**2, 128**2, 128, 1), "bfloat16")
    back = Signature("aten.upsample_nearest2d_backward.default", (strided,), (half,), ())
    assert _us(back, "mi300x") > _us(Signature(back.name, (image,), (half,), ()), "mi300x") + 4.4


def test_nearest_neighbours(meta: Meta) -> None:
    """0.8 cycles an element; back 2.9 for an element of the result, after a copy of a gradient that is a part of another."""
    small, large = meta((8, 64, 64, 64), "float32"), meta((8, 64, 128, 128), "float32")
    up = Signature("aten.upsample_nearest2d.default", (small,), (large,), ())
    assert _us(up) == pytest.approx(SHORTEST + 2**23 * 0.8 / ISSUE)
    strided = TensorMeta(large.shape, (2 * 64 * 128**2, 128**2, 128, 1), "float32")
    back = Signature("aten.upsample_nearest2d_backward.default", (strided,), (small,), ())
    copy = Signature("aten.copy_.default", (large, strided), (large,), mutates=(0,))
    (copied,) = LearnedMemory(H100).estimate([copy])
    assert copied is not None
    assert _us(back) == pytest.approx(copied.ms * 1e3 + SHORTEST + 2**21 * 2.9 / ISSUE)


def test_a_long_row_is_sorted_eight_bits_a_pass(meta: Meta) -> None:
    """8,192 numbers of 8 bytes: 4 + 8 kernels of 7.5 us; of 2 bytes: 4 + 2. A row of 1,000 is one block's work, 12 us."""
    for dtype, kernels in (("int64", 12), ("int16", 6)):
        row = meta((8192,), dtype)
        assert _us(Signature("aten.sort.default", (row,), (row,), (("dim", -1),))) == pytest.approx(7.5 * kernels)
    short = meta((1000,), "float32")
    assert _us(Signature("aten.sort.default", (short,), (short,), (("dim", -1),))) == pytest.approx(SHORTEST + 12)


def test_the_largest_few_take_a_pass_for_two_bits(meta: Meta) -> None:
    """4,096 rows of eight float32: 16 passes of 0.9 us at once, then a sort of 3 us."""
    rows, few = meta((4096, 8), "float32"), meta((4096, 2), "float32")
    assert _us(Signature("aten.topk.default", (rows,), (few,), (("k", 2),))) == pytest.approx(SHORTEST + 3 + 16 * 0.9)


def test_running_sums_wait_and_convert(meta: Meta) -> None:
    """4.9 us and 0.18 for each 1,024 of a row; another type is converted before, 3.6 us."""
    sums = meta((1, 16384), "int64")
    whole, flags = (Signature("aten.cumsum.default", (meta((1, 16384), d),), (sums,)) for d in ("int64", "bool"))
    assert _us(whole) == pytest.approx(4.9 + 16 * 0.18)
    assert _us(flags) == pytest.approx(3.6 + 4.9 + 16 * 0.18)


def test_running_sums_of_many_rows_take_their_bytes(meta: Meta) -> None:
    """A million rows of 1,024 are read and written at the bandwidth, twice as long in twice the bytes."""
    half, single = (meta((2**20, 1024), dtype) for dtype in ("float16", "float32"))
    half_us, single_us = (_us(Signature("aten.cumsum.default", (x,), (x,))) for x in (half, single))
    assert single_us > 2 * 2**30 * 4 / 3.35e12 * 1e6  # the peak rate
    assert single_us == pytest.approx(2 * half_us, rel=1e-3)


def test_ctc_goes_through_time(meta: Meta) -> None:
    """499 steps of 0.54 us, back of 1.1, wherever the lengths are."""
    logits, targets, loss = meta((499, 8, 32), "float32"), meta((8, 60), "int64", "cpu"), meta((8,), "float32")
    forward = Signature("aten._ctc_loss.default", (logits, targets), (loss,))
    backward = Signature("aten._ctc_loss_backward.default", (loss, logits, targets), (logits,))
    assert _us(forward) == pytest.approx(SHORTEST + 499 * 0.54)
    assert _us(backward) == pytest.approx(SHORTEST + 499 * 1.1)


def test_a_likelihood_of_images_has_few_blocks(meta: Meta) -> None:
    """884,736 positions: 864 blocks' worth in 6 blocks of 1,024 threads, so 144 turns of 1 us, back of 0.55 after zeros."""
    scores, labels, loss = meta((2, 4, 1, 884736), "float32"), meta((2, 1, 884736), "int64"), meta((), "float32")
    forward = Signature("aten.nll_loss2d_forward.default", (scores, labels), (loss,))
    backward = Signature("aten.nll_loss2d_backward.default", (loss, scores, labels, loss), (scores,))
    zeros = 0.77 * SHORTEST + 2 * 4 * 884736 * 4 / (3350e3 * 0.974)
    assert _us(forward) == pytest.approx(SHORTEST + 144)
    assert _us(backward) == pytest.approx(zeros + 144 * 0.55)


def test_a_group_norm_reads_groups_then_scales(meta: Meta) -> None:
    """256 groups of 40,960 elements, one block each, go 80 turns of 0.45 us; two kernels' starts and a broadcast product."""
    data, weight = meta((8, 320, 64, 64), "float32"), meta((320,), "float32")
    norm = Signature("aten.native_group_norm.default", (data, weight, weight), (data,), (("group", 32),))
    scales = TensorMeta((8, 320, 1, 1), (1, 1, 1, 1), "float32")
    (scaled,) = LearnedMemory(H100).estimate([Signature("aten.mul.Tensor", (data, scales), (data,))])
    assert scaled is not None
    assert _us(norm) == pytest.approx(2 * SHORTEST + 80 * 0.45 + scaled.ms * 1e3)


def test_a_bag_is_a_lookup_and_two_kernels(meta: Meta) -> None:
    """Of 32,768 indices in 8,192 bags."""
    table, bags = meta((200000, 64), "float32"), meta((8192, 64), "float32")
    indices, offsets = meta((32768,), "int64"), meta((8192,), "int64")
    looked_up = Signature("aten.embedding.default", (table, indices), (bags,))
    bag = Signature("aten._embedding_bag.default", (table, indices, offsets), (bags,))
    assert _us(bag) == pytest.approx(_us(looked_up) + 2 * SHORTEST)


def test_stacked_tensors_are_joined(meta: Meta) -> None:
    """Contiguous ones as a copy; with one that is not, 1.03 elements a cycle and processor."""
    part, whole = meta((2**20, 16)), meta((3, 2**20, 16))
    across = TensorMeta((2**20, 16), (1, 2**20), "bfloat16")
    plain, mixed = (
        Signature("aten.stack.default", (part, part, other), (whole,), (("dim", 0),)) for other in (part, across)
    )
    (copy,) = LearnedMemory(H100).estimate([Signature("aten.clone.default", (whole,), (whole,))])
    assert copy is not None
    assert _us(plain) == pytest.approx(copy.ms * 1e3)
    assert _us(mixed) == pytest.approx(1.5 + SHORTEST + 3 * 2**24 / (1.03 * ISSUE))

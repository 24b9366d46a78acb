"""Kernels by their launches: figures worked out by hand for an H100 of 132 processors at 1,830 MHz and 3,350 GB/s."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.hardware import Hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.estimator.memory_bound import LearnedMemory
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
H100 = load_hardware("h100-sxm-80gb")
FAST = replace(H100, mem_bandwidth_gbps=4 * H100.mem_bandwidth_gbps)
PEAK, STREAM, SHORTEST = 3350e3, 3350e3 * 0.88, 2.6  # bytes a microsecond, and a kernel's microseconds
ISSUE = 132 * 1830  # one element a cycle and processor, in a microsecond


def _us(signature: Signature, gpu: str | Hardware = "h100-sxm-80gb") -> float:
    hardware = load_hardware(gpu) if isinstance(gpu, str) else gpu
    (answer,) = Kernels(Streams(hardware)).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def _copy_us(source: TensorMeta, target: TensorMeta) -> float:
    (answer,) = LearnedMemory(H100).estimate(
        [Signature("aten.copy_.default", (target, source), (target,), mutates=(0,))]
    )
    assert answer is not None
    return answer.ms * 1e3


def _fill_us(nbytes: int) -> float:
    return 0.77 * SHORTEST + nbytes / (PEAK * 0.974)


def test_a_views_gradient_is_zeros_and_a_copy_of_the_part(meta: Meta) -> None:
    """One of 128 positions: 64 MiB of zeros, and a strided copy of half a MiB; a slice of every second column likewise."""
    part, whole = meta((4, 2048, 16), "float32"), meta((4, 2048, 128, 16), "float32")
    place = TensorMeta((4, 2048, 16), (4194304, 2048, 1), "float32")
    select = Signature("aten.select_backward.default", (part,), (whole,), (("dim", 2), ("index", 7)))
    assert _us(select) == pytest.approx(_fill_us(2**26) + _copy_us(part, place))
    half, rows = meta((2**14, 512)), meta((2**14, 1024))
    place = TensorMeta((2**14, 512), (1024, 2), "bfloat16")
    every = Signature("aten.slice_backward.default", (half,), (rows,), (("dim", 1), ("step", 2)))
    assert _us(every) == pytest.approx(_fill_us(2**25) + _copy_us(half, place))


def test_contiguous_tensors_are_joined_at_the_memorys_rate(meta: Meta) -> None:
    """Two contiguous halves take as long as a copy of the whole."""
    half, whole = meta((2**13, 2048)), meta((2**13, 4096))
    assert _us(Signature("aten.cat.default", (half, half), (whole,), (("dim", 1),))) == pytest.approx(
        _copy_us(whole, whole)
    )


@pytest.mark.parametrize(("count", "rate"), [(1, 0.64), (2, 1.03)])
def test_strided_tensors_are_joined_element_by_element(meta: Meta, count: int, rate: float) -> None:
    """2^25 elements at 0.64 a cycle and processor of one tensor, 1.03 of two; an empty one has no blocks but is as slow."""
    whole, width = meta((2**15, 1024)), 1024 // count
    strided = TensorMeta((2**15, width), (4096, 1), "bfloat16")
    inputs = (strided,) * count if count > 1 else (meta((0,)), meta((2**15, 1024)))
    us = _us(Signature("aten.cat.default", inputs, (whole,), (("dim", 1),)))
    assert us == pytest.approx(1.5 + SHORTEST + 2**25 / (rate * ISSUE))


@pytest.mark.parametrize(("strides", "rate"), [((2**24, 2048, 1), 0.64), ((2**23, 1, 2**13), 0.48)])
def test_the_longest_tensor_is_joined_by_its_own_blocks(meta: Meta, strides: tuple[int, ...], rate: float) -> None:
    """One row and 8,192 strided ones: the row's blocks do not help; slower where neighbours of the result lie apart."""
    rows, out = TensorMeta((1, 2**13, 1024), strides, "bfloat16"), meta((1, 2**13 + 1, 1024))
    us = _us(Signature("aten.cat.default", (meta((1, 1, 1024)), rows), (out,), (("dim", 1),)))
    assert us == pytest.approx(1.5 + SHORTEST + 2**23 / (rate * ISSUE))


def test_a_roll_has_a_kernel_for_each_dimension(meta: Meta) -> None:
    """2^24 elements twice, 0.85 of them a cycle and processor."""
    x = meta((64, 64, 64, 64))
    us = _us(Signature("aten.roll.default", (x,), (x,), (("shifts", (3, 3)), ("dims", (1, 2)))))
    assert us == pytest.approx(2 * 2**24 / (0.85 * ISSUE))


def test_rows_are_looked_up_as_they_are_copied(meta: Meta) -> None:
    """From a table larger than the L2 as a copy of the rows and the indices; a table of two rows is read once."""
    rows, indices = meta((2**14, 2048)), meta((2**14,), "int64")
    large, small = meta((2**17, 2048)), meta((2, 2048))

    def moved(nbytes: int) -> float:
        return _copy_us(meta((nbytes // 4,)), meta((nbytes // 4,)))

    assert _us(Signature("aten.embedding.default", (large, indices), (rows,))) == pytest.approx(moved(2**27 + 2**17))
    assert _us(Signature("aten.embedding.default", (small, indices), (rows,))) == pytest.approx(
        moved(2**26 + 2**13 + 2**17)
    )


def test_rows_of_a_long_softmax_are_one_blocks_work(meta: Meta) -> None:
    """264 rows of 30,522 halves under way fit the L2: 2.5 us and 0.19 ns an element. 151,936 floats do not: four passes."""
    half, whole = meta((16384, 30522)), meta((16384, 151936), "float32")
    forward = Signature("aten._log_softmax.default", (half,), (half,), (("dim", 1),))
    assert _us(forward) == pytest.approx(SHORTEST + 16384 / 132 * (2.5 + 0.19e-3 * 30522))
    four = SHORTEST + 16384 * 151936 * 4 * 4 / (PEAK * 0.905)
    assert _us(forward._replace(inputs=(whole,), outputs=(whole,))) == pytest.approx(four)
    backward = Signature("aten._log_softmax_backward_data.default", (whole, whole), (whole,), (("dim", 1),))
    assert _us(backward) == pytest.approx(four)


def test_a_likelihood_is_one_blocks_work(meta: Meta) -> None:
    """200,000 rows are 196 turns of 1,024 threads, after zeros in the gradient. Rows beyond the caches take 19 us at least."""
    scores, labels, one = meta((200_000, 40), "float32"), meta((200_000,), "int64"), meta((), "float32")
    assert _us(Signature("aten.nll_loss_forward.default", (scores, labels), (one,))) == pytest.approx(3 + 196 * 0.95)
    backward = Signature("aten.nll_loss_backward.default", (one, scores, labels, one), (scores,))
    assert _us(backward) == pytest.approx(_fill_us(200_000 * 160) + 3 + 196 * 0.95)
    wide = Signature("aten.nll_loss_forward.default", (meta((512, 50304), "float32"), meta((512,), "int64")), (one,))
    assert _us(wide) == pytest.approx(19)


def test_a_layer_norms_rows_wait(meta: Meta) -> None:
    """4,224 rows of 2 KiB are two waves of 16 blocks a processor; they are read and written beside, with exponent 1.465."""
    x, weight, mean = meta((4224, 512), "float32"), meta((512,), "float32"), meta((4224, 1), "float32")
    arguments = (("normalized_shape", (512,)),)
    walk, read = 2 * (2.71 + 0.857), 2 * 4224 * 2048 / (PEAK * 0.846)
    us = _us(Signature("aten.native_layer_norm.default", (x, weight, weight), (x, mean, mean), arguments))
    assert us == pytest.approx(0.5 * SHORTEST + (walk**1.465 + read**1.465) ** (1 / 1.465))
    walk = 2 * (1.2 + 0.857)
    us = _us(Signature("aten._fused_rms_norm.default", (x, weight), (x, mean), arguments))
    assert us == pytest.approx(0.5 * SHORTEST + (walk**1.465 + read**1.465) ** (1 / 1.465))


def test_a_norms_rows_in_a_large_l2_are_read_from_there(meta: Meta) -> None:
    """2 MiB in and out lie in an RTX 4090's L2 as they do in an H100's, which is 1.45 times as fast as its memory, the card's
    6.4 times: a row's reading takes 0.225 of what it would from memory. An A100's L2 is hardly further ahead than the H100's.
    """
    x, weight, mean = meta((1024, 512), "float32"), meta((512,), "float32"), meta((1024, 1), "float32")
    norm = Signature(
        "aten.native_layer_norm.default", (x, weight, weight), (x, mean, mean), (("normalized_shape", (512,)),)
    )

    def ahead(gpu: Hardware) -> float:
        return 18 * gpu.sm_count * gpu.boost_mhz / (0.895 * gpu.mem_bandwidth_gbps * 1e3)

    card, fitted = load_hardware("rtx-4090"), load_hardware("h100-sxm-80gb")
    walk = 1830 / card.boost_mhz * (2.71 + 0.857)
    read = 2 * 2**21 / (card.mem_bandwidth_gbps * 1e3 * 0.846) * ahead(fitted) / ahead(card)
    assert ahead(fitted) / ahead(card) == pytest.approx(0.2253, abs=1e-4)
    assert _us(norm, card) == pytest.approx(0.5 * card.kernel_us + (walk**1.465 + read**1.465) ** (1 / 1.465))
    assert Streams(load_hardware("a100-sxm-80gb")).cached_gain(2**22) == pytest.approx(1.0, abs=0.05)


def test_a_layer_norms_weight_gradient_is_few_blocks_work(meta: Meta) -> None:
    """4,224 rows are 17 turns of 256, whatever the number of columns; not wanted, they cost nothing."""
    x, weight, mean = meta((4224, 512), "float32"), meta((512,), "float32"), meta((4224, 1), "float32")
    inputs, arguments = (x, x, mean, mean, weight, weight), (("normalized_shape", (512,)),)
    alone = 0.87 * SHORTEST + 2 * (0.63 + 0.074) + 4.53 * 4224 * 2048 / STREAM
    name = "aten.native_layer_norm_backward.default"
    assert _us(Signature(name, inputs, (x,), arguments)) == pytest.approx(alone)
    assert _us(Signature(name, inputs, (x, weight, weight), arguments)) == pytest.approx(
        alone + 0.87 * SHORTEST + 17 * 0.84
    )


def test_an_rms_norms_weight_gradient_takes_shorter_turns(meta: Meta) -> None:
    """17 turns of 0.53 us, and no second output."""
    x, weight, rstd = meta((4224, 512), "float32"), meta((512,), "float32"), meta((4224, 1), "float32")
    arguments, name = (("normalized_shape", (512,)),), "aten._fused_rms_norm_backward.default"
    with_weight, alone = (_us(Signature(name, (x, x, rstd, weight), out, arguments)) for out in ((x, weight), (x,)))
    assert with_weight - alone == pytest.approx(0.87 * SHORTEST + 17 * 0.53)


@pytest.mark.parametrize(
    ("gpu", "rows", "passes"), [("h100-sxm-80gb", 2112, 5.44), ("b200-sxm-180gb", 2368, 5.44 * 1.53)]
)
def test_gradients_of_rows_that_leave_the_l2(meta: Meta, gpu: str, rows: int, passes: float) -> None:
    """16 rows a processor of two tensors, 32 KiB each, are more than an L2: 5.44 passes over memory, longer on Blackwell."""
    hardware = load_hardware(gpu)
    x, rstd = meta((rows, 16384), "bfloat16"), meta((rows, 1), "float32")
    arguments = (("normalized_shape", (16384,)),)
    signature = Signature("aten._fused_rms_norm_backward.default", (x, x, rstd), (x,), arguments)
    stream, slower = hardware.mem_bandwidth_gbps * 1e3 * 0.88, 1830 / hardware.boost_mhz
    us = 0.87 * SHORTEST + slower * (0.63 + 16 * 0.074) + passes * rows * 32768 / stream
    assert _us(signature, gpu) == pytest.approx(us)


@pytest.mark.parametrize(
    ("rows", "length", "turns"),
    [(8, 8448, 1), (64, 16896, 2), (63, 4224, 8), (128, 33792, 4), (200, 512, 2), (255, 512, 2), (256, 512, 1)],
)
def test_weights_of_norms_in_few_or_wide_rows(meta: Meta, rows: int, length: int, turns: int) -> None:
    """Turns of 8, 64, 128 and 256 rows; with more than 8,448 columns the blocks' columns are more than the processors take."""
    x, weight, mean = meta((rows, length), "float32"), meta((length,), "float32"), meta((rows, 1), "float32")
    inputs, arguments = (x, x, mean, mean, weight, weight), (("normalized_shape", (length,)),)
    name = "aten.native_layer_norm_backward.default"
    with_weights, alone = (_us(Signature(name, inputs, out, arguments)) for out in ((x, weight, weight), (x,)))
    read = 2 * rows * length * 4 / STREAM
    assert with_weights - alone == pytest.approx(0.87 * SHORTEST + max(read, turns * 0.84))


def test_many_narrow_rows_are_read_at_the_memorys_rate(meta: Meta) -> None:
    """More than 65,536 rows of fewer columns than half of the processors take are read once; wider ones have their turns."""
    for rows, length, us in ((65_537, 1024, 2 * 65_537 * 4096 / STREAM), (65_536, 32, 256 * 0.84)):
        x, weight, mean = meta((rows, length), "float32"), meta((length,), "float32"), meta((rows, 1), "float32")
        inputs, arguments = (x, x, mean, mean, weight, weight), (("normalized_shape", (length,)),)
        name = "aten.native_layer_norm_backward.default"
        with_weights, alone = (_us(Signature(name, inputs, out, arguments)) for out in ((x, weight, weight), (x,)))
        assert with_weights - alone == pytest.approx(0.87 * SHORTEST + us)


def test_a_norm_of_strided_rows_copies_them_first(meta: Meta) -> None:
    """A transposed input costs a copy more than a contiguous one."""
    x, weight, mean = meta((4096, 1024), "float32"), meta((1024,), "float32"), meta((4096, 1), "float32")
    across = TensorMeta((4096, 1024), (1, 4096), "float32")
    plain, strided = (
        _us(
            Signature(
                "aten.native_layer_norm.default", (m, weight, weight), (x, mean, mean), (("normalized_shape", (1024,)),)
            )
        )
        for m in (x, across)
    )
    assert strided == pytest.approx(plain + _copy_us(across, x))


def test_a_group_norms_gradient(meta: Meta) -> None:
    """8 x 320 channels of 4,096 positions are 2,560 / 528 waves of blocks; then 0.554 elements a cycle and processor."""
    x, mean = meta((8, 320, 64, 64), "float32"), meta((8, 32), "float32")
    us = _us(Signature("aten.native_group_norm_backward.default", (x, x, mean, mean), (x,)))
    assert us == pytest.approx(15.1 + 2560 / 528 * 1.13 + 8 * 320 * 4096 / (0.55 * ISSUE))


@pytest.mark.parametrize(("width", "waves"), [(512, 2560 / 528), (511, 1.0)])
def test_a_group_norms_gradient_of_few_positions(meta: Meta, width: int, waves: float) -> None:
    """Fewer than 512 positions of a channel take blocks of a warp: 32 of them fit a processor, and all 2,560 at once."""
    x, mean = meta((8, 320, width), "float32"), meta((8, 32), "float32")
    us = _us(Signature("aten.native_group_norm_backward.default", (x, x, mean, mean), (x,)))
    assert us == pytest.approx(15.1 + waves * 1.13 + 8 * 320 * width / (0.55 * ISSUE))


def test_a_channel_of_a_batch_norm_is_one_blocks_work(meta: Meta) -> None:
    """64 images of 22,500 positions are 2,816 steps of 512 threads, each a wait for memory; small blocks follow forwards."""
    x, weight = meta((64, 24, 150, 150)), meta((24,), "float32")
    steps, waves = 64 * 44, 24 * 64 / 528
    forward = Signature("aten.native_batch_norm.default", (x, weight, weight), (x, weight, weight))
    second = waves * (1.7 + 0.44 * 44)
    expected = 7 + steps * 0.44 + max(2 * 64 * 24 * 22500 * 2 / STREAM, second)
    assert _us(forward) == pytest.approx(expected)
    backward = Signature("aten.native_batch_norm_backward.default", (x, x, weight), (x, weight, weight))
    assert _us(backward) == pytest.approx(3.4 + steps * 0.97)


@pytest.mark.parametrize(
    ("shape", "steps", "blocks", "threads", "small"),
    [
        ((8, 64, 7, 7), 1, 8, 64, 1),  # 8 images of 64 threads a step; then a block for each image
        ((64, 256, 6, 4), 4, 32, 64, 1),  # 16 images of 32 threads a step; then two images a block
        ((32, 16, 10, 10), 8, 32, 64, 2),
        ((2, 1024, 30, 30), 4, 2, 256, 4),
    ],
)
def test_small_batch_norms_are_waits_for_the_cache(
    meta: Meta, shape: tuple[int, ...], steps: int, blocks: int, threads: int, small: int
) -> None:
    """What fits into the L2: each step of a channel's block waits 0.22 us, or many channels' blocks issue for 0.118 us each.

    Backwards 0.42 and 0.97 us in turn, and issues are longer as waits are.
    """
    x, weight = meta(shape), meta((shape[1],), "float32")
    nbytes = 2 * math.prod(shape)
    in_turn = math.ceil(shape[1] / 528)
    walk = steps * max(0.22 * in_turn, 0.118 * shape[1] / 132)
    second = max(1.0, shape[1] * blocks / (132 * 2048 / threads)) * (1.7 + 0.22 * small)
    forward = Signature("aten.native_batch_norm.default", (x, weight, weight), (x, weight, weight))
    assert nbytes < 0.32 * H100.l2_bytes
    assert _us(forward) == pytest.approx(7 + walk + max(2 * nbytes / STREAM, second))
    backward = Signature("aten.native_batch_norm_backward.default", (x, x, weight), (x, weight, weight))
    wait = (0.97 + 0.42) / 2
    walk = steps * max(wait * in_turn, 0.196 * wait / 0.42 * shape[1] / 132)
    assert _us(backward) == pytest.approx(3.4 + walk)


def test_batch_norms_of_known_statistics_are_left_to_other_rules(meta: Meta) -> None:
    """They read and write once."""
    x = meta((64, 32, 8, 8))
    known = Signature("aten.native_batch_norm.default", (x,), (x,), (("training", False),))
    assert Kernels(Streams(H100)).estimate([known]) == [None]


def test_batch_norms_of_other_layouts_are_left_to_other_rules(meta: Meta) -> None:
    """Half precision with images one after the other, rows without images, a single channel."""
    for x in (meta((64, 32, 8, 8), "float16"), meta((4096, 32), "float16"), meta((64, 1, 8, 8), "float16")):
        signature = Signature("aten.native_batch_norm.default", (x,), (x,))
        assert Kernels(Streams(H100)).estimate([signature]) == [None]


def _channels_last(tensor: TensorMeta) -> TensorMeta:
    _, channels, height, width = tensor.shape
    return tensor._replace(stride=(channels * height * width, 1, channels * width, channels))


def test_batch_norm_with_channels_last_passes_elements_through_the_processors(meta: Meta) -> None:
    """PyTorch's own kernels take 0.89 elements a cycle and processor after 8 us, backwards 1.16 after 18 us."""
    x, weight = _channels_last(meta((128, 256, 56, 56))), meta((256,), "float32")
    elements = 128 * 256 * 56 * 56
    forward = Signature("aten.native_batch_norm.default", (x, weight, weight), (x, weight, weight))
    assert _us(forward) == pytest.approx(8 + elements / (0.89 * ISSUE))
    backward = Signature("aten.native_batch_norm_backward.default", (x, x, weight), (x, weight, weight))
    assert _us(backward) == pytest.approx(18 + elements / (1.16 * ISSUE))


@pytest.mark.parametrize(("channels", "slower"), [(128, None), (72, 1.9)])
def test_the_librarys_batch_norm_is_slow_for_odd_numbers_of_channels(
    meta: Meta, channels: int, slower: float | None
) -> None:
    """With channels last, 72 channels in float16 take 1.9 times as long as their bytes; 128 are left to the bandwidth."""
    x, weight = _channels_last(meta((64, channels, 56, 56), "float16")), meta((channels,), "float32")
    nbytes = 2 * 64 * channels * 56 * 56
    for name, passes in (("native_batch_norm", 3), ("cudnn_batch_norm_backward", 5)):
        signature = Signature(f"aten.{name}.default", (x, x, weight), (x, weight, weight))
        (answer,) = Kernels(Streams(H100)).estimate([signature])
        if slower is None:
            assert answer is None
        else:
            assert answer is not None
            assert answer.ms * 1e3 == pytest.approx(SHORTEST + slower * passes * nbytes / STREAM)


def test_lists_are_launched_by_320_chunks(meta: Meta) -> None:
    """Ten halves of 2^22 - 1 elements are 640 chunks, two launches of 32 steps that wait; in float32 the bytes decide."""
    length = 2**22 - 1
    half, single = meta((length,)), meta((length,), "float32")
    for item, tensor in ((2, half), (4, single)):
        tensors = (tensor,) * 10
        us = _us(Signature("aten._foreach_mul_.Scalar", tensors, (), (("scalar", 0.9),), mutates=tuple(range(10))))
        waits, read = 2 * 32 * (0.6 + 0.35 * 2), 2 * 10 * length * item / (PEAK * 0.75)
        assert us == pytest.approx(SHORTEST + max(waits, read))
        assert (waits > read) == (item == 2)


def test_lists_that_are_loaded_four_elements_at_once_wait_less(meta: Meta) -> None:
    """0.4 us less for each of 64 steps: on an H100 the bytes decide then, on a GPU with four times its bandwidth the waits."""
    tensors = (meta((2**22,)),) * 10
    scaled = Signature("aten._foreach_mul_.Scalar", tensors, (), (("scalar", 0.9),), mutates=tuple(range(10)))
    assert _us(scaled) == pytest.approx(SHORTEST + 4 * 10 * 2**22 / (PEAK * 0.75))
    assert _us(scaled, FAST) == pytest.approx(SHORTEST + 2 * 32 * (0.2 + 0.35 * 2))


def test_clipping_reads_norms_and_writes_gradients(meta: Meta) -> None:
    """A norm only reads its list; a factor on the device makes no list of its own."""
    tensors, one = (meta((2**22,)),) * 10, meta((), "float32")
    norm = Signature("aten._foreach_norm.Scalar", tensors, (one,) * 10)
    assert _us(norm, FAST) == pytest.approx(SHORTEST + 2 * 32 * (0.2 + 0.35))
    scaled = Signature("aten._foreach_mul_.Tensor", (*tensors, one), (), mutates=tuple(range(10)))
    assert _us(scaled, FAST) == pytest.approx(SHORTEST + 2 * 32 * (0.2 + 0.35 * 2))


@pytest.mark.parametrize(("amsgrad", "lists"), [(False, 4), (True, 5)])
def test_fused_adam_reads_and_writes_its_lists(meta: Meta, amsgrad: bool, lists: int) -> None:
    """Parameters, gradients and two states (three): all are read, all but the gradients written, 0.9 us of arithmetic."""
    tensors, step = (meta((2**22,)),) * 10, meta((), "float32")
    adam = Signature(
        "aten._fused_adamw_.default",
        (*tensors * lists, *(step,) * 10),
        (),
        (("amsgrad", amsgrad),),
        mutates=tuple(range(10)),
    )
    assert _us(adam, FAST) == pytest.approx(SHORTEST + 2 * 32 * (0.2 + 0.35 * (2 * lists - 1) + 0.9))


def test_bilinear_resampling_is_paid_for_the_large_tensor(meta: Meta) -> None:
    """2.4 cycles for an element of it, 3.4 for its gradient; tensors of one size are copied, which is another rule's."""
    small, large = meta((8, 64, 64, 64)), meta((8, 64, 256, 256))
    elements = 8 * 64 * 256 * 256
    up = Signature("aten.upsample_bilinear2d.default", (small,), (large,))
    assert _us(up) == pytest.approx(SHORTEST + elements * 2.4 / ISSUE)
    down = Signature("aten.upsample_bilinear2d_backward.default", (large,), (small,))
    assert _us(down) == pytest.approx(SHORTEST + elements * 3.4 / ISSUE)
    assert Kernels(Streams(H100)).estimate([Signature(up.name, (large,), (large,))]) == [None]


def test_a_softmax_over_planes_walks_positions(meta: Meta) -> None:
    """Three reads and a write forward, four reads and a write backward; a strided input is copied first."""
    x = meta((8, 21, 512, 512), "float32")
    nbytes = 4 * 8 * 21 * 512 * 512
    forward = Signature("aten._log_softmax.default", (x,), (x,), (("dim", 1), ("half_to_float", False)))
    assert _us(forward) == pytest.approx(SHORTEST + 4 * nbytes / STREAM)
    backward = Signature("aten._log_softmax_backward_data.default", (x, x), (x,), (("dim", 1),))
    assert _us(backward) == pytest.approx(SHORTEST + 5 * nbytes / STREAM)
    strided = _channels_last(x)
    copied = Streams(H100).copy_us(strided, x)
    assert _us(forward._replace(inputs=(strided,))) == pytest.approx(SHORTEST + copied + 4 * nbytes / STREAM)


def test_an_embeddings_gradient_sorts_and_adds_segments(meta: Meta) -> None:
    """16,384 rows of 1,024 into 50,304: zeros, 105 us of sorting, 0.243 elements a cycle and processor; few are not sorted."""
    gradient, indices, table = meta((16384, 1024)), meta((16384,), "int64"), meta((50304, 1024))
    us = _us(Signature("aten.embedding_dense_backward.default", (gradient, indices), (table,)))
    assert us == pytest.approx(_fill_us(50304 * 2048) + 105 + 2**24 / (0.243 * ISSUE))
    few = Signature("aten.embedding_dense_backward.default", (meta((512, 1024)), meta((512,), "int64")), (table,))
    assert _us(few) == pytest.approx(_fill_us(50304 * 2048) + 4 + 512 * 0.03)


def test_waits_are_cycles(meta: Meta) -> None:
    """A likelihood takes as much longer on an A100 as its clock is slower."""
    scores, labels, one = meta((4096, 100), "float32"), meta((4096,), "int64"), meta((), "float32")
    forward = Signature("aten.nll_loss_forward.default", (scores, labels), (one,))
    assert _us(forward, "a100-sxm-80gb") == pytest.approx(_us(forward) * 1830 / 1410)


def test_amd_and_the_host_are_not_answered(meta: Meta) -> None:
    """The rules hold for NVIDIA's GPUs, and for tensors on them."""
    x = meta((4096, 4096), "float32")
    total = Signature("aten.sum.dim_IntList", (x,), (meta((4096,), "float32"),), (("dim", (0,)),))
    assert Kernels(Streams(load_hardware("mi300x"))).estimate([total]) == [None]
    host = total._replace(inputs=(x._replace(place="cpu"),))
    assert Kernels(Streams(H100)).estimate([host]) == [None]
    assert math.isfinite(_us(total))

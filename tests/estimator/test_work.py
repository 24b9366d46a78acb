"""Operations and bytes of single operators, each worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from autosac.estimator.work import (
    Work,
    attention_shape,
    convolution_flops,
    family,
    kernel_count,
    matmul_shape,
    work_of,
)
from autosac.trace import Scalar, Signature, TensorMeta

Meta = Callable[..., TensorMeta]


def test_mm_counts_two_operations_per_product(mm: Callable[..., Signature]) -> None:
    """[4, 8] x [8, 16]: 2*4*16*8 operations; (32 + 128 + 64) elements of two bytes."""
    work = work_of(mm(4, 16, 8))
    assert (work.flops, work.nbytes, work.arithmetic) == (2 * 4 * 16 * 8, 448, "bfloat16")


def test_outputs_of_several_types_are_fine(meta: Meta) -> None:
    """A bf16 product with a float32 output, and flash attention with its float32 logsumexp, are priced."""
    mixed = Signature("aten.mm.dtype", (meta((4, 8)), meta((8, 16))), (meta((4, 16), "float32"),))
    assert work_of(mixed).flops == 1024
    q = meta((1, 2, 4, 8))
    outputs = (q, meta((1, 2, 4), "float32"), meta((2,), "uint64"))
    flash = Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), outputs)
    assert work_of(flash).flops == 4 * 2 * 4 * 4 * 8


def test_addmm_and_baddbmm_take_their_operands_after_the_bias(meta: Meta) -> None:
    """The first tensor is the addend."""
    addmm = Signature("aten.addmm.default", (meta((16,)), meta((4, 8)), meta((8, 16))), (meta((4, 16)),))
    baddbmm = Signature(
        "aten.baddbmm.default", (meta((3, 4, 16)), meta((3, 4, 8)), meta((3, 8, 16))), (meta((3, 4, 16)),)
    )
    assert work_of(addmm).flops == 1024
    assert work_of(baddbmm).flops == 3 * 1024


def test_float8_and_tf32_choose_the_arithmetic(meta: Meta, mm: Callable[..., Signature]) -> None:
    """`_scaled_mm` runs on the 8-bit units; float32 only on tensor cores when asked."""
    a, b = meta((4, 8), "float8_e4m3fn"), meta((8, 16), "float8_e4m3fn")
    scale = meta((1,), "float32")
    scaled = Signature("aten._scaled_mm.default", (a, b, scale, scale), (meta((4, 16)),))
    assert work_of(scaled).arithmetic == "float8"
    assert work_of(mm(4, 16, 8, "float32")).arithmetic == "float32"
    assert work_of(mm(4, 16, 8, "float32"), tf32=True).arithmetic == "tf32"


def test_what_does_not_look_like_attention_has_its_bytes_only(meta: Meta) -> None:
    """Two tensors, or five dimensions: no operations are known, its tensors are read and written."""
    q, deep = meta((1, 2, 4, 8)), meta((1, 1, 2, 4, 8))
    name = "aten._scaled_dot_product_flash_attention.default"
    for inputs in ((q, q), (deep, deep, deep)):
        assert work_of(Signature(name, inputs, (q,))) == Work("", 0.0, 128 * (len(inputs) + 1), "bfloat16")


def test_grouped_mm_multiplies_every_row_once(meta: Meta) -> None:
    """64 rows over 4 experts of [8, 16]: 2*64*8*16; the weights' gradient contracts over the rows instead."""
    offs, name = meta((4,), "int32"), "aten._grouped_mm.default"
    forward = Signature(name, (meta((64, 8)), meta((4, 8, 16)), offs), (meta((64, 16)),))
    wgrad = Signature(name, (meta((8, 64)), meta((64, 16)), offs), (meta((4, 8, 16)),))
    assert work_of(forward).flops == 2 * 64 * 8 * 16
    assert work_of(wgrad).flops == 2 * 64 * 8 * 16


def test_transposed_operands_are_seen_in_the_strides(meta: Meta) -> None:
    """X @ W.t(): the right operand's rows are contiguous in the weight's columns."""
    weight = TensorMeta((8, 16), (1, 8), "bfloat16")
    shape = matmul_shape(Signature("aten.mm.default", (meta((4, 8)), weight), (meta((4, 16)),)))
    assert shape is not None
    assert (shape.a_transposed, shape.b_transposed) == (False, True)


@pytest.mark.parametrize(("causal", "flops"), [(False, 4 * 2 * 3 * 64 * 64 * 16), (True, 2 * 2 * 3 * 64 * 64 * 16)])
def test_attention_forward_and_its_backward(meta: Meta, causal: bool, flops: int) -> None:
    """Two products of B*H*S*S*D; a causal mask halves them; the backward has five products."""
    q = meta((2, 3, 64, 16))
    arguments = (("is_causal", causal),)
    forward = Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), (q,), arguments)
    backward = Signature(
        "aten._scaled_dot_product_flash_attention_backward.default", (q, q, q, q, q), (q, q, q), arguments
    )
    assert work_of(forward).flops == flops
    assert work_of(backward).flops == 2.5 * flops


@pytest.mark.parametrize(
    ("name", "implementation", "backend"),
    [
        ("aten._flash_attention_forward.default", None, "flash"),
        ("aten._flash_attention_forward.default", "FA3", "cudnn"),
        ("torch_attn._varlen_attn.default", "FA4", "cudnn"),
        ("flex_attention", "FA4", "cudnn"),
        ("flex_attention", None, "flex"),
    ],
)
def test_newer_flash_attention_is_as_fast_as_cudnn(
    meta: Meta, name: str, implementation: str | None, backend: str
) -> None:
    """Whichever operator runs it."""
    q = meta((2, 64, 3, 16))
    arguments = () if implementation is None else (("implementation", implementation),)
    shape = attention_shape(Signature(name, (q, q, q), (q,), arguments))
    assert shape is not None and shape.backend == backend


def test_ragged_attention_splits_the_tokens_over_the_documents(meta: Meta) -> None:
    """128 tokens in 4 documents of 32: 4 * 4*2*32*32*8 operations."""
    q, lengths = meta((128, 2, 8)), meta((5,), "int32")
    signature = Signature("aten._flash_attention_forward.default", (q, q, q, lengths, lengths), (q,))
    shape = attention_shape(signature)
    assert shape is not None
    assert (shape.batch, shape.query_length, shape.heads) == (4, 32, 2)
    assert shape.flops == 4 * (4 * 2 * 32 * 32 * 8)


def test_low_level_attention_has_length_before_heads(meta: Meta) -> None:
    """`_efficient_attention_forward` takes [batch, length, heads, size]; custom mask 1 is causal."""
    q = meta((2, 64, 3, 16))
    arguments = (("custom_mask_type", 1),)
    signature = Signature("aten._efficient_attention_forward.default", (q, q, q), (q,), arguments)
    shape = attention_shape(signature)
    assert shape is not None
    assert (shape.query_length, shape.heads, shape.causal, shape.backend) == (64, 3, True, "efficient")


def test_convolution_and_its_backward(meta: Meta) -> None:
    """3x3 from 4 to 8 channels at 2x16x16 places:

    2*2*8*16*16*4*9; the backward does it once per wanted gradient.
    """
    x, w, y = meta((2, 4, 16, 16)), meta((8, 4, 3, 3)), meta((2, 8, 16, 16))
    once = 2 * (2 * 8 * 16 * 16) * (4 * 9)
    assert work_of(Signature("aten.convolution.default", (x, w), (y,))).flops == once
    both = Signature("aten.convolution_backward.default", (y, x, w), (x, w), (("output_mask", (True, True, False)),))
    weight_only = both._replace(arguments=(("output_mask", (False, True, True)),))
    assert work_of(both).flops == 2 * once
    assert work_of(weight_only).flops == once


@pytest.mark.parametrize(
    ("data", "weight", "expected"),
    [
        ((1, 2, 4, 4), (2, 1, 3, 3), (2 * 2 * 16 * 9, True)),
        ((1, 1, 4, 4), (2, 1, 3, 3), (2 * 2 * 16 * 9, False)),  # of one channel: an ordinary one
        ((1, 4, 4, 4), (2, 2, 3, 3), (2 * 2 * 16 * 18, False)),  # in groups of two
        ((1, 2, 4), (2, 1, 3), (2 * 2 * 4 * 3, True)),
        ((2, 4), (2, 1), (0, False)),
    ],
)
def test_depthwise_convolutions(
    meta: Meta, data: tuple[int, ...], weight: tuple[int, ...], expected: tuple[float, bool]
) -> None:
    """Operations of each output for its own channel; a forward that looks like one is told by the channels of the data."""
    out = meta((data[0], weight[0], *data[2:]))
    assert convolution_flops(Signature("aten.convolution.default", (meta(data), meta(weight)), (out,))) == expected


def test_the_parts_of_a_convolutions_backward(meta: Meta) -> None:
    """As many gradients as are asked for, or come out, two at most. A transposed one counts its data."""
    x, w, y = meta((1, 2, 4, 4)), meta((2, 3, 3, 3)), meta((1, 3, 8, 8))
    name, one = "aten.convolution_backward.default", 2 * 2 * 16 * 27
    transposed = (("transposed", True),)
    assert convolution_flops(Signature(name, (y, x, w), (x, w, w), transposed)) == (2 * one, False)
    assert convolution_flops(Signature(name, (y, x, w), (x,), transposed)) == (one, False)
    masked = (*transposed, ("output_mask", (False, True, True)))
    assert convolution_flops(Signature(name, (y, x, w), (x, w, w), masked)) == (one, False)
    assert convolution_flops(Signature(name, (y, x), (x,), transposed)) == (0.0, False)


def test_elementwise_reads_and_writes(meta: Meta) -> None:
    """add: two reads and a write; a broadcast operand (stride 0) counts only what it really holds."""
    x = meta((64, 32), "float32")
    row = TensorMeta((64, 32), (0, 1), "float32")
    assert work_of(Signature("aten.add.Tensor", (x, x), (x,))).nbytes == 3 * 64 * 32 * 4
    assert work_of(Signature("aten.add.Tensor", (x, row), (x,))).nbytes == 2 * 64 * 32 * 4 + 32 * 4


def test_a_cast_counts_both_types(meta: Meta) -> None:
    """bf16 to float32: two bytes read, four written."""
    cast = Signature("aten._to_copy.default", (meta((100,)),), (meta((100,), "float32"),))
    assert work_of(cast).nbytes == 600


def test_copy_does_not_read_its_destination(meta: Meta) -> None:
    """copy_ and the foreach form: one read, one write."""
    x = meta((100,), "float32")
    assert work_of(Signature("aten.copy_.default", (x, x), (x,), mutates=(0,))).nbytes == 800
    assert work_of(Signature("aten._foreach_copy_.default", (x, x, x, x), (), mutates=(0, 1))).nbytes == 1600


def test_fills_only_write(meta: Meta) -> None:
    """zero_ and a list of them: no reads."""
    x = meta((100,), "float32")
    assert work_of(Signature("aten.zero_.default", (x,), (x,), mutates=(0,))).nbytes == 400
    assert work_of(Signature("aten._foreach_zero_.default", (x, x), (), mutates=(0, 1))).nbytes == 800


def test_embedding_reads_only_what_it_outputs(meta: Meta) -> None:
    """Ten rows of 16 float32 from a table of a million: 2*640 bytes and ten indices."""
    signature = Signature(
        "aten.embedding.default",
        (meta((10**6, 16), "float32"), meta((10,), "int64")),
        (meta((10, 16), "float32"),),
    )
    assert work_of(signature).nbytes == 2 * 640 + 80


def test_foreach_counts_all_tensors(meta: Meta) -> None:
    """In-place foreach add over two lists of two: four reads, two writes."""
    x = meta((100,), "float32")
    signature = Signature("aten._foreach_add_.List", (x, x, x, x), (), (), mutates=(0, 1))
    assert work_of(signature).nbytes == 6 * 400


def test_fused_adamw_does_not_write_gradients(meta: Meta) -> None:
    """Parameters, gradients, two moments: four reads, three writes."""
    x = meta((100,), "float32")
    signature = Signature("aten._fused_adamw_.default", (x, x, x, x), (), (), mutates=(0, 1, 2, 3))
    assert work_of(signature).nbytes == 7 * 400


def test_host_tensors_cost_no_device_memory(meta: Meta) -> None:
    """A scalar that lives on the host travels with the launch."""
    x, scalar = meta((100,), "float32"), meta((), "float64", "cpu")
    assert work_of(Signature("aten.mul.Tensor", (x, scalar), (x,))).nbytes == 800


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten._foreach_addcdiv_.ScalarList", "elementwise"),
        ("aten.relu_.default", "elementwise"),
        ("aten.__and__.Tensor", "elementwise"),
        ("aten.native_layer_norm_backward.default", "norm_backward"),
        ("aten._softmax.default", "softmax"),
        ("aten.index_put_.default", "scatter"),
        ("fsdp.all_gather_copy_in.default", "elementwise"),
        ("mylib.fancy.default", ""),
        ("triton.triton_poi_fused_add_0", "elementwise"),
        ("triton.my_kernel", ""),
    ],
)
def test_families(name: str, expected: str) -> None:
    """Overloads, in-place forms and foreach forms share the family of their base name."""
    assert family(name) == expected


def test_depthwise_convolution_and_its_backward(meta: Meta) -> None:
    """3x3 on 8 channels each for itself, 2*8*16*16 places: 9 products a place, in float32 on the ordinary units."""
    x, w = meta((2, 8, 16, 16)), meta((8, 1, 3, 3))
    once = 2 * (2 * 8 * 16 * 16) * 9
    forward = work_of(Signature("aten.convolution.default", (x, w), (x,), (("groups", 8),)))
    mask = (("output_mask", (True, True, False)),)
    backward = work_of(Signature("aten.convolution_backward.default", (x, x, w), (x, w), mask))
    assert (forward.family, forward.flops, forward.arithmetic) == ("depthwise", once, "float32")
    assert (backward.family, backward.flops, backward.arithmetic) == ("depthwise", 2 * once, "float32")


def test_a_convolution_of_one_channel_is_not_depthwise(meta: Meta) -> None:
    """One channel in, 8 out: the weight has one input channel because the data has."""
    x, w, y = meta((2, 1, 16, 16)), meta((8, 1, 3, 3)), meta((2, 8, 16, 16))
    assert work_of(Signature("aten.convolution.default", (x, w), (y,))).family == "convolution"
    backward = Signature("aten.convolution_backward.default", (y, x, w), (x, w))
    assert work_of(backward).family == "convolution"


def test_a_transposed_convolution_multiplies_at_its_input(meta: Meta) -> None:
    """8 to 4 channels, 8x8 to 16x16 places, 2x2: each of the 2*8*8*8 inputs meets 4*4 weights, in the backward as well."""
    x, w, y = meta((2, 8, 8, 8)), meta((8, 4, 2, 2)), meta((2, 4, 16, 16))
    once = 2 * (2 * 8 * 8 * 8) * (4 * 2 * 2)
    transposed = (("transposed", True),)
    assert work_of(Signature("aten.convolution.default", (x, w), (y,), transposed)).flops == once
    backward = Signature("aten.convolution_backward.default", (y, x, w), (x, w), transposed)
    assert work_of(backward).flops == 2 * once
    weight_only = backward._replace(arguments=(*transposed, ("output_mask", (False, True, False))))
    assert work_of(weight_only).flops == once


def test_grouped_mm_of_three_dimensions(meta: Meta) -> None:
    """Four products of [8, 32] and [32, 16]; with the columns in groups instead, 64 of them are 16 for each."""
    offs, name = meta((4,), "int32"), "aten._grouped_mm.default"
    stacked = Signature(name, (meta((4, 8, 32)), meta((4, 32, 16))), (meta((4, 8, 16)),))
    columns = Signature(name, (meta((4, 8, 32)), meta((32, 64)), offs), (meta((8, 64)),))
    uneven = columns._replace(inputs=(meta((4, 8, 32)), meta((32, 63)), offs))
    for signature in (stacked, columns, uneven):
        shape = matmul_shape(signature)
        assert shape is not None and (shape.batch, shape.m, shape.n, shape.k) == (4, 8, 16, 32)
    assert work_of(stacked).flops == 2 * 4 * 8 * 16 * 32


def test_some_families_pass_over_their_memory_more_than_once(meta: Meta) -> None:
    """A norm's backward reads its rows again for the gradients of its weights: 1.5 times; a sort takes four passes."""
    x, statistics = meta((8, 64), "float32"), meta((8, 1), "float32")
    norm = Signature("aten.native_layer_norm_backward.default", (x, x, statistics, statistics), (x,))
    assert work_of(norm).nbytes == 1.5 * (3 * 8 * 64 * 4 + 2 * 8 * 4)
    order = meta((8, 64), "int64")
    assert work_of(Signature("aten.sort.default", (x,), (x, order))).nbytes == 4 * (2 * 8 * 64 * 4 + 8 * 64 * 8)


def test_some_operators_launch_several_kernels(meta: Meta) -> None:
    """A layer norm's backward: one for the input's gradient, one more for those of weights; an addition has one."""
    x, w = meta((8, 16)), meta((16,))
    name = "aten.native_layer_norm_backward.default"
    assert kernel_count(Signature(name, (x, x, w, w), (x,))) == 1
    assert kernel_count(Signature(name, (x, x, w, w, w, w), (x, w, w))) == 2
    assert kernel_count(Signature("aten.native_group_norm.default", (x,), (x, w, w))) == 2
    assert kernel_count(Signature("aten.native_group_norm.default", (x, w, w), (x, w, w))) == 3
    assert kernel_count(Signature("aten.add_.Tensor", (x, x), (x,))) == 1


def _meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), "bfloat16")


@pytest.mark.parametrize(
    ("name", "arguments", "share"),
    [
        ("torch_attn._varlen_attn.default", (("is_causal", True), ("window_size", (-1, 0))), 1.0),
        ("torch_attn._varlen_attn.default", (("window_size", (2, 0)),), 21 / 64),
        ("torch_attn._varlen_attn.default", (("window_size", (1, 1)),), 22 / 64),
        ("torch_attn._varlen_attn.default", (("window_size", (-1, -1)),), 1.0),
        ("aten._flash_attention_forward.default", (("is_causal", True), ("window_size_left", 2)), 21 / 32),
        ("aten._flash_attention_forward.default", (("is_causal", True), ("window_size_left", 7)), 1.0),
    ],
)
def test_windows_leave_out_pairs(name: str, arguments: tuple[tuple[str, Scalar], ...], share: float) -> None:
    """Of 8 positions, with so many to the left and right: the pairs counted by hand, beside what is computed without."""
    signature = Signature(name, (_meta(8, 2, 16),) * 3, (_meta(8, 2, 16),), arguments)
    shape = attention_shape(signature)
    assert shape is not None and shape.share == share
    assert shape.flops == 2 * 2 * 64 * (0.5 if shape.causal else 1) * share * 32


def test_masks_of_flexible_attention_leave_out_pairs() -> None:
    """What the capture says of the mask; without, it is causal."""
    heads = (_meta(1, 2, 8, 16),) * 3
    shapes = [attention_shape(Signature("flex_attention", heads, heads[:1], a)) for a in ((), (("computed", 0.125),))]
    assert [shape and shape.flops for shape in shapes] == [2 * 2 * 64 * 0.5 * 32, 2 * 2 * 64 * 0.125 * 32]

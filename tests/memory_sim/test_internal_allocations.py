"""Temporaries inside CUDA operators, worked out by hand from the sources that allocate them."""

from __future__ import annotations

from typing import Any

import pytest

from autosac.memory_sim import Category, WorkspaceModel, replay_allocator, simulate_memory
from autosac.memory_sim.tensor_sizes import dense_bytes, is_contiguous, transposed
from autosac.trace import Scalar, Signature, TensorMeta

HOPPER = WorkspaceModel.for_gpu((9, 0), 132)
AMPERE_CONSUMER = WorkspaceModel.for_gpu((8, 6), 84)


def dense(*shape: int, dtype: str = "bfloat16") -> TensorMeta:
    """A contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return TensorMeta(shape, tuple(reversed(stride)), dtype)


def heads_first(batch: int, sequence: int, heads: int, size: int, dtype: str = "bfloat16") -> TensorMeta:
    """(B, H, S, D) with the memory of (B, S, H, D), as models make it."""
    return transposed(dense(batch, sequence, heads, size, dtype=dtype), 1, 2)


def blocks(
    name: str,
    inputs: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta, ...] = (),
    model: WorkspaceModel = HOPPER,
    **arguments: Scalar,
) -> tuple[int, ...]:
    """The blocks of one operator."""
    return model.op_workspace_blocks(Signature(name, inputs, outputs, tuple(arguments.items())))


def test_flash_backward_by_hand() -> None:
    """B=2, S=1000 (rounded to 1024), H=8, D=80 (rounded to 96): dO*O sums 2*1024*8, dq 2*1024*8*96 floats."""
    qkv = heads_first(2, 1000, 8, 80)
    sums, dq = 2 * 1024 * 8 * 4, 2 * 1024 * 8 * 96 * 4
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    assert blocks(name, (qkv,) * 5) == (sums, dq)


def test_flash_backward_copies_what_is_not_sequence_first() -> None:
    """DO and O laid out as (B, H, S, D) are copied: 2*128*4*64 elements of two bytes each."""
    other, good = dense(2, 4, 128, 64), heads_first(2, 128, 4, 64)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    copied = blocks(name, (other, good, good, good, other))
    assert copied[:2] == (2 * 128 * 4 * 64 * 2,) * 2
    assert len(copied) == 4


def test_flash_backward_with_fewer_key_heads() -> None:
    """8 query heads on 2 key heads: dk and dv for all 8, in two bytes."""
    query, key = heads_first(1, 256, 8, 64), heads_first(1, 256, 2, 64)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    assert blocks(name, (query, query, key, key, query))[2:] == (256 * 8 * 64 * 2,) * 2


def test_flash_backward_of_sequences_of_different_lengths() -> None:
    """300 tokens in two sequences: 300 + 2*128 rows of 4 heads, 64 columns."""
    tokens, starts = dense(300, 4, 64), dense(3, dtype="int32")
    inputs = (tokens,) * 5 + (dense(4, 300, dtype="float32"), starts, starts)
    rows = 300 + 2 * 128
    expected = (4 * rows * 4, 4 * rows * 64 * 4)
    assert blocks("aten._flash_attention_backward.default", inputs) == expected


def test_newer_flash_backward_by_hand() -> None:
    """D=80 takes 96 columns and tiles of 64 queries: 2*1024 rows of 8 heads, two sums and dq in fp32. 2 key heads: dk and dv
    in fp32, in tiles of 128 keys. FlashAttention-4 has tiles of 128 and needs no more columns than a multiple of 32.
    """
    query, key = heads_first(2, 1000, 8, 80), heads_first(2, 1000, 2, 80)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    sums = 8 * 2 * 1024 * 4
    third = blocks(name, (query,) * 5, implementation="FA3", is_causal=True)
    assert third == (sums, sums, sums * 96)
    grouped = blocks(name, (query, query, key, key, query), implementation="FA3")
    assert grouped == (*third, *(2 * 2 * 1024 * 96 * 4,) * 2)
    narrow = heads_first(2, 1000, 8, 40)
    assert blocks(name, (narrow,) * 5, implementation="FA4") == (sums, sums, sums * 64)


@pytest.mark.parametrize(
    ("arguments", "tile"),
    [({}, 80), ({"is_causal": True}, 64), ({"window_size_left": 64, "window_size_right": 0}, 64)],
)
def test_tiles_of_the_newer_flash_backward(arguments: dict[str, Scalar], tile: int) -> None:
    """Heads of 128: 80 queries where each reaches all keys, else 64; 160 positions are 2 of the former, 3 of the latter."""
    x = heads_first(1, 160, 1, 128)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    rows = -(-160 // tile) * tile
    assert blocks(name, (x,) * 5, implementation="FA3", **arguments)[0] == rows * 4


def test_backward_of_packed_sequences() -> None:
    """PyTorch's `varlen_attn` runs the kernels of FlashAttention: 300 tokens in two sequences, in whole tiles of 128."""
    tokens, starts = dense(300, 4, 64), dense(3, dtype="int32")
    inputs = (tokens,) * 5 + (dense(4, 300, dtype="float32"), starts, starts)
    name = "torch_attn._varlen_attn_backward.default"
    rows = 300 + 2 * 128
    assert blocks(name, inputs) == (4 * rows * 4, 4 * rows * 64 * 4)
    sums = 4 * 640 * 4  # 300 + 2 * 128, rounded up
    assert blocks(name, inputs, implementation="FA3") == (sums, sums, sums * 64)


def test_efficient_backward_in_fp32() -> None:
    """B=1, H=2, S=128, D=64: per head 2 tiles of 64*64+4 floats; row sums 1*2*128 floats.

    Before that, the product dO * O (1*128*2*64 floats) lives with the row sums: less than 2*2*4100*4 bytes.
    """
    qkv = heads_first(1, 128, 2, 64, "float32")
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    assert blocks(name, (qkv,) * 4) == (2 * 128 * 4, 2 * 2 * 4100 * 4)


def test_efficient_backward_with_large_heads_in_half() -> None:
    """D=256 has 128x64 tiles: 2*4 of dq (8192+4 floats), dk and dv of 4 splits of 64 rows, 256 columns."""
    qkv = heads_first(1, 256, 1, 256, "float16")
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    floats = 2 * 4 * 8196 + 4 * 64 * (256 + 256)
    assert blocks(name, (qkv,) * 4) == (256 * 4, floats * 4)


def test_efficient_backward_with_values_larger_than_keys() -> None:
    """The larger of D = 64 and 256 chooses the tiles (128x64) and asks for splits: dk has 128 columns there, dv 256."""
    qk, v = heads_first(1, 256, 1, 64, "float16"), heads_first(1, 256, 1, 256, "float16")
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    floats = 2 * 1 * 8196 + 4 * 64 * (128 + 256)
    assert blocks(name, (v, qk, qk, v)) == (256 * 4, floats * 4)


def test_efficient_backward_tiles_depend_on_the_gpu() -> None:
    """D=80 in half precision: 128x128 tiles on Hopper, 128x64 on compute capability 8.6."""
    qkv = heads_first(1, 128, 1, 80, "float16")
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    assert blocks(name, (qkv,) * 4)[1] == (128 * 128 + 4) * 4
    assert blocks(name, (qkv,) * 4, model=AMPERE_CONSUMER)[1] == 2 * (128 * 64 + 4) * 4


def test_efficient_forward_accumulates_large_heads() -> None:
    """In half precision D=256 needs an fp32 output, D=128 and fp32 do not."""
    name = "aten._scaled_dot_product_efficient_attention.default"
    assert blocks(name, (heads_first(1, 64, 2, 256),) * 3) == (64 * 2 * 256 * 4,)
    assert blocks(name, (heads_first(1, 64, 2, 128),) * 3) == ()
    assert blocks(name, (heads_first(1, 64, 2, 256, "float32"),) * 3) == ()


def test_cudnn_backward() -> None:
    """Dq in fp32 and one row sum for every query: 2*8*512*(64+1) floats."""
    qkv = heads_first(2, 512, 8, 64)
    name = "aten._scaled_dot_product_cudnn_attention_backward.default"
    assert blocks(name, (qkv,) * 4) == (2 * 8 * 512 * 65 * 4,)


def test_embedding_backward() -> None:
    """4096 indices into 1000 rows of 16: 409 + 1000 partial rows, lists of 4096, 1000 and 1409 indices."""
    inputs = (dense(4, 1024, 16), dense(4, 1024, dtype="int64"))
    output = (dense(1000, 16),)
    expected = (32768, 32768, 32768, 8000, 8000, 1409 * 8, 1409 * 16 * 4)
    assert blocks("aten.embedding_dense_backward.default", inputs, output) == expected
    few = (dense(3, 1024, 16), dense(3, 1024, dtype="int64"))
    assert blocks("aten.embedding_dense_backward.default", few, output) == ()
    assert len(blocks("aten.embedding_dense_backward.default", few, output, scale_grad_by_freq=True)) == 8


def test_index_put() -> None:
    """Indices of (5, 1) and (7,) make 35 positions of 8 bytes, three times; without accumulation nothing."""
    inputs = (dense(10, 10), dense(5, 1, dtype="int64"), dense(7, dtype="int64"), dense(5, 7))
    assert blocks("aten.index_put.default", inputs, accumulate=True) == (280, 280, 280)
    assert blocks("aten.index_put.default", inputs, accumulate=False) == ()


def test_norm_backward() -> None:
    """70,016 rows of 64 columns: 64/32=2 blocks across, min(32768/2, 70016/32)=2188 along, twice."""
    x = dense(70016, 64)
    stats = dense(70016, 1, dtype="float32")
    weight = dense(64)
    inputs, outputs = (x, x, stats, stats, weight, weight), (x, weight, weight)
    name = "aten.native_layer_norm_backward.default"
    assert blocks(name, inputs, outputs) == (2188 * 64 * 2,) * 2
    assert blocks("aten._fused_rms_norm_backward.default", inputs, outputs[:2]) == (2188 * 64 * 2,)
    small = dense(65536, 64)
    assert blocks(name, (small, small), outputs) == ()
    wide = dense(70016, 4096)
    assert blocks(name, (wide, wide), (wide, dense(4096), dense(4096))) == ()


@pytest.mark.parametrize(
    ("operator", "positions"),
    [
        ("_log_softmax", {0}),
        ("_log_softmax_backward_data", {0, 1}),
        ("_softmax", {0}),
        ("_softmax_backward_data", {0, 1}),
        ("embedding_dense_backward", {0, 1}),
        ("native_layer_norm", {0, 1, 2}),
        ("native_layer_norm_backward", {0, 1}),
        ("mm", set()),
    ],
)
def test_which_inputs_are_copied(operator: str, positions: set[int]) -> None:
    """With the n-th of four inputs transposed, an operator copies it where its kernel needs it contiguous."""
    inputs = [dense(2, 3, dtype="int64") for _ in range(4)]
    for position in range(4):
        changed = (*inputs[:position], transposed(dense(2, 3 + position), 0, 1), *inputs[position + 1 :])
        expected = (2 * (3 + position) * 2,) if position in positions else ()
        if (operator, position) == ("embedding_dense_backward", 1):
            changed = (inputs[0], transposed(dense(2, 4, dtype="int64"), 0, 1), *inputs[2:])
            expected = (2 * 4 * 8,)
        assert blocks(f"aten.{operator}.default", changed, (dense(1000, 16),)) == expected, position


def test_copies_of_inputs_that_are_not_contiguous() -> None:
    """log_softmax of a transposed tensor copies its 6 floats; of a contiguous one nothing."""
    x = dense(2, 3, dtype="float32")
    assert blocks("aten._log_softmax.default", (transposed(x, 0, 1),)) == (24,)
    assert blocks("aten._log_softmax.default", (x,)) == ()


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1), (1, 7), True),
        ((0, 3), (9, 9), True),
        ((), (), True),
    ],
)
def test_is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...], expected: bool) -> None:
    """Dimensions of size 1 and empty tensors do not matter."""
    assert is_contiguous(TensorMeta(shape, stride, "float32")) is expected
    assert dense_bytes(TensorMeta(shape, stride, "no such type")) == 0


def test_temporaries_in_timeline_and_allocator(builder: Any) -> None:
    """A flash backward's temporaries come on top of its outputs, noted before or after it, and are gone."""
    qkv = heads_first(1, 1024, 8, 64)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    signature = Signature(name, (qkv,) * 5, (qkv,))
    temporary = 1024 * 8 * 4 + 1024 * 8 * 64 * 4
    nbytes = dense_bytes(qkv)
    for outputs_first in (True, False):
        b = builder()
        if outputs_first:
            out = b.alloc(nbytes, op=name)
            b.op(signature, [], [out])
        else:
            b.op(signature, [], [0])
            out = b.alloc(nbytes, op=name)
        b.free(out)
        trace = b.build()
        timeline = simulate_memory(trace, workspaces=HOPPER)
        assert (timeline.peak_bytes, timeline.live_bytes.max()) == (nbytes + temporary, nbytes)
        peak = timeline.peak()
        assert (peak.op, peak.event) == (name, 1)
        assert peak.by_category[Category.WORKSPACE] == temporary
        assert peak.largest[0].op == f"{name} (temporary)"
        report = replay_allocator(trace, workspaces=HOPPER)
        assert report.allocated_peak_bytes == nbytes + temporary
        assert report.allocated_bytes[-1] == 0


def test_reduction_over_rows() -> None:
    """16,448 rows of 1,280 half-precision columns on 132 SMs stage 1,280 x 212 x 128 floats: 132.5 MiB.

    Four outputs a thread: blocks of 32 x 4 threads, 1280 / 4 / 32 = 10 of them across; each thread has 16448 / 4
    = 4112 rows. 132 x (2048 / 128) = 2112 blocks fit, so an output is split in ceil(2112 / 10) = 212 (fewer than
    4112 / 16 = 257), and every thread of a block keeps its 4 sums: 32 x 4 slots for each output.
    """
    x, total = dense(16448, 1280, dtype="float16"), dense(1, 1280, dtype="float16")
    assert blocks("aten.sum.dim_IntList", (x,), (total,), dim=(0,), keepdim=True) == (1280 * 212 * 128 * 4, 40)
    three, one = dense(64, 257, 1280, dtype="float16"), dense(1280, dtype="float16")
    assert blocks("aten.sum.dim_IntList", (three,), (one,), dim=(0, 1)) == (1280 * 212 * 128 * 4, 40)


def test_reduction_over_rows_on_a_smaller_gpu() -> None:
    """84 SMs of 1,536 threads hold 84 x 12 = 1008 blocks: 101 for each output."""
    x, total = dense(16448, 1280, dtype="float16"), dense(1280, dtype="float16")
    found = blocks("aten.sum.dim_IntList", (x,), (total,), model=AMPERE_CONSUMER, dim=(0,))
    assert found == (1280 * 101 * 128 * 4, 40)


def test_reduction_over_columns() -> None:
    """2 rows of 2**20 numbers: blocks of 256 x 2 threads, each with 2**20 / 512 = 2048 numbers.

    132 x (2048 / 512) = 528 blocks fit, but 2048 / 16 = 128 for each output leave enough for a thread: 2 x 128 sums.
    """
    x, total = dense(2, 1 << 20, dtype="float32"), dense(2, dtype="float32")
    assert blocks("aten.sum.dim_IntList", (x,), (total,), dim=(1,)) == (2 * 128 * 4, 8)


def test_small_reductions_stage_nothing() -> None:
    """100 rows for each thread block are added up by it alone; whole numbers of other types have no rule."""
    x, total = dense(100, 1280), dense(1280)
    assert blocks("aten.sum.dim_IntList", (x,), (total,), dim=(0,)) == ()
    assert blocks("aten.sum.default", (dense(0),), (dense(),)) == ()


RNN = {"weight_stride0": 4, "mode": 2, "hidden_size": 8, "num_layers": 1}
WEIGHTS = (dense(32, 8), dense(32, 8), dense(32), dense(32))


def test_rnns_copy_what_has_batches_first() -> None:
    """Steps first in memory needs no copy, whichever dimension is called first; 5 x 3 x 8 elements of 4 bytes else."""
    x = dense(3, 5, 8, dtype="float32")
    name = "aten._cudnn_rnn.default"
    assert blocks(name, (x, *WEIGHTS), **RNN, batch_first=True) == (480,)
    assert blocks(name, (transposed(dense(5, 3, 8), 0, 1), *WEIGHTS), **RNN, batch_first=True) == ()
    assert blocks(name, (dense(5, 3, 8), *WEIGHTS), **RNN) == ()


def test_rnn_backward_makes_zeros_for_gradients_that_nobody_gives() -> None:
    """An LSTM's hidden and cell state are 1 x 3 x 8, its output 5 x 3 x 8; the reserve comes last."""
    name = "aten._cudnn_rnn_backward.default"
    x, state = dense(5, 3, 8, dtype="float32"), dense(1, 3, 8, dtype="float32")
    known = (x, *WEIGHTS, dense(576), state, state, x)
    reserve = dense(1000, dtype="uint8")
    assert blocks(name, (*known, x, reserve), **RNN) == (96, 96)
    assert blocks(name, (*known, x, state, reserve), **RNN) == (96,)
    assert blocks(name, (*known, state, state, reserve), **RNN) == (480,)

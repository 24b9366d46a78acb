"""The grids of Reduce.cuh, worked out by hand for 132 processors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.estimator.kernels.sums import Grid
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]


@pytest.mark.parametrize(
    ("shape", "dtype", "dims", "grid"),
    [
        # 32 lanes for a row of 128: 16 rows a block of 512
        ((262144, 128), "float32", (1,), Grid(16384, 512, 4, 1, 0)),
        # 8,192 and more: the warps of a block share a row
        ((1000, 8192), "float32", (1,), Grid(1000, 512, 16, 1, 0)),
        # blocks of 32 x 4 threads hold 128 columns: 32 of them. 2,112 / 32 share each, so that 17 sums meet in a thread
        ((16384, 4096), "bfloat16", (0,), Grid(2112, 128, 63, 66, 17)),
        # 128 columns are one block: all 2,112 share them
        ((200704, 128), "bfloat16", (0,), Grid(2112, 128, 24, 2112, 528)),
        # few rows: no block is shared
        ((256, 1152), "bfloat16", (0,), Grid(9, 128, 64, 1, 0)),
    ],
)
def test_the_grid(meta: Meta, shape: tuple[int, ...], dtype: str, dims: tuple[int, ...], grid: Grid) -> None:
    """Blocks, threads, values of a thread, blocks that share an output, partial sums that a thread adds up."""
    assert Grid.of(meta(shape, dtype), frozenset(dims), 132) == grid


def test_dimensions_that_continue_each_other_are_one(meta: Meta) -> None:
    """[8, 2048, 16, 128] summed over all but the last is [262144, 128]; transposed in memory it is none the less."""
    reduced = frozenset((0, 1, 2))
    flat = Grid.of(meta((262144, 128)), frozenset((0,)), 132)
    assert Grid.of(meta((8, 2048, 16, 128)), reduced, 132) == flat
    moved = TensorMeta((8, 2048, 16, 128), (4194304, 128, 262144, 1), "bfloat16")
    assert Grid.of(moved, reduced, 132) == flat


def test_columns_that_are_odd_are_not_taken_by_four(meta: Meta) -> None:
    """4,095 columns: blocks of 32 x 16 threads, a column each."""
    assert Grid.of(meta((4096, 4095)), frozenset((0,)), 132).threads == 512


@pytest.mark.parametrize(
    ("size", "stride", "threads"),
    [
        (128, 1, 128),  # too few for vectors
        (132, 1, 32),  # 33 vectors of four, in a warp: the power of two below
        (512, 1, 128),
        (512, 2, 512),  # every second one: no vectors
    ],
)
def test_one_sum_of_contiguous_memory_takes_four_at_once(size: int, stride: int, threads: int) -> None:
    """A thread for each vector of the input, if there are more than 128 elements, side by side."""
    data = TensorMeta((size,), (stride,), "float32")
    assert Grid.of(data, frozenset((0,)), 132).threads == threads


def test_a_sum_walks_reads_and_meets(meta: Meta) -> None:
    """16,384 rows of 4,096 halves: one wave of 16 steps, 128 MiB at 78 % of the peak beside, 17 partial sums after."""
    x, out = meta((16384, 4096)), meta((4096,))
    (answer,) = Kernels(Streams(load_hardware("h100-sxm-80gb"))).estimate(
        [Signature("aten.sum.dim_IntList", (x,), (out,), (("dim", (0,)),))]
    )
    assert answer is not None
    walk, read = 1.6 + 0.141 * 16, (2**27 + 8192) / (3350e3 * 0.78)
    expected = 0.72 * 2.6 + (walk**1.6 + read**1.6) ** (1 / 1.6) + 3.6 + 0.47 * 17**0.9
    assert answer.ms * 1e3 == pytest.approx(expected)


def test_all_of_a_tensor_is_one_output(meta: Meta) -> None:
    """A mean without dimensions: vectors along the input, shared by all blocks."""
    grid = Grid.of(meta((346368, 768), "float32"), frozenset((0, 1)), 132)
    assert grid.ctas == grid.blocks and grid.links == -(-grid.ctas // 512)

"""cuDNN's and flexible attention by their tiles: figures worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.tiled_attention import TiledAttention
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
NAME = "aten._scaled_dot_product_cudnn_attention"


def _us(signature: Signature, gpu: str = "h100-sxm-80gb") -> float:
    (answer,) = TiledAttention(load_hardware(gpu)).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def _forward(x: TensorMeta, *more: TensorMeta, **arguments: float | bool) -> Signature:
    return Signature(f"{NAME}.default", (x, x, x, *more), (x,), tuple(arguments.items()))


def test_blocks_and_tiles_are_dealt_to_the_processors(meta: Meta) -> None:
    """264 heads of 1,024 positions: 8 blocks and 64 tiles each on half a processor; heads of 80 fill 128, and so on."""
    for head, tile in ((64, 1.08), (80, 1.59), (128, 1.59), (160, 2.29), (192, 2.29), (256, 2.99)):
        expected = 7.5 + 2 * (8 * 1.39 + 64 * tile)
        assert _us(_forward(meta((33, 8, 1024, head)))) == pytest.approx(expected)


def test_causal_blocks_are_dealt_in_their_order(meta: Meta) -> None:
    """132 heads of 256 positions: a short and a long block each. The first 66 heads fill all processors; half of those that
    had a long block get another long one.
    """
    us = _us(_forward(meta((132, 1, 256, 64)), is_causal=True))
    assert us == pytest.approx(7.5 + 2 * (1.39 + (1 + 1.16) * 1.08))


def test_many_heads_before_the_last_ones_keep_all_processors_busy(meta: Meta) -> None:
    """Beside the 528 heads whose blocks are dealt one by one, 66 more add both of their blocks on half of the processors."""
    short, long = (1.39 + tiles * 1.08 for tiles in (1.16, 2.16))
    few, more = (_us(_forward(meta((heads, 1, 256, 64)), is_causal=True)) for heads in (528, 594))
    assert more - few == pytest.approx((short + long) / 2)


def test_a_last_round_is_as_long_as_any(meta: Meta) -> None:
    """133 blocks on 132 processors take two rounds; one head of 8,192 positions, 64 blocks, takes one of 64 tiles."""
    block = 1.39 + 1.08
    assert _us(_forward(meta((133, 1, 128, 64)))) == pytest.approx(7.5 + 2 * block)
    assert _us(_forward(meta((1, 1, 8192, 64)))) == pytest.approx(7.5 + 1.39 + 64 * 1.08)


def test_dropout_and_masks_cost_at_every_tile(meta: Meta) -> None:
    """2.73 and 3.15 times the time of a tile."""
    x, mask = meta((33, 8, 1024, 64)), meta((33, 1, 1024, 1024))
    dropped, masked = _us(_forward(x, dropout_p=0.1)), _us(_forward(x, mask))
    assert dropped == pytest.approx(7.5 + 2 * (8 * 1.39 + 64 * 2.73 * 1.08))
    assert masked == pytest.approx(7.5 + 2 * (8 * 1.39 + 64 * 3.15 * 1.08))


def test_a_backward_accumulates_in_float32(meta: Meta) -> None:
    """Its own start and tiles, blocks that depend on the size of heads, and 14 bytes for each element of the queries."""
    x, log = meta((33, 8, 1024, 64)), meta((33, 8, 1024, 1), "float32")
    us = _us(Signature(f"{NAME}_backward.default", (x, x, x, x, x, log), (x, x, x)))
    tiles = 2 * (8 * 5.11 / 2 + 64 * 2.81)
    assert us == pytest.approx(25.8 + tiles + 14 * 264 * 1024 * 64 / (3350e3 * 0.88))


def test_a_causal_backward_begins_with_the_longest_blocks(meta: Meta) -> None:
    """132 heads of 256 positions: keys 0 to 127 meet two tiles of queries, the others one. Half of the processors that had a
    long block get another long one.
    """
    x, log = meta((132, 1, 256, 64)), meta((132, 1, 256, 1), "float32")
    call = Signature(f"{NAME}_backward.default", (x, x, x, x, x, log), (x, x, x), (("is_causal", True),))
    long = 5.11 / 2 + 2.10 * 2.81
    sums = 14 * 132 * 256 * 64 / (3350e3 * 0.88)
    assert _us(call) == pytest.approx(25.8 + 2 * long + sums)


def test_a_window_leaves_out_tiles(meta: Meta) -> None:
    """FlashAttention-3 with a window of 128 keys before each query: its 128 x 1,024 pairs, less half a tile's, are 7.5 tiles;
    8 more are half empty at either end, and 8 on the diagonal cost 92 %.
    """
    x = meta((33, 8, 1024, 64))
    arguments = (("is_causal", True), ("implementation", "FA3"), ("window_size", (127, 0)))
    us = _us(Signature("aten._scaled_dot_product_flash_attention.default", (x, x, x), (x,), arguments))
    pairs = 128 * 129 // 2 + 896 * 128
    assert us == pytest.approx(6.2 + 2 * (8 * 2.73 + (pairs / 128**2 + 8 - 8 * 0.08) * 1.084))


def test_newer_flash_attention_has_tiles_of_its_own(meta: Meta) -> None:
    """FlashAttention-3's blocks of heads of 128 and of 256."""
    for head, tile in ((128, 1.593), (256, 3.731)):
        x = meta((33, 8, 1024, head))
        call = Signature(
            "aten._scaled_dot_product_flash_attention.default", (x, x, x), (x,), (("implementation", "FA3"),)
        )
        assert _us(call) == pytest.approx(6.2 + 2 * (8 * 2.73 + 64 * tile))


def test_blackwell_takes_two_blocks_at_a_time(meta: Meta) -> None:
    """148 heads of 1,024 positions on 148 processors: four pairs of blocks each, of eight tiles; a head more adds a round."""
    for heads, rounds in ((148, 4), (149, 5)):
        us = _us(_forward(meta((heads, 1, 1024, 128))), "gb200-186gb")
        assert us == pytest.approx(8.5 + rounds * 2 * (2.29 + 8 * 0.668))


def test_causal_blocks_are_dealt_evenly_on_blackwell(meta: Meta) -> None:
    """One head for each processor: 8 blocks, 36 tiles, of which 8 cost 2.46 times as much."""
    us = _us(_forward(meta((148, 1, 1024, 128)), is_causal=True), "gb200-186gb")
    assert us == pytest.approx(8.5 + 8 * 2.29 + (36 + 8 * 1.46) * 0.668)


def test_blackwell_ultra_has_faster_tiles(meta: Meta) -> None:
    """83 % of the time of a tile; blocks take as long."""
    us = _us(_forward(meta((148, 1, 1024, 128)), is_causal=True), "gb300-288gb")
    assert us == pytest.approx(8.5 + 8 * 2.29 + (36 + 8 * 1.46) * 0.83 * 0.668)


def _flex(x: TensorMeta, *, backward: bool = False, **arguments: float) -> Signature:
    return Signature(f"flex_attention{'_backward' * backward}", (x, x, x), (x,), tuple(arguments.items()))


def test_flexible_attention_counts_the_tiles_of_its_mask(meta: Meta) -> None:
    """Of 64 tiles a causal mask needs 36, of which 8 on the diagonal cost 2.51 times as much; no mask needs all; a mask that
    needs half as many as a causal one has 18.
    """
    x = meta((33, 8, 1024, 64))
    for arguments, tiles in (({}, 36 + 8 * 1.51), ({"computed": 8 / 9}, 64), ({"computed": 0.25}, 18 + 8 * 1.51)):
        assert _us(_flex(x, **arguments)) == pytest.approx(9.2 + 2 * (8 * 3.66 + tiles * 1.257))
    backward = 20.0 + 2 * (8 * 18.5 + 64 * 4.358)
    assert _us(_flex(x, backward=True, computed=8 / 9)) == pytest.approx(backward)


def test_triton_uses_blackwells_processors_as_hoppers(meta: Meta) -> None:
    """A tile of flexible attention takes 94.3 % of the time on a B200."""
    us = _us(_flex(meta((148, 1, 1024, 128)), computed=8 / 9), "b200-sxm-180gb")
    assert us == pytest.approx(9.2 + 8 * 3.66 + 64 * 0.943 * 2.801)


def test_flash_attention_two_has_blocks_and_tiles_of_its_own(meta: Meta) -> None:
    """264 heads of 1,024 positions on an H100, with tiles that take 7 % longer than in bursts, and float32 sums beside the
    backward; 296 heads on a B200, whose processors take as long each for the backward, and 3 % more for the forward's tiles.
    """
    name = "aten._scaled_dot_product_flash_attention"

    def calls(heads: int) -> tuple[Signature, Signature]:
        x, log = meta((heads, 1, 1024, 64)), meta((heads, 1, 1024), "float32")
        forward = Signature(f"{name}.default", (x, x, x), (x,))
        return forward, Signature(f"{name}_backward.default", (x, x, x, x, x, log), (x, x, x))

    tiles = 8 * 5.19 + 64 * 1.07 * 4.67
    for gpu, heads, slower, gbps in (("h100-sxm-80gb", 264, 1.0, 3350), ("b200-sxm-180gb", 296, 1.03, 8000)):
        forward, backward = calls(heads)
        assert _us(forward, gpu) == pytest.approx(2 * (8 * 1.94 + 64 * 1.07 * slower * 1.76))
        sums = 14 * heads * 1024 * 64 / (gbps * 1e3 * 0.88)
        assert _us(backward, gpu) == pytest.approx(6.4 + 2 * tiles + sums)


def test_other_gpus_and_kernels_are_not_answered(meta: Meta) -> None:
    """Neither Ampere's kernels, nor consumers' Blackwell's, nor AMD's; nor the memory-efficient one, nor in float32."""
    x, single = meta((4, 8, 1024, 64)), meta((4, 8, 1024, 64), "float32")
    for gpu in ("a100-sxm-80gb", "rtx-5090", "mi300x"):
        assert TiledAttention(load_hardware(gpu)).estimate([_forward(x), _flex(x)]) == [None, None]
    efficient = _forward(x)._replace(name="aten._scaled_dot_product_efficient_attention.default")
    assert TiledAttention(load_hardware("h100-sxm-80gb")).estimate([efficient, _flex(single)]) == [None, None]

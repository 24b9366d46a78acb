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
    """264 heads of 1,024 positions: 8 blocks and 64 tiles each on half a processor; head sizes above 64 fill 128."""
    for head, tile in ((64, 1.084), (80, 1.593), (128, 1.593), (160, 2.611), (192, 2.611), (256, 2.611)):
        expected = 6.2 + 2 * (8 * 2.73 + 64 * tile)
        assert _us(_forward(meta((33, 8, 1024, head)))) == pytest.approx(expected)


def test_a_causal_mask_leaves_out_tiles(meta: Meta) -> None:
    """36 of 64 tiles, of which the 8 on the diagonal cost 92 %."""
    us = _us(_forward(meta((33, 8, 1024, 64)), is_causal=True))
    assert us == pytest.approx(6.2 + 2 * (8 * 2.73 + (36 - 8 * 0.08) * 1.084))


def test_one_block_is_the_least(meta: Meta) -> None:
    """A single head of 8,192 positions: 64 blocks on 132 processors take as long as one with its 64 tiles."""
    assert _us(_forward(meta((1, 1, 8192, 64)))) == pytest.approx(6.2 + 2.73 + 64 * 1.084)


def test_dropout_and_masks_cost_at_every_tile(meta: Meta) -> None:
    """2.73 and 3.15 times the time of a tile."""
    x, mask = meta((33, 8, 1024, 64)), meta((33, 1, 1024, 1024))
    dropped, masked = _us(_forward(x, dropout_p=0.1)), _us(_forward(x, mask))
    assert dropped == pytest.approx(6.2 + 2 * (8 * 2.73 + 64 * 2.73 * 1.084))
    assert masked == pytest.approx(6.2 + 2 * (8 * 2.73 + 64 * 3.15 * 1.084))


def test_a_backward_accumulates_in_float32(meta: Meta) -> None:
    """Its own start, blocks and tiles, and 14 bytes for each element of the queries."""
    x, log = meta((33, 8, 1024, 64)), meta((33, 8, 1024, 1), "float32")
    us = _us(Signature(f"{NAME}_backward.default", (x, x, x, x, x, log), (x, x, x)))
    tiles = 2 * (8 * 2.90 + 64 * 3.098)
    assert us == pytest.approx(23.6 + tiles + 14 * 264 * 1024 * 64 / (3350e3 * 0.88))


def test_a_window_leaves_out_tiles(meta: Meta) -> None:
    """FlashAttention-3 with a window of 128 keys before each query: its 128 x 1,024 pairs, less half a tile's, are 7.5 tiles;
    8 more are half empty at either end, and 8 on the diagonal cost 92 %.
    """
    x = meta((33, 8, 1024, 64))
    arguments = (("is_causal", True), ("implementation", "FA3"), ("window_size", (127, 0)))
    us = _us(Signature("aten._scaled_dot_product_flash_attention.default", (x, x, x), (x,), arguments))
    pairs = 128 * 129 // 2 + 896 * 128
    assert us == pytest.approx(6.2 + 2 * (8 * 2.73 + (pairs / 128**2 + 8 - 8 * 0.08) * 1.084))


def test_newer_flash_attention_differs_from_cudnn_in_some_tiles(meta: Meta) -> None:
    """FlashAttention-3 is as fast as cuDNN with heads of 128, and slower with heads of 256."""
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
    backward; a B200's processors take as long each for the backward, and 9 % more for the forward's tiles.
    """
    x, log = meta((33, 8, 1024, 64)), meta((33, 8, 1024), "float32")
    name = "aten._scaled_dot_product_flash_attention"
    forward = Signature(f"{name}.default", (x, x, x), (x,))
    backward = Signature(f"{name}_backward.default", (x, x, x, x, x, log), (x, x, x))
    assert _us(forward) == pytest.approx(7.0 + 2 * (8 * 2.11 + 64 * 1.07 * 1.667))
    tiles = 8 * 4.14 + 64 * 1.07 * 4.632
    assert _us(backward) == pytest.approx(20.0 + 2 * tiles + 14 * 264 * 1024 * 64 / (3350e3 * 0.88))
    heads = 264 / 148
    assert _us(forward, "b200-sxm-180gb") == pytest.approx(7.0 + heads * (8 * 2.11 + 64 * 1.07 * 1.09 * 1.667))
    sums = 14 * 264 * 1024 * 64 / (8000e3 * 0.88)
    assert _us(backward, "b200-sxm-180gb") == pytest.approx(20.0 + heads * tiles + sums)


def test_other_gpus_and_kernels_are_not_answered(meta: Meta) -> None:
    """Neither Ampere's kernels, nor consumers' Blackwell's, nor AMD's; nor the memory-efficient one, nor in float32."""
    x, single = meta((4, 8, 1024, 64)), meta((4, 8, 1024, 64), "float32")
    for gpu in ("a100-sxm-80gb", "rtx-5090", "mi300x"):
        assert TiledAttention(load_hardware(gpu)).estimate([_forward(x), _flex(x)]) == [None, None]
    efficient = _forward(x)._replace(name="aten._scaled_dot_product_efficient_attention.default")
    assert TiledAttention(load_hardware("h100-sxm-80gb")).estimate([efficient, _flex(single)]) == [None, None]

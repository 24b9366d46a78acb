"""cuDNN's attention by its tiles: figures worked out by hand for an H100."""

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
    for head, size in ((64, 1), (80, 2), (128, 2), (160, 4), (192, 4), (256, 6.2)):
        expected = 6.2 + 2 * (8 * 2.73 + 64 * (0.575 + 0.509 * size))
        assert _us(_forward(meta((33, 8, 1024, head)))) == pytest.approx(expected)


def test_a_causal_mask_leaves_out_tiles(meta: Meta) -> None:
    """36 of 64 tiles, of which the 8 on the diagonal cost 92 %."""
    us = _us(_forward(meta((33, 8, 1024, 64)), is_causal=True))
    assert us == pytest.approx(6.2 + 2 * (8 * 2.73 + (36 - 8 * 0.08) * (0.575 + 0.509)))


def test_one_block_is_the_least(meta: Meta) -> None:
    """A single head of 8,192 positions: 64 blocks on 132 processors take as long as one with its 64 tiles."""
    assert _us(_forward(meta((1, 1, 8192, 64)))) == pytest.approx(6.2 + 2.73 + 64 * (0.575 + 0.509))


def test_dropout_and_masks_cost_at_every_tile(meta: Meta) -> None:
    """2.73 and 3.15 times the time of a tile."""
    x, mask = meta((33, 8, 1024, 64)), meta((33, 1, 1024, 1024))
    dropped, masked = _us(_forward(x, dropout_p=0.1)), _us(_forward(x, mask))
    assert dropped == pytest.approx(6.2 + 2 * (8 * 2.73 + 64 * 2.73 * (0.575 + 0.509)))
    assert masked == pytest.approx(6.2 + 2 * (8 * 2.73 + 64 * 3.15 * (0.575 + 0.509)))


def test_a_backward_accumulates_in_float32(meta: Meta) -> None:
    """Its own start, blocks and tiles, and 14 bytes for each element of the queries."""
    x, log = meta((33, 8, 1024, 64)), meta((33, 8, 1024, 1), "float32")
    us = _us(Signature(f"{NAME}_backward.default", (x, x, x, x, x, log), (x, x, x)))
    tiles = 2 * (8 * 2.90 + 64 * (1.449 + 1.649))
    assert us == pytest.approx(23.6 + tiles + 14 * 264 * 1024 * 64 / (3350e3 * 0.88))


def test_other_gpus_and_kernels_are_not_answered(meta: Meta) -> None:
    """Hopper's cuDNN only: neither Ampere's, nor Blackwell's, nor FlashAttention."""
    x = meta((4, 8, 1024, 64))
    for gpu in ("a100-sxm-80gb", "b200-sxm-180gb", "mi300x"):
        assert TiledAttention(load_hardware(gpu)).estimate([_forward(x)]) == [None]
    flash = _forward(x)._replace(name="aten._scaled_dot_product_flash_attention.default")
    assert TiledAttention(load_hardware("h100-sxm-80gb")).estimate([flash]) == [None]

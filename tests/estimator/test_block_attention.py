"""Attention of short sequences by blocks: figures worked out by hand for an H100."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.block_attention import BlockAttention
from autosac.estimator.models import Estimate
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]


def _answer(
    meta: Meta,
    shape: tuple[int, ...],
    kind: str,
    dtype: str,
    *,
    causal: bool = False,
    gpu: str = "h100-sxm-80gb",
    dropout: float = 0.0,
) -> Estimate | None:
    q = meta(shape, dtype)
    inputs = (q,) * (5 if "backward" in kind else 3)
    signature = Signature(
        f"aten._scaled_dot_product_{kind}.default", inputs, (q,), (("dropout_p", dropout), ("is_causal", causal))
    )
    return BlockAttention(load_hardware(gpu)).estimate([signature])[0]


@pytest.mark.parametrize(
    ("heads", "length", "causal", "us"),
    [
        (1056, 128, False, 2.6 + 8 * (3.2 + 1.25)),  # eight blocks of a tile on each processor
        (528, 256, False, 2.6 + 8 * (3.2 + 2 * 1.25)),
        (528, 256, True, 2.6 + 4 * (2 * 3.2 + 3 * 1.25)),  # the tile above the diagonal is left out
        (4, 384, False, 2.6 + 2.6 + 3 * 1.25 * 1.5),  # fewer blocks than processors: one block, alone
    ],
)
def test_flash_attention_in_blocks_of_128(meta: Meta, heads: int, length: int, causal: bool, us: float) -> None:
    """Heads of 64: 3.2 us a block and 1.25 a tile."""
    answer = _answer(meta, (1, heads, length, 64), "flash_attention", "bfloat16", causal=causal)
    assert answer is not None
    assert answer.ms * 1e3 == pytest.approx(us)
    assert answer.source == "blocks:attention"


def test_the_backward_has_three_kernels_and_adds_up(meta: Meta) -> None:
    """6.5 us a block, 4.5 a tile, and 14 bytes of traffic for each element of the queries."""
    answer = _answer(meta, (1, 1056, 128, 64), "flash_attention_backward", "bfloat16")
    assert answer is not None
    added = 14 * 1056 * 128 * 64 / (3350e3 * 0.88)
    assert answer.ms * 1e3 == pytest.approx(3 * 2.6 + 8 * 11.0 + added)


@pytest.mark.parametrize(("size", "tile"), [(32, 3.2), (64, 3.9), (128, 5.3 * 2.1)])
def test_float32_in_blocks_of_64(meta: Meta, size: int, tile: float) -> None:
    """2 us a block; heads of 128 take 2.1 times as long as their size says."""
    answer = _answer(meta, (1, 1056, 128, size), "efficient_attention", "float32")
    assert answer is not None
    assert answer.ms * 1e3 == pytest.approx(2.6 + 8 * 2 * (2.0 + 2 * tile))


def test_windows_are_one_tile_for_each_head(meta: Meta) -> None:
    """Eight heads on each processor, 7 x 7 positions: nothing is added up in memory; 65 positions are others' work."""
    window = (1056, 1, 49, 32)
    forward = _answer(meta, window, "efficient_attention", "bfloat16")
    backward = _answer(meta, window, "efficient_attention_backward", "float16")
    assert forward is not None and backward is not None
    assert forward.ms * 1e3 == pytest.approx(2.6 + 8 * (0.9 + 0.5 + 1.06 / 2))
    assert backward.ms * 1e3 == pytest.approx(4 * 2.6 + 8 * (1.8 + 1.0 + 2.02 / 2))
    assert _answer(meta, (1056, 1, 65, 32), "efficient_attention", "bfloat16") is None
    assert _answer(meta, window, "efficient_attention", "bfloat16", gpu="a100-sxm-80gb") is None


@pytest.mark.parametrize("slower_by", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize(
    ("kind", "dtype", "length", "launches", "block", "tile", "block_alone", "alone", "dropout"),
    [
        ("flash_attention", "bfloat16", 128, 1, 3.2, 1.25, 2.6, 1.5, 1.3),
        ("flash_attention_backward", "bfloat16", 128, 3, 6.5, 4.5, 6.5, 1.0, 1.2),
        ("efficient_attention", "float32", 64, 1, 2.0, 3.9, 2.0, 1.7, 1.45),
        ("efficient_attention_backward", "float32", 64, 2, 4.0, 9.8, 4.0, 2.0, 1.35),
        ("efficient_attention", "bfloat16", 64, 1, 0.9, 1.56, 2.0, 1.7, 1.45),
        ("efficient_attention_backward", "bfloat16", 64, 4, 1.8, 3.02, 4.0, 2.0, 1.35),
    ],
)
def test_one_tile_among_others_and_alone(
    meta: Meta,
    kind: str,
    dtype: str,
    length: int,
    launches: int,
    block: float,
    tile: float,
    block_alone: float,
    alone: float,
    dropout: float,
    slower_by: bool,
) -> None:
    """One tile for each head of 64: 16 heads on each of 132 processors, or a single head. What the backward adds up in memory
    grows with the heads: by what two heads take longer than one, both of them alone.
    """
    rate = 0.1 if slower_by else 0.0
    one, two, many = (_answer(meta, (1, heads, length, 64), kind, dtype, dropout=rate) for heads in (1, 2, 2112))
    assert one is not None and two is not None and many is not None
    added_us = (two.ms - one.ms) * 1e3  # for a head: both run alone
    tile *= dropout if slower_by else 1.0
    assert one.ms * 1e3 - added_us == pytest.approx(launches * 2.6 + block_alone + tile * alone)
    assert many.ms * 1e3 - 2112 * added_us == pytest.approx(launches * 2.6 + 16 * (block + tile))


def test_what_it_does_not_know(meta: Meta) -> None:
    """More than 512 keys, other GPUs' FlashAttention-2, cuDNN's kernels, and GPUs of AMD are left to other models."""
    short, long = (1, 64, 256, 64), (1, 64, 1024, 64)
    assert _answer(meta, long, "flash_attention", "bfloat16") is None
    assert _answer(meta, short, "flash_attention", "bfloat16", gpu="a100-sxm-80gb") is None
    assert _answer(meta, short, "cudnn_attention", "bfloat16") is None
    assert _answer(meta, short, "efficient_attention", "float32", gpu="mi300x") is None
    assert _answer(meta, short, "efficient_attention", "float32", gpu="a100-sxm-80gb") is not None

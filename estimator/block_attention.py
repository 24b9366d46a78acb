"""Attention of short sequences by blocks: FlashAttention-2 on Hopper, the memory-efficient kernels in float32 and in windows.

A block takes so many queries (forward) or keys (backward) of one head through the tiles of the other side. Short sequences are
not bound by rates but by what a block does once, and by blocks that compute a whole tile for a few rows:

    t = kernels + accumulation + max(all blocks and tiles / processors, the block with most tiles alone)
    tile = (fixed + growing * head size / 64) * dropout

The memory-efficient kernels take other tiles for heads above 64, which are 2.1 times as long for 128.

Alone, a tile takes longer than among others, which hide its waits. With a causal mask a block of rows i has i + 1 tiles. The
backward adds up the queries' gradient in float32 (`attention.py`). `tiled_attention` has FlashAttention-2 from 512 keys on.

Fitted to 22 single calls of `autosac calibrate` on an H100. Held out: ViT's and CLIP's steps of another H100 (`docs/h100.md`),
an encoder-decoder's step with dropout, whose factors were fitted to it. Windows of up to 64 positions in 16 bits, on Hopper: a
MaxViT on an H200 (7 x 7 positions, heads of 32, with a bias), two of its four shapes each way; the others were held out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosac.estimator.attention import accumulated_bytes
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, AttentionShape, attention_shape, family
from autosac.trace import Signature

_FITTED_ON, _HOPPER, _TENSOR_FLOAT = "h100-sxm-80gb", 9, 8
_FEWER_KEYS = 512
_LARGE_SIZE, _LARGE = 64, 1.1
_REL_STD = 0.2
_SIXTEEN_BITS = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """Microseconds of a block and a tile (of `rows` by `rows`) on one processor among others, and alone; launches; how much
    dropout slows down; whether the backward adds up the queries' gradient in memory.
    """

    rows: int
    launches: int
    block: float
    fixed: float
    growing: float
    block_alone: float
    alone: float
    dropout: float
    accumulates: bool = True

    def tile(self, size: int) -> float:
        """Among others."""
        larger = max(0.0, size / _LARGE_SIZE - 1) if self.rows == _LARGE_SIZE else 0.0
        return (self.fixed + self.growing * size / 64) * (1 + _LARGE * larger)


_FLASH = _Kernel(rows=128, launches=1, block=3.2, fixed=0.2, growing=1.05, block_alone=2.6, alone=1.5, dropout=1.3)
_FLASH_BACKWARD = _Kernel(
    rows=128, launches=3, block=6.5, fixed=0.9, growing=3.6, block_alone=6.5, alone=1.0, dropout=1.2
)
_EFFICIENT = _Kernel(rows=64, launches=1, block=2.0, fixed=2.5, growing=1.4, block_alone=2.0, alone=1.7, dropout=1.45)
_EFFICIENT_BACKWARD = _Kernel(
    rows=64, launches=2, block=4.0, fixed=4.2, growing=5.6, block_alone=4.0, alone=2.0, dropout=1.35
)
# Windows: one tile for each head, which is also all that is known of them.
_WINDOW = _Kernel(rows=64, launches=1, block=0.9, fixed=0.5, growing=1.06, block_alone=2.0, alone=1.7, dropout=1.45)
_WINDOW_BACKWARD = _Kernel(
    rows=64,
    launches=4,
    block=1.8,
    fixed=1.0,
    growing=2.02,
    block_alone=4.0,
    alone=2.0,
    dropout=1.35,
    accumulates=False,
)


class BlockAttention:
    """The model of one GPU of NVIDIA."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`: what its processors multiply in a microsecond decides, relative to an H100's."""
        self._hardware = hardware
        self._fitted = load_hardware(_FITTED_ON)
        self._suffix = hardware.fitted_elsewhere(_FITTED_ON)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the attentions that it knows."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if family(signature.name) not in ("attention_forward", "attention_backward"):
            return None
        shape = attention_shape(signature)
        kernel = self._kernel(shape) if shape is not None and shape.flops else None
        if shape is None or kernel is None:
            return None
        return Estimate(self._us(shape, kernel) * 1e-3, f"blocks:attention{self._suffix}", _REL_STD)

    def _kernel(self, shape: AttentionShape) -> _Kernel | None:
        hardware = self._hardware
        capability = hardware.compute_capability[0] if hardware.vendor == "NVIDIA" else 0
        if shape.backend == "flash" and shape.dtype in _SIXTEEN_BITS and capability == _HOPPER:
            if max(shape.query_length, shape.key_length) >= _FEWER_KEYS:
                return None
            return _FLASH_BACKWARD if shape.backward else _FLASH
        if shape.backend == "efficient" and shape.dtype == "float32" and capability >= _TENSOR_FLOAT:
            return _EFFICIENT_BACKWARD if shape.backward else _EFFICIENT
        is_window = max(shape.query_length, shape.key_length) <= _WINDOW.rows
        if shape.backend == "efficient" and shape.dtype in _SIXTEEN_BITS and capability == _HOPPER and is_window:
            return _WINDOW_BACKWARD if shape.backward else _WINDOW
        return None

    def _us(self, shape: AttentionShape, kernel: _Kernel) -> float:
        hardware = self._hardware
        tile = kernel.tile(shape.head_size) * (kernel.dropout if shape.dropout > 0 else 1.0)
        own, other = shape.query_length, shape.key_length
        blocks, tiles = math.ceil(own / kernel.rows), math.ceil(other / kernel.rows)
        if shape.backward:
            blocks, tiles = tiles, blocks
        counts = [min(tiles, i + 1) if shape.causal else tiles for i in range(blocks)]
        heads = shape.batch * shape.heads / hardware.sm_count
        dealt = heads * (blocks * kernel.block + sum(counts) * tile)
        longest = kernel.block_alone + max(counts) * tile * kernel.alone
        us = kernel.launches * hardware.kernel_us + max(dealt, longest) * self._slower(shape)
        if shape.backward and kernel.accumulates:
            us += accumulated_bytes(shape) / (hardware.mem_bandwidth_gbps * 1e3 * STREAMED)
        return us

    def _slower(self, shape: AttentionShape) -> float:
        """One processor relative to the H100's."""
        single = shape.dtype == "float32"
        fitted, mine = (
            gpu.peak_flops("tf32" if single else gpu.half) / gpu.sm_count for gpu in (self._fitted, self._hardware)
        )
        return fitted / mine

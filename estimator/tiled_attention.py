"""cuDNN's attention on Hopper: tiles of 128 queries and 128 keys, dealt to the processors.

A block takes 128 queries (forward) or keys (backward) of one head and goes through the tiles of the other side. It starts,
loads and writes in `block` microseconds. A tile's time has a part that does not depend on the head's size, and one that grows:

    size  = head sizes up to 64: 1; up to 128: 2; up to 192: 4; above: 6.2 (less room for tiles)
    tile  = (fixed + growing * size) * dropout * bias
    t     = start + accumulation + max(all blocks and tiles / processors, one block with the most tiles)

A causal mask leaves out the tiles above the diagonal; those on it cost `diagonal`. The backward adds up the queries' gradient
in float32 beside it (`attention.py`). From 16,384 positions on kernels are up to 10 % slower than this, why is not known.

Fitted to the even steps on an H100 (`benchmarks/step_kinds`, 10 kinds each way) and to NVIDIA's table of an H200 up to 8,192
keys; held out: the odd steps and the longer half of the table. Heads of 256: cuDNN's forwards in the paper of
FlashAttention-3, whose own kernels check it (`benchmarks/flash_attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosac.estimator.attention import accumulated_bytes
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.learned import sustained
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, AttentionShape, attention_shape, base_name, family
from autosac.trace import Signature

_TILE, _HOPPER, _FITTED_ON = 128, 9, "h100-sxm-80gb"
_REL_STD = 0.12
_SIZES = ((_TILE // 2, 1.0), (_TILE, 2.0), (192, 4.0), (math.inf, 6.2))  # widest head, how much work a tile is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Microseconds of one direction on one processor, and the factors of dropout, bias and diagonal tiles."""

    start: float
    block: float
    fixed: float
    growing: float
    dropout: float
    bias: float
    diagonal: float


_FORWARD = _Times(start=6.2, block=2.73, fixed=0.575, growing=0.509, dropout=2.73, bias=3.15, diagonal=0.92)
_BACKWARD = _Times(start=23.6, block=2.90, fixed=1.449, growing=1.649, dropout=1.19, bias=3.23, diagonal=1.26)


class TiledAttention:
    """The model of one GPU; it knows Hopper's only."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`: what its processors multiply in a microsecond decides, relative to an H100's."""
        self._hardware = hardware
        fitted = load_hardware(_FITTED_ON)
        self._known = hardware.vendor == "NVIDIA" and hardware.compute_capability[0] == _HOPPER
        self._suffix = hardware.fitted_elsewhere(_FITTED_ON)
        self._slower = _processor(fitted) / _processor(hardware) / sustained(hardware)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of cuDNN's attentions in 16 bits."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if not self._known or family(signature.name) not in ("attention_forward", "attention_backward"):
            return None
        shape = attention_shape(signature)
        if shape is None or shape.backend != "cudnn" or shape.dtype not in ("float16", "bfloat16") or not shape.flops:
            return None
        return Estimate(self._us(shape, _has_bias(signature)) * 1e-3, f"tiles:attention{self._suffix}", _REL_STD)

    def _us(self, shape: AttentionShape, biased: bool) -> float:
        times = _BACKWARD if shape.backward else _FORWARD
        size = next(size for widest, size in _SIZES if shape.head_size <= widest)
        tile = times.fixed + times.growing * size
        tile *= (times.dropout if shape.dropout > 0 else 1.0) * (times.bias if biased else 1.0)
        all_tiles, longest = _tiles(shape, times.diagonal)
        heads = shape.batch * shape.heads / self._hardware.sm_count
        split = shape.key_length if shape.backward else shape.query_length
        dealt = heads * (math.ceil(split / _TILE) * times.block + all_tiles * tile)
        us = times.start + self._slower * max(dealt, times.block + longest * tile)
        if shape.backward:
            us += accumulated_bytes(shape) / (self._hardware.mem_bandwidth_gbps * 1e3 * STREAMED)
        return us


def _processor(hardware: Hardware) -> float:
    return hardware.peak_flops(hardware.half) / hardware.sm_count


def _tiles(shape: AttentionShape, diagonal: float) -> tuple[float, int]:
    """Tiles of one head, and those of the block with the most."""
    queries, keys = math.ceil(shape.query_length / _TILE), math.ceil(shape.key_length / _TILE)
    if not shape.causal:
        return queries * keys, queries if shape.backward else keys
    counts = [min(keys, i + 1) for i in range(queries)]
    return sum(counts) - queries * (1 - diagonal), max(counts)


def _has_bias(signature: Signature) -> bool:
    """Whether a mask is among the tensors: one more of four dimensions than query, key, value (output, gradient, sums)."""
    four = sum(len(meta.shape) == 4 for meta in signature.inputs)
    plain = 6 if "backward" in base_name(signature.name) else 3
    return four > plain

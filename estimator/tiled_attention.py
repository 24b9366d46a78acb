"""cuDNN's, FlashAttention's and flexible attention on Hopper and Blackwell: tiles of 128 queries and 128 keys, dealt to the
processors.

A block takes 128 queries (forward) or keys (backward) of one head and goes through the tiles of the other side. It starts,
loads and writes in `block` microseconds; a tile's time depends on the head's size:

    tile  = (time for this head size) * dropout * bias
    t     = start + accumulation + (until the last block is done)

A causal mask leaves out the tiles above the diagonal; those on it cost `diagonal`. So blocks differ: the last queries of a
head have the most tiles, and so have the first keys. cuDNN's kernels and FlashAttention-2 on Hopper deal blocks in the order
of heads and positions to the processor that is free next, and a few long blocks at the end keep it busy alone (`dealt`): with
32 heads of 8,192 positions a causal forward takes 5 % longer than the even share, with four heads as long as without a mask.
Other kernels order their blocks; theirs is the even share, or one block with the most tiles.

A window leaves out more: of every block's tiles those that lie at either end of the window are half empty. cuDNN's and
FlashAttention-2's backwards add up the queries' gradient in float32 beside it (`attention.py`). From 32,768 positions on
(Hopper: 16,384) kernels are up to 12 % slower than this, as GPUs that reach their power are. `attention_times` has the
times, and says what they were fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapreplace

from autosac.estimator.attention import accumulated_bytes
from autosac.estimator.attention_times import BACKENDS, AttentionKernels, BlockTimes, kernels_of
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.learned import sustained
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, AttentionShape, argument, attention_shape, base_name, family
from autosac.trace import Signature

_TILE = 128
_DEALT = 8  # rounds of blocks that are dealt one by one
_REL_STD = 0.12


class TiledAttention:
    """The model of one GPU; it knows Hopper's and Blackwell's only."""

    def __init__(self, hardware: Hardware, kernels: Mapping[str, AttentionKernels] | None = None) -> None:
        """Model `hardware`: what its processors multiply in a microsecond decides, relative to the GPU that was measured.

        `kernels`: by backend, others than those that are known of it.
        """
        self._hardware = hardware
        known = {backend: kernels_of(hardware, backend) for backend in BACKENDS} if kernels is None else kernels
        self._kernels = {backend: found for backend, found in known.items() if found is not None}

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of attentions in 16 bits."""
        return [self._estimate(signature) if self._kernels else None for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if family(signature.name) not in ("attention_forward", "attention_backward"):
            return None
        shape = attention_shape(signature)
        if shape is None or shape.dtype not in ("float16", "bfloat16") or not shape.flops:
            return None
        newer = argument(signature, "implementation") is not None
        kernels = self._kernels.get("newer" if newer else shape.backend)
        if kernels is None:
            return None
        times = kernels.backward if shape.backward else kernels.forward
        us = self._us(shape, times, _slower(self._hardware, kernels.measured_on), biased=_has_bias(signature))
        suffix = self._hardware.fitted_elsewhere(kernels.measured_on)
        return Estimate(us * 1e-3, f"tiles:attention{suffix}", _REL_STD)

    def _us(self, shape: AttentionShape, times: BlockTimes, slower: float, *, biased: bool) -> float:
        tile = times.tile(shape.head_size)
        tile *= (times.dropout if shape.dropout > 0 else 1.0) * (times.bias if biased else 1.0)
        block = times.block + times.by_size * shape.head_size / 128
        us = times.start + slower * self._until_done(shape, times, block, tile)
        if shape.backward and shape.backend != "flex":
            us += accumulated_bytes(shape) / (self._hardware.mem_bandwidth_gbps * 1e3 * STREAMED)
        return us

    def _until_done(self, shape: AttentionShape, times: BlockTimes, block: float, tile: float) -> float:
        """Microseconds until the last block is done, whose beginning and end take `block`."""
        heads, sm_count = shape.batch * shape.heads, self._hardware.sm_count
        if times.dealt and shape.share == 1:
            return _makespan(tuple(block + count * tile for count in _counts(shape, times.diagonal)), heads, sm_count)
        all_tiles, longest = _tiles(shape, times.diagonal)
        one, blocks = block + longest * tile, _blocks(shape)
        if times.in_pairs and not shape.causal:
            return math.ceil(heads * math.ceil(blocks / 2) / sm_count) * 2 * one
        return max(heads / sm_count * (blocks * block + all_tiles * tile), one)


def _slower(hardware: Hardware, measured_on: str) -> float:
    """How much more time a processor takes than one of the GPU that was measured."""
    return _processor(load_hardware(measured_on)) / _processor(hardware) / sustained(hardware)


def _processor(hardware: Hardware) -> float:
    return hardware.peak_flops(hardware.half) / hardware.sm_count


def _counts(shape: AttentionShape, diagonal: float) -> list[float]:
    """Tiles of each block of one head, by its position."""
    blocks, others = _blocks(shape), math.ceil((shape.query_length if shape.backward else shape.key_length) / _TILE)
    if not shape.causal:
        return [float(others)] * blocks
    if shape.backward:
        return [max(others - i - 1, 0) + diagonal for i in range(blocks)]
    return [min(i, others - 1) + diagonal for i in range(blocks)]


@lru_cache(maxsize=1024)
def _makespan(spent_us: tuple[float, ...], heads: int, sm_count: int) -> float:
    """Until the last block is done, if every processor that becomes free takes the next block, head by head.

    Of many heads only the last ones are dealt one by one. Those before them are whole rounds, which keep all processors busy.
    """
    least = min(heads, math.ceil(_DEALT * sm_count / len(spent_us)))
    round_heads = sm_count // math.gcd(sm_count, len(spent_us))
    before = (heads - least) // round_heads * round_heads
    free = [0.0] * sm_count
    for _ in range(heads - before):
        for us in spent_us:
            heapreplace(free, free[0] + us)
    return max(free) + before * sum(spent_us) / sm_count


def _blocks(shape: AttentionShape) -> int:
    """Blocks of one head."""
    return math.ceil((shape.key_length if shape.backward else shape.query_length) / _TILE)


def _tiles(shape: AttentionShape, diagonal: float) -> tuple[float, float]:
    """Tiles of one head, and those of the block with the most."""
    queries, keys = math.ceil(shape.query_length / _TILE), math.ceil(shape.key_length / _TILE)
    blocks = _blocks(shape)
    if shape.causal:
        counts = [min(keys, i + 1) for i in range(queries)]
        tiles, longest = float(sum(counts)), max(counts)
    else:
        tiles, longest = float(queries * keys), queries if shape.backward else keys
    if shape.backend == "flex":  # its share is one of tiles
        tiles *= shape.share
    elif shape.share < 1:
        pairs = shape.share * shape.query_length * shape.key_length * (0.5 if shape.causal else 1.0)
        tiles = min(tiles, pairs / _TILE**2 + blocks)
    if shape.share < 1:
        longest = min(longest, math.ceil(tiles / blocks))
    masked = shape.causal and tiles < queries * keys
    return tiles - (queries * (1 - diagonal) if masked else 0.0), longest


def _has_bias(signature: Signature) -> bool:
    """Whether a mask is among the tensors: one more of four dimensions than query, key, value (output, gradient, sums)."""
    four = sum(len(meta.shape) == 4 for meta in signature.inputs)
    plain = 6 if "backward" in base_name(signature.name) else 3
    return four > plain

"""Features and baselines of the learned operator models; the same code serves fitting and prediction.

A learned model predicts ``log(time / baseline)``, where the baseline is the roofline of the peak rates plus two microseconds.
What the trees see are the things that make a kernel miss its roofline:

    matrix products   dimensions, working set against the L2, arithmetic against memory time; for every tile shape that
                      libraries use, the share of the last wave that is filled and of the tiles that is inside the matrix
    attention         lengths, head size, grouped heads, causality; waves of 128-row query tiles

Dimensions beyond what was measured are clipped in the features, not in the baseline: efficiency stays that of the largest
measured size, and time grows with the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware

Array = NDArray[np.float64]
_FLOOR_MS = 0.002
_TILES = ((256, 128), (128, 256), (128, 128), (128, 192), (192, 128))
_SMALL_TILES = ((64, 256), (256, 64), (128, 64), (64, 128), (64, 64), (256, 256))
_LARGEST_M, _LARGEST_NK = 32768.0, 65536.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the features need of a GPU: processors, FLOP/s of one arithmetic, bytes/s, bytes of L2."""

    sm_count: int
    flops: float
    bandwidth: float
    l2_bytes: float

    @staticmethod
    def of(hardware: Hardware, arithmetic: str) -> Rates:
        """The rates of a GPU for "bfloat16", "float8", "tf32", ..."""
        return Rates(
            sm_count=hardware.sm_count,
            flops=hardware.peak_flops(arithmetic),
            bandwidth=hardware.mem_bandwidth_gbps * 1e9,
            l2_bytes=hardware.l2_bytes,
        )


def gemm_baseline_ms(m: Array, n: Array, k: Array, item_bytes: float, rates: Rates) -> Array:
    """Roofline of [m, k] x [k, n] with two-byte results, in milliseconds."""
    arithmetic = 2 * m * n * k / rates.flops
    memory = (item_bytes * (m * k + k * n) + 2 * m * n) / rates.bandwidth
    return np.maximum(arithmetic, memory) * 1e3 + _FLOOR_MS


def gemm_features(m: Array, n: Array, k: Array, item_bytes: float, rates: Rates) -> Array:
    """One row for every product; see the module's docstring."""
    m, n, k = np.minimum(m, _LARGEST_M), np.minimum(n, _LARGEST_NK), np.minimum(k, _LARGEST_NK)
    moved = item_bytes * (m * k + k * n) + 2 * m * n
    arithmetic, memory = 2 * m * n * k / rates.flops, moved / rates.bandwidth
    fill = np.stack([_filled(m, n, tile, rates.sm_count) for tile in (*_TILES, *_SMALL_TILES)], axis=1)
    large = fill[:, : len(_TILES)]
    best = large.max(axis=1)
    waves = [_tiles(m, n, tile) / rates.sm_count for tile in ((64, 256), (256, 128), (192, 128), (128, 128), (64, 64))]
    columns = [
        *np.log((m, n, k, m * n, m * k, n * k, n / k, m / n)),
        *np.log(fill.T),
        *waves,
        large.argmax(axis=1).astype(np.float64),
        np.log(best),
        np.log(arithmetic / memory),
        np.log(arithmetic / best / memory),
        np.log(np.maximum(arithmetic / best, memory)),
        np.log(moved / rates.l2_bytes),
        np.gcd(m.astype(np.int64), 64).astype(np.float64),
        np.ceil(m / 64),
        np.ceil(n / 64),
    ]
    return np.stack(columns, axis=1)


def _tiles(m: Array, n: Array, tile: tuple[int, int]) -> Array:
    return np.asarray(np.ceil(m / tile[0]) * np.ceil(n / tile[1]))


def _filled(m: Array, n: Array, tile: tuple[int, int], sm_count: int) -> Array:
    """Share of the processors' tile slots, over all waves, that hold elements of the result."""
    waves = np.ceil(_tiles(m, n, tile) / sm_count)
    return np.asarray(m * n / (waves * sm_count * tile[0] * tile[1]))


def attention_baseline_ms(shape: Array, rates: Rates) -> Array:
    """Roofline of attention's forward, in milliseconds.

    `shape` [calls, 7] has columns batch, heads, kv heads, query length, key length, head size, causal.
    """
    batch, heads, kv_heads, query, key, size, causal = shape.T
    flops = 4 * batch * heads * query * key * size * np.where(causal > 0, 0.5, 1.0)
    moved = 2 * batch * size * (2 * heads * query + 2 * kv_heads * key)
    return np.asarray(np.maximum(flops / rates.flops, moved / rates.bandwidth) * 1e3 + _FLOOR_MS)


def attention_features(shape: Array, rates: Rates) -> Array:
    """One row for every attention forward; columns of `shape` as in `attention_baseline_ms`."""
    batch, heads, kv_heads, query, key, size, causal = shape.T
    tiles = batch * heads * np.ceil(query / 128)
    waves = tiles / rates.sm_count
    flops = 4 * batch * heads * query * key * size * np.where(causal > 0, 0.5, 1.0)
    moved = 2 * batch * size * (2 * heads * query + 2 * kv_heads * key)
    columns = [
        *np.log((batch, heads, heads / kv_heads, query, key, batch * heads, batch * kv_heads)),
        size,
        causal,
        waves,
        np.log(waves),
        np.log(waves / np.ceil(waves)),
        np.log(query / (np.ceil(query / 128) * 128)),
        np.log(key / (np.ceil(key / 128) * 128)),
        np.log(flops / rates.flops),
        np.log(moved / rates.bandwidth),
        np.log(flops / moved),
        np.log(batch * kv_heads * key * size * 4 / rates.l2_bytes),
        np.log(batch * heads * query),
    ]
    return np.stack(columns, axis=1)

"""Batches of thin products: a row or a column by a matrix, and a column by a row, for each of many batches.

A mixture of experts adds each token's experts' outputs by its scores, [tokens, 1, experts] x [tokens, experts, width]. Such a
product fills no tile. cuBLAS takes its matrix-vector kernels, and for a column by a row tiles of 128 x 32, most of which are
empty. Their blocks are many and short:

    t = max(bytes / bandwidth, start + 1 us + waves of blocks * 1.4 us + terms of a thread * 0.01 us)

    dots        rows of the matrix along k: a block has 8 results, 16 threads each
    sums        rows across k: a block of 128 threads has 16 results where k is 32 or more, so many times more as k is shorter
    outer       k = 1: a block has a tile, and takes 3 us; four of them fit a processor, 16 of the others

Blocks and threads are those of cuBLAS's kernels in traces (dots and sums in HolisticTraceAnalysis's A100 trace, f4d0062c,
which set the 1.4 us; dots in TraceLens's H100 trace, 171dd747; the tile on an H200). Three in a step of Mamba on an H100, of
few blocks, set the rest but the time of a tile, which is an estimate: TorchTitan's layer of DeepSeek-V3 16B with these
products takes 0.97 of one that scatters (`docs/causes.md`).
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import Matmul, matmul_shape, tensor_bytes
from autosac.trace import Signature

_BLOCK_US, _TILE_US, _LATE_US, _TERM_US = 1.4, 3.0, 1.0, 0.01
_DOTS, _SUMS, _MOST_ALONG, _TERMS = 8, 128, 8, 4  # results of a block; threads that share one; terms of each of them
_ALONG_DOTS = 16
_TILE = (128, 32)
_BLOCKS, _TILE_BLOCKS = 16, 4  # that fit a processor


def thin_us(streams: Streams, signature: Signature) -> float | None:
    """`bmm`, if it is a batch of thin products; None otherwise."""
    product = matmul_shape(signature)
    if product is None or 1 not in (product.m, product.n, product.k) or (product.batch == 1 and product.k > 1):
        return None
    blocks, resident, terms = _grid(product)
    turn_us = _TILE_US if resident == _TILE_BLOCKS else _BLOCK_US
    waves = product.batch * blocks / (streams.hardware.sm_count * resident)
    moved = float(tensor_bytes(signature.inputs) + tensor_bytes(signature.outputs))
    waits = _LATE_US + waves * turn_us + terms * _TERM_US
    return max(streams.plain_us(moved), streams.kernel_us + streams.slower * waits)


def _grid(product: Matmul) -> tuple[int, int, float]:
    """Blocks of one product, how many fit a processor, and how many terms a thread adds up."""
    m, n, k = product.m, product.n, product.k
    if k == 1 and min(m, n) > 1:
        return math.ceil(max(m, n) / _TILE[0]) * math.ceil(min(m, n) / _TILE[1]), _TILE_BLOCKS, 1
    results, along = (n, product.b_transposed) if m == 1 else (m, not product.a_transposed)
    if along:
        return math.ceil(results / _DOTS), _BLOCKS, k / _ALONG_DOTS
    threads = min(_MOST_ALONG, 2 ** math.ceil(math.log2(max(1.0, k / _TERMS))))
    return math.ceil(results * threads / _SUMS), _BLOCKS, k / threads

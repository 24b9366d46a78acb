"""Batches of thin products: a row or a column by a matrix, and a column by a row, for each of many batches.

A mixture of experts adds each token's experts' outputs by its scores, [tokens, 1, experts] x [tokens, experts, width]. Such a
product fills no tile. cuBLAS takes its matrix-vector kernels, and for a column by a row tiles of 128 x 32, most of which are
empty. Their blocks are many and short:

    t = max(bytes / bandwidth, start + waves of blocks * 3 us)

    dots        rows of the matrix along k: a block has 8 results, 16 threads each
    sums        rows across k: a block of 128 threads has 16 results where k is 32 or more, so many times more as k is shorter
    outer       k = 1: a block has a tile; four blocks of them fit a processor, 16 of the others

Blocks and threads are those of cuBLAS's kernels in traces (dots and sums in HolisticTraceAnalysis's A100 trace, f4d0062c,
which set the 3 us; dots in TraceLens's H100 trace, 171dd747; the tile on an H200). Held out: TorchTitan's layer of DeepSeek-V3
16B with these products against one that scatters (`docs/causes.md`).
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import Matmul, matmul_shape, tensor_bytes
from autosac.trace import Signature

_BLOCK_US = 3.0
_DOTS, _SUMS, _MOST_ALONG, _TERMS = 8, 128, 8, 4  # results of a block; threads that share one; terms of each of them
_TILE = (128, 32)
_BLOCKS, _TILE_BLOCKS = 16, 4  # that fit a processor


def thin_us(streams: Streams, signature: Signature) -> float | None:
    """`bmm`, if it is a batch of thin products; None otherwise."""
    product = matmul_shape(signature)
    if product is None or product.batch <= 1 or 1 not in (product.m, product.n, product.k):
        return None
    blocks, resident = _grid(product)
    waves = max(1.0, product.batch * blocks / (streams.hardware.sm_count * resident))
    moved = float(tensor_bytes(signature.inputs) + tensor_bytes(signature.outputs))
    return max(streams.plain_us(moved), streams.kernel_us + streams.slower * waves * _BLOCK_US)


def _grid(product: Matmul) -> tuple[int, int]:
    """Blocks of one product, and how many fit a processor."""
    m, n, k = product.m, product.n, product.k
    if k == 1 and min(m, n) > 1:
        return math.ceil(max(m, n) / _TILE[0]) * math.ceil(min(m, n) / _TILE[1]), _TILE_BLOCKS
    results, along = (n, product.b_transposed) if m == 1 else (m, not product.a_transposed)
    if along:
        return math.ceil(results / _DOTS), _BLOCKS
    threads = min(_MOST_ALONG, 2 ** math.ceil(math.log2(max(1.0, k / _TERMS))))
    return math.ceil(results * threads / _SUMS), _BLOCKS

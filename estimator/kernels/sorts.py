"""Sorting, the largest few, and running sums: many short kernels in a row, or many passes of one.

sort    (Sort.cu) of one long row: CUB's radix sort, eight bits a pass, with kernels that prepare and gather:
            t = (4 + passes) * max(kernel, key and index, read and written / bandwidth)
        Rows of up to 4,096 elements are one block's each.
topk    (TensorTopK.cu) one block for a row finds the threshold two bits a pass, then the few are sorted:
            t = sort's kernel + max(1, rows / resident) * passes * (wait + loads of a thread * load)
scan    (ScanKernels.cu) one kernel, before it one that converts if types differ; waits for the rows' length

Fitted to one call each in steps on an H100 (sort of 8,192 numbers of 8 bytes, topk of 8, cumsum of 8 and 16,384 numbers),
so that the errors are wide. That the gradient of an embedding spends 105 us on sorting was fitted apart (`lookups.py`).
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, item_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature, TensorMeta

_MORE_KERNELS, _KERNEL_US, _DIGIT_BITS = 4, 7.5, 8
_BLOCK_ROW, _BLOCK_US = 4096, 12.0
_INDEX_BYTES = 8
_TOPK_BITS, _TOPK_WAIT_US, _TOPK_LOAD_US, _SMALL_SORT_US = 2, 0.85, 0.05, 3.0
_SCAN_US, _SCAN_STEP_US, _SCAN_THREADS = 4.9, 0.18, 512


def _rows(data: TensorMeta, signature: Signature) -> tuple[int, int]:
    """How many rows, and how long they are."""
    dim = argument(signature, "dim", -1)
    length = data.shape[dim] if data.shape and isinstance(dim, int) else 1
    return elements(data) // max(1, length), max(1, length)


def sort_us(streams: Streams, signature: Signature) -> float | None:
    """`sort`."""
    data = signature.inputs[0]
    rows, length = _rows(data, signature)
    item = item_bytes(data.dtype)
    traffic = 2 * elements(data) * (item + _INDEX_BYTES) / streams.bytes_per_us
    if length <= _BLOCK_ROW:
        turns = streams.waves(rows, max(32, min(1024, length // 4)))
        return streams.kernel_us + max(traffic, streams.slower * turns * _BLOCK_US)
    passes = _MORE_KERNELS + item * 8 // _DIGIT_BITS
    return passes * max(streams.slower * _KERNEL_US, streams.kernel_us + traffic)


def topk_us(streams: Streams, signature: Signature) -> float | None:
    """`topk`."""
    data = signature.inputs[0]
    rows, length = _rows(data, signature)
    threads = min(1024, max(32, math.ceil(length / 32) * 32))
    passes = item_bytes(data.dtype) * 8 // _TOPK_BITS
    walk = passes * (_TOPK_WAIT_US + _TOPK_LOAD_US * math.ceil(length / threads))
    return streams.kernel_us + _SMALL_SORT_US + streams.slower * streams.waves(rows, threads) * walk


def scan_us(streams: Streams, signature: Signature) -> float | None:
    """`cumsum` and `cumprod`."""
    data, out = signature.inputs[0], signature.outputs[0]
    rows, length = _rows(data, signature)
    converted = streams.kernel_us + 1.0 if data.dtype != out.dtype else 0.0
    turns = math.ceil(length / _SCAN_THREADS / 2) * streams.waves(rows, _SCAN_THREADS)
    return converted + max(
        streams.plain_us(2.0 * elements(out) * item_bytes(out.dtype)), _SCAN_US + turns * _SCAN_STEP_US
    )

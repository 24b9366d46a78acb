"""Rows by index: taken, and added where they came from (IndexKernel.cu, Indexing.cu).

taken       (`index` with one index, `gather` with one index for a whole row) copies rows in vectors of 16 bytes, like
            `index_select`, if rows begin at multiples of them. Since PyTorch 2.8.
added       (`index_put` that accumulates) sorts the indices by as many digits of eight bits as the rows have, then adds
                t = sort + max(elements / (1.58 a cycle * processors * clock), read and written / bandwidth)

summed      (`index_add`, `scatter_add`) adds element by element with atomic operations:
                t = max(bytes added / (2.1 a cycle * processors * clock), moved / bandwidth)
            and 0.17 elements a cycle where 64 indices and more meet in a place: the L2 adds to a line in turn. The gradient of
            experts' biases is such a sum.

Two indexed layers of a mixture in a step on an H200 set the rate (1.48 and 1.68, with four rows for one and one) and the sort
(24 us for 32,768 indices of two digits). Its rows taken are held out: 35 us, and 25 if the table stays in the L2; elements
one by one were said to take 91. Sums are those of a step of graph convolutions on an H100 ([2M, 256] in float32: 3.96 ms
beside a copy) and of pytorch's pull requests: 175760 ([4M, 128] in bfloat16 on an H100, 2.23 ms since March 2026, 4.72 before)
and 183950 (7.77M rows of 512 and 1,024 in float32, half of them for one row, on a B200: 46.0 and 98.9 ms). Held out:
TorchTitan's steps of gpt-oss (`docs/unseen.md`).
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.copies import lookup_us
from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, base_name, item_bytes, moved_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import elements, is_contiguous
from autosac.trace import Signature, TensorMeta

_VECTOR_BYTES = 16
_ADDED = 1.58
_SORT_US, _DIGIT_US, _DIGIT_BITS = 8.0, 8.0, 8
SUMMED = 2.1  # bytes
_CONTENDED, _MEET = 0.17, 64
_INDICES = ("int64", "int32")


def index_us(streams: Streams, signature: Signature) -> float | None:
    """`index` whose one index takes whole rows; None for other indices."""
    if len(signature.inputs) != 2:
        return None
    table, index = signature.inputs
    whole = signature.outputs[0].shape == (*index.shape, *table.shape[1:])
    return lookup_us(streams, signature) if whole and index.dtype in _INDICES and _vectors(table) else None


def gather_us(streams: Streams, signature: Signature) -> float | None:
    """`gather` along the first dimension with one index for each row, expanded to its elements."""
    if len(signature.inputs) != 2 or argument(signature, "dim", 0) != 0:
        return None
    table, index = signature.inputs
    expanded = len(index.shape) == 2 and index.stride[1] == 0 and index.shape[1:] == table.shape[1:]
    if not expanded or not _vectors(table):
        return None
    one = index._replace(shape=index.shape[:1], stride=index.stride[:1])
    return lookup_us(streams, Signature("aten.index_select.default", (table, one), signature.outputs))


def added_us(streams: Streams, signature: Signature) -> float | None:
    """`index_put` that accumulates; None if it does not, or if a mask says where."""
    if not argument(signature, "accumulate", False) or len(signature.inputs) < 3:
        return None
    table, *indices, _ = signature.inputs
    if any(index.dtype not in _INDICES for index in indices) or len(indices) > len(table.shape) or not elements(table):
        return None
    rows = math.prod(table.shape[: len(indices)])
    count = max(elements(index) for index in indices) * (elements(table) // rows)
    digits = max(1, math.ceil(math.log2(max(2, rows)) / _DIGIT_BITS))
    item = item_bytes(table.dtype)
    touched = min(count, elements(table))
    moved = streams.plain_us(item * (count + 2.0 * touched))
    copied = 0.0 if signature.mutates else streams.plain_us(2.0 * tensor_bytes([table]))
    return (
        copied
        + streams.slower * (_SORT_US + digits * _DIGIT_US)
        + max(moved, count / (_ADDED * streams.elements_per_us))
    )


def summed_us(streams: Streams, signature: Signature) -> float | None:
    """`index_add` and `scatter_add`."""
    if len(signature.inputs) < 3:
        return None
    table, index, source = signature.inputs[:3]
    if not elements(table):
        return None
    places = (
        elements(table) if base_name(signature.name) == "scatter_add" else _along(table, argument(signature, "dim", 0))
    )
    count = float(elements(source))
    cycles = count * item_bytes(table.dtype) / SUMMED
    if elements(index) >= _MEET * places:
        cycles = max(cycles, count / _CONTENDED)
    moved = streams.plain_us(moved_bytes(signature, "scatter"))
    return max(moved, streams.kernel_us + cycles / streams.elements_per_us)


def _along(meta: TensorMeta, dim: object) -> int:
    return meta.shape[dim] if isinstance(dim, int) and meta.shape else 1


def _vectors(table: TensorMeta) -> bool:
    """Whether rows can be copied in vectors."""
    if len(table.shape) < 2 or not is_contiguous(table._replace(shape=table.shape[1:], stride=table.stride[1:])):
        return False
    item = item_bytes(table.dtype)
    return not (math.prod(table.shape[1:]) * item % _VECTOR_BYTES or table.stride[0] * item % _VECTOR_BYTES)

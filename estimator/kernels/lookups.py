"""Gradients of embeddings (EmbeddingBackwardKernel.cu): fill the table, sort the indices, add up segments.

    t = fill + sort + elements / (0.243 a cycle * processors * clock)                      above 3,072 indices
    t = fill + start + indices * turn                                                      below

What one row with many indices takes more is counted in `latencies.py`, which also keeps the gradients of tables of up to 64
rows. An embedding bag's gradient is that of its indices, each with its bag's row.

Fitted to the even steps on an H100 (seven tables), judged on the odd ones.
"""

from __future__ import annotations

from autosac.estimator.kernels.copies import lookup_us
from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import tensor_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature

_SORTED, _FEW_ROWS = 3072, 64
_SORT_US, _ELEMENTS = 105.0, 0.243
_START_US, _TURN_US = 4.0, 0.03


def embedding_gradient_us(streams: Streams, signature: Signature) -> float | None:
    """`embedding_dense_backward` and `_embedding_bag_backward`."""
    if len(signature.inputs) < 2 or len(signature.outputs[0].shape) != 2:
        return None
    table = signature.outputs[0]
    rows, width = table.shape
    if rows <= _FEW_ROWS:
        return None
    count = elements(signature.inputs[1])
    fill = streams.fill_us(tensor_bytes([table]))
    if count <= _SORTED:
        return fill + streams.slower * (_START_US + count * _TURN_US)
    return fill + streams.slower * _SORT_US + count * width / (_ELEMENTS * streams.elements_per_us)


def bag_us(streams: Streams, signature: Signature) -> float | None:
    """`_embedding_bag`: a lookup whose rows are added up; two kernels before it write which bag an index is in."""
    looked_up = lookup_us(streams, signature)
    return None if looked_up is None else looked_up + 2 * streams.kernel_us

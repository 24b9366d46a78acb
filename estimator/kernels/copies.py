"""Concatenation, rotation and lookup: copies whose kernels compute where an element comes from.

concatenation   (Shape.cu) a grid of two blocks on every processor for each tensor. Contiguous tensors are copied in vectors,
                at the memory's rate. If one is strided, or an empty tensor is among them, as in a cache that begins empty,
                all are copied element by element:
                    t = late + max(elements of the longest / 0.64, all elements / 1.03) / (processors * clock)
                0.48 in place of 0.64 if neighbours of the result lie apart in it
rotation        (`roll`) one kernel for each dimension, which divides for every element: 0.85 of them a cycle and processor
lookup          (`embedding`, `index_select`) copies whole rows in vectors, at the memory's rate; a table that fits the L2 is
                read once. Releases before 2.8 took up to 2.7 times as long.

Fitted to 42 concatenations of `autosac calibrate` on an H100, and to `roll` in 16 bits in one of its training steps. The rate
of one tensor that lies apart is that of OWLv2's in TraceLens's H100 traces (171dd747).
"""

from __future__ import annotations

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.walks import lies_apart
from autosac.estimator.work import argument, base_name, item_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import elements, fastest_first, is_contiguous
from autosac.trace import Signature, TensorMeta

_ONE, _APART, _MOST = 0.64, 0.48, 1.03  # elements a cycle and processor: of one tensor's grid, and of any
_LATE_US = 1.5
_ROLLED = 0.85


def concatenation_us(streams: Streams, signature: Signature) -> float | None:
    """`cat`, and `stack`, which concatenates tensors with one more dimension."""
    out = signature.outputs[0]
    inputs = [meta for meta in signature.inputs if elements(meta)]
    if not inputs or not elements(out) or any(meta.dtype != out.dtype for meta in inputs):
        return None
    plain = streams.plain_us(2 * tensor_bytes([out]))
    stacks = base_name(signature.name) == "stack"
    if len(inputs) == len(signature.inputs) and all(is_contiguous(m) if stacks else _dense(m, out) for m in inputs):
        return plain
    longest = max(inputs, key=elements)
    apart = len(longest.shape) == len(out.shape) and lies_apart(longest, out)
    cycles = max(elements(longest) / (_APART if apart else _ONE), elements(out) / _MOST)
    return max(plain, _LATE_US + streams.kernel_us + cycles / streams.elements_per_us)


def _dense(meta: TensorMeta, out: TensorMeta) -> bool:
    """Whether the tensor fills its memory, with its dimensions in the order of the result's."""
    expected = 1
    for d in fastest_first(out):
        if meta.shape[d] > 1 and meta.stride[d] != expected:
            return False
        expected *= meta.shape[d]
    return True


def roll_us(streams: Streams, signature: Signature) -> float | None:
    """`roll` along one or more dimensions."""
    dims = argument(signature, "dims")
    kernels = max(1, len(dims)) if isinstance(dims, tuple) else 1
    out = signature.outputs[0]
    once = max(streams.plain_us(2 * tensor_bytes([out])), elements(out) / (_ROLLED * streams.elements_per_us))
    return kernels * once


def lookup_us(streams: Streams, signature: Signature) -> float | None:
    """`embedding`, and `index_select` along the first dimension."""
    if len(signature.inputs) < 2 or argument(signature, "dim", 0) != 0:
        return None
    table, indices = signature.inputs[:2]
    written = elements(signature.outputs[0]) * item_bytes(table.dtype)
    cached = tensor_bytes([table]) <= streams.hardware.l2_bytes
    read = min(written, tensor_bytes([table])) if cached else written
    return streams.plain_us(written + read + tensor_bytes([indices]))

"""Gradients of views: zeros, and a copy of the part that has a gradient.

    t = fill(whole) + copy(part into its place)

A copy of rows that do not fill the tensor is strided, so that it has the price of strided copies. Nothing was fitted here but
the rate at which memory is filled (`streams.py`).
"""

from __future__ import annotations

from autosac.estimator.kernels.streams import Streams, strip
from autosac.estimator.work import argument, base_name, tensor_bytes
from autosac.trace import Signature, TensorMeta


def gradient_us(streams: Streams, signature: Signature) -> float | None:
    """`select_backward` and `slice_backward`."""
    part = _part(signature)
    if part is None:
        return None
    return streams.fill_us(tensor_bytes(signature.outputs)) + streams.copy_us(signature.inputs[0], part)


def _part(signature: Signature) -> TensorMeta | None:
    """Where the gradient goes in the result."""
    gradient, whole = signature.inputs[0], signature.outputs[0]
    dim, step = argument(signature, "dim", 0), argument(signature, "step", 1)
    if not isinstance(dim, int) or not isinstance(step, int) or not whole.shape:
        return None
    dim %= len(whole.shape)
    if base_name(signature.name) == "select_backward":
        return strip(whole, dim)
    stride = tuple(s * step if d == dim else s for d, s in enumerate(whole.stride))
    return gradient._replace(stride=stride, dtype=whole.dtype)

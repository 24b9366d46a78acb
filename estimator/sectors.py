"""What strided reads fetch beyond what they use: DRAM reads whole sectors.

An elementwise kernel walks its output in the order of the output's memory. If neighbours of that walk lie s bytes apart in an
input of b bytes an element, each of them fetches min(s, 64) bytes for b that it uses. The rest of a sector is used later,
when the walk comes to the dimension that is the input's fastest. It is then still in the L2 only if what the walk touched
in between fits there; otherwise the sector is fetched again:

    extra = input bytes * (min(s, 64) / b - 1)      if the sectors between two uses exceed half of the L2
          = 0                                       otherwise

64 bytes is what one access to HBM2e and HBM3 transfers. T5's additions of its relative position bias, which has the heads
fastest, chose them over 32 in float32; they were checked in float16 and at another length (`docs/causes.md`).
"""

from __future__ import annotations

from autosac.estimator.work import item_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import fastest_first
from autosac.trace import Signature, TensorMeta

_SECTOR_BYTES = 64
_L2_SHARE = 0.5


def overfetched_bytes(signature: Signature, l2_bytes: float) -> float:
    """Bytes that an elementwise operator fetches more often than once; 0 where its inputs are laid out like its output."""
    if not signature.outputs:
        return 0.0
    out = signature.outputs[0]
    return sum(
        _extra(meta, out, l2_bytes)
        for meta in signature.inputs
        if meta.place == "device" and meta.shape == out.shape and meta.stride != out.stride
    )


def _extra(meta: TensorMeta, out: TensorMeta, l2_bytes: float) -> float:
    walked = fastest_first(out)
    if not walked or 0 in (meta.stride[d] for d in walked):
        return 0.0
    item = item_bytes(meta.dtype)
    step = min(meta.stride[walked[0]] * item, _SECTOR_BYTES)
    if step <= item:
        return 0.0
    touched = float(step)
    for d in walked:
        if meta.stride[d] * item < _SECTOR_BYTES and d != walked[0]:
            break  # here the walk comes back to the sectors that it has touched
        touched *= out.shape[d]
    else:
        touched = float("inf")
    return tensor_bytes([meta]) * (step / item - 1) if touched > _L2_SHARE * l2_bytes else 0.0

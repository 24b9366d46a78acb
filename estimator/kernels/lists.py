"""Operators on lists of tensors, as optimizers call them (MultiTensorApply.cuh).

A launch takes up to 320 chunks of 65,536 elements, and up to 110 to 30 tensors by how many lists there are. One block walks a
chunk, 2,048 elements at a time, and waits for each step. In 16 bits steps take longer than their bytes:

    launch  = max(steps * wait, bytes / bandwidth),      steps = 32, or fewer if no tensor fills a chunk

    wait    = (0.6 + 0.35 streams) us, less with fewer than 200 blocks, which the memory serves sooner

Scalars that differ from tensor to tensor cost a division more. Fitted to the lists of `autosac calibrate` on an H100; held
out: an optimizer in a step on it.
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import base_name, item_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature

_CHUNK, _CHUNKS, _STEP = 65_536, 320, 2048
_TENSORS = (110, 64, 48, 36, 30)
_WAIT_US, _STREAM_US, _DIVISION_US = 0.6, 0.35, 0.6
_ALONE, _CROWDED = 0.12, 200  # of a wait, with few blocks; blocks that make it whole
_READ = 0.75  # of the peak bandwidth
_LISTS = {"lerp": 2, "addcmul": 3, "addcdiv": 3}  # read, where not all inputs are one list


def list_us(streams: Streams, signature: Signature) -> float | None:
    """Operators called `_foreach_...` that write as many elements as they read of their first list."""
    name = base_name(signature.name)
    if name == "norm" or "Tensor" in signature.name.rsplit(".", 1)[-1]:
        return None
    lists = _LISTS.get(name, 2 if signature.name.endswith("List") and "Scalar" not in signature.name else 1)
    tensors = signature.inputs[: len(signature.inputs) // lists]
    if not tensors or len(signature.inputs) % lists:
        return None
    written = 0 if signature.mutates else 1
    depth = min(lists + written, len(_TENSORS))
    chunks = sum(math.ceil(elements(meta) / _CHUNK) for meta in tensors)
    launches = max(1, math.ceil(chunks / _CHUNKS), math.ceil(len(tensors) / _TENSORS[depth - 1]))
    crowded = _ALONE + (1 - _ALONE) * min(1.0, chunks / launches / _CROWDED)
    steps = math.ceil(min(_CHUNK, max(elements(meta) for meta in tensors)) / _STEP)
    wait = _WAIT_US + _STREAM_US * (lists + 1) + (_DIVISION_US if name == "div" else 0.0)
    moved = (lists + 1) * sum(elements(meta) * item_bytes(meta.dtype) for meta in tensors)
    read = moved / (streams.peak_bytes_per_us * _READ)
    return streams.kernel_us + max(streams.slower * launches * steps * wait * crowded, read)

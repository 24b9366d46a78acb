"""Operators on lists of tensors, as optimizers call them (MultiTensorApply.cuh).

A launch takes up to 320 chunks of 65,536 elements, and up to 110 to 30 tensors by how many lists there are. One block walks a
chunk, 2,048 elements at a time, and waits for each step. In 16 bits steps take longer than their bytes:

    launch  = max(steps * wait, bytes / bandwidth),      steps = 32, or fewer if no tensor fills a chunk

    wait    = (0.2 + 0.35 streams) us, less with fewer than 200 blocks, which the memory serves sooner

and 0.4 us more where a tensor's length is no multiple of 4, which is what a thread loads at once. Scalars that differ from
tensor to tensor cost a division more, Adam's rule 0.9 us. Fitted to the lists of `autosac calibrate` on an H100, whose lengths
are odd; held out: an optimizer in a step on it. Even lengths and Adam: the optimizer of a step in bf16 on an H200, of 3.7
billion parameters (`benchmarks/gpu/layers.py`); nothing is held out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, base_name, item_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature, TensorMeta

_CHUNK, _CHUNKS, _STEP = 65_536, 320, 2048
_TENSORS = (110, 64, 48, 36, 30)
_WAIT_US, _ODD_US, _STREAM_US, _DIVISION_US, _ADAM_US = 0.2, 0.4, 0.35, 0.6, 0.9
_VECTOR = 4  # elements that a thread loads at once
_ALONE, _CROWDED = 0.12, 200  # of a wait, with few blocks; blocks that make it whole
_READ = 0.75  # of the peak bandwidth
_LISTS = {"lerp": 2, "addcmul": 3, "addcdiv": 3}  # read, where not all inputs are one list


def list_us(streams: Streams, signature: Signature) -> float | None:
    """Operators called `_foreach_...` that write as many elements as they read of their first list, or their norms."""
    name = base_name(signature.name)
    if name != "norm" and "Tensor" in signature.name.rsplit(".", 1)[-1] and not _scales(signature):
        return None
    given = signature.inputs[:-1] if _scales(signature) else signature.inputs
    lists = _LISTS.get(name, 2 if signature.name.endswith("List") and "Scalar" not in signature.name else 1)
    tensors = given[: len(given) // lists]
    if not tensors or len(given) % lists:
        return None
    passed = lists if signature.mutates or name == "norm" else lists + 1  # to a launch
    wait = _DIVISION_US if name == "div" else 0.0
    return _launches_us(streams, tensors, passed, lists + (name != "norm"), wait)


def adam_us(streams: Streams, signature: Signature) -> float | None:
    """`_fused_adam_` and `_fused_adamw_`: parameters, gradients and two states (three with amsgrad) are read, all but the
    gradients are written.
    """
    lists = 5 if argument(signature, "amsgrad", default=False) else 4
    given = [meta for meta in signature.inputs if meta.shape]  # without the steps' numbers
    if not given or len(given) % lists:
        return None
    return _launches_us(streams, given[: len(given) // lists], lists, 2 * lists - 1, _ADAM_US)


def _scales(signature: Signature) -> bool:
    """Whether a list is multiplied by one number on the device, as clipping does: `_foreach_mul_.Tensor`."""
    return base_name(signature.name) in ("mul", "div") and not signature.inputs[-1].shape


def _launches_us(
    streams: Streams, tensors: Sequence[TensorMeta], lists: int, moved_lists: int, more_us: float
) -> float:
    """Launches that take `lists` lists of tensors like these, and read or write `moved_lists`."""
    depth = min(lists, len(_TENSORS))
    chunks = sum(math.ceil(elements(meta) / _CHUNK) for meta in tensors)
    launches = max(1, math.ceil(chunks / _CHUNKS), math.ceil(len(tensors) / _TENSORS[depth - 1]))
    crowded = _ALONE + (1 - _ALONE) * min(1.0, chunks / launches / _CROWDED)
    steps = math.ceil(min(_CHUNK, max(elements(meta) for meta in tensors)) / _STEP)
    odd = any(elements(meta) % _VECTOR for meta in tensors)
    wait = _WAIT_US + _ODD_US * odd + _STREAM_US * moved_lists + more_us
    moved = moved_lists * sum(elements(meta) * item_bytes(meta.dtype) for meta in tensors)
    read = moved / (streams.peak_bytes_per_us * _READ)
    return streams.kernel_us + max(streams.slower * launches * steps * wait * crowded, read)

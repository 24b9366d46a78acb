"""Layer norm, RMS norm and the gradient of group norm (layer_norm_kernel.cu, group_norm_kernel.cu).

A row is the work of one block of 128 threads, of which 16 run on a processor at once. It is read twice, the second time from a
cache if all rows under way fit there. Short rows wait:

    forward        = start + (walk^p + read^p)^(1/p),     walk = max(1, rows / resident) * (wait + wait' * row / 2 KiB)
                                                          read = (2 + missed) * bytes / bandwidth
    input's part   = start + walk + (4.5 + 0.9 * missed) * bytes / bandwidth   both tensors are read twice, one is written
    weight's part  = start + max(rows / 256 * turn, 2 * bytes / bandwidth)

The gradient of weight and bias gives 32 columns to one block of 1,024 threads, which walks down all rows, 256 at a turn: with
512 columns 16 blocks are at work, whatever the GPU's size. Above 65,536 rows a grid shares them (since PyTorch 2.8).
A turn is shorter for RMS norms, which have no mean to subtract. On Blackwell, whose memory is further ahead of the processors,
what is said of memory in the input's part takes 1.53 times as long.
Tensors that are not contiguous are copied first. `bytes / bandwidth` is what an H100 takes; where the L2 is further ahead of
the memory (Ada), it is less for tensors that the L2 holds (`Streams.cached_gain`).

Group norm reads each group in one block of 512 threads, then scales with operands that are broadcast:

    t = 3 starts + max(1, groups / resident) * ceil(group / 512) * wait + broadcast product

Its gradient sums each image's channels in blocks of their own, then writes the input's gradient with operands that
are broadcast:   t = start + blocks / resident * wait + elements / (0.55 a cycle * processors * clock)

Fitted to single calls of `autosac calibrate` (14 of each kind) and the even steps on an H100, judged on the odd ones. For the
gradients of layer norm and RMS norm every second RMS norm of NVIDIA's table of an H200 and a GB200 was used, too; held out are
the others, and a GB300 (`benchmarks/norms.py`).
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, item_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import elements, is_contiguous
from autosac.trace import Signature, TensorMeta

_BLOCK, _ROW = 128, 2048.0
_START, _WAIT_US, _LONGER_US, _CACHED, _READ, _OVERLAP = 0.5, 2.71, 0.857, 0.47, 0.846, 1.465
_WAIT_RMS_US = 1.2  # without a mean that is divided anew for each element
_START_BACKWARD, _WAIT_BACKWARD_US, _LONGER_BACKWARD_US = 0.87, 0.63, 0.074
_PASSES_BACKWARD, _MISSED_PASSES, _CACHED_BACKWARD = 4.53, 0.91, 0.502
_BLACKWELL, _BLACKWELL_PASSES = 10, 1.53  # compute capability, and what memory takes there
_COLUMNS, _MANY_ROWS, _TURN_US, _TURN_RMS_US = 32, 65_536, 0.84, 0.53
_TURNS = ((256, 256), (128, 128), (64, 64), (0, 8))  # from so many rows on: rows of a turn
_GROUP_BLOCK, _GROUP_TURN_US = 512, 0.45
_GROUP_START_US, _GROUP_WAIT_US, _GROUP_ELEMENTS = 15.1, 1.13, 0.55


def _rows(signature: Signature, data: TensorMeta) -> tuple[int, int, int]:
    """Rows, their elements, and the bytes of one of these."""
    normalized = argument(signature, "normalized_shape")
    sizes = [n for n in normalized if isinstance(n, int)] if isinstance(normalized, tuple) else [data.shape[-1]]
    length = max(1, math.prod(sizes))
    return elements(data) // length, length, item_bytes(data.dtype)


def _made_contiguous_us(streams: Streams, metas: tuple[TensorMeta, ...], like: TensorMeta) -> float:
    """Copies of those that are not."""
    return sum(streams.copy_us(meta, like) for meta in metas if not is_contiguous(meta))


def layer_norm_us(streams: Streams, signature: Signature) -> float | None:
    """`native_layer_norm` and `_fused_rms_norm`."""
    data, out = signature.inputs[0], signature.outputs[0]
    if not data.shape or not elements(data):
        return None
    rows, length, item = _rows(signature, data)
    missed = streams.missed(min(rows, streams.resident(_BLOCK)) * length * item, _CACHED)
    wait = _WAIT_RMS_US if "rms" in signature.name else _WAIT_US
    walk = streams.slower * max(1.0, rows / streams.resident(_BLOCK)) * (wait + _LONGER_US * length * item / _ROW)
    nbytes = rows * length * item
    read = (2 + missed) * nbytes / (streams.peak_bytes_per_us * _READ) * streams.cached_gain(2 * nbytes)
    both = float((walk**_OVERLAP + read**_OVERLAP) ** (1 / _OVERLAP))
    return _START * streams.kernel_us + both + _made_contiguous_us(streams, (data,), out)


def layer_norm_gradient_us(streams: Streams, signature: Signature) -> float | None:
    """`native_layer_norm_backward` and `_fused_rms_norm_backward`."""
    if len(signature.inputs) < 2 or not signature.inputs[1].shape or not elements(signature.inputs[1]):
        return None
    data, out = signature.inputs[1], signature.outputs[0]
    rows, length, item = _rows(signature, data)
    nbytes = rows * length * item
    start = _START_BACKWARD * streams.kernel_us
    waves = max(1.0, rows / streams.resident(_BLOCK))
    walk = waves * (_WAIT_BACKWARD_US + _LONGER_BACKWARD_US * length * item / _ROW)
    gain = streams.cached_gain(3 * nbytes)
    under_way = 2 * min(rows, streams.resident(_BLOCK)) * length * item
    passes = _PASSES_BACKWARD + _MISSED_PASSES * streams.missed(under_way, _CACHED_BACKWARD)
    if streams.hardware.compute_capability[0] >= _BLACKWELL:
        passes *= _BLACKWELL_PASSES
    us = start + streams.slower * walk + gain * passes * nbytes / streams.bytes_per_us
    if len(signature.outputs) > 1:
        turn_us = _TURN_RMS_US if "rms" in signature.name else _TURN_US
        us += start + _weight_us(streams, rows, length, gain * nbytes, turn_us)
    return us + _made_contiguous_us(streams, signature.inputs[:2], out)


def _weight_us(streams: Streams, rows: int, length: int, nbytes: float, turn_us: float) -> float:
    read = 2 * nbytes / streams.bytes_per_us
    processors = streams.hardware.sm_count
    if rows > _MANY_ROWS and length / _COLUMNS < processors / 2:
        return read
    turn = next(turn for least, turn in _TURNS if rows >= least)
    turns = math.ceil(rows / turn) * max(1.0, length / _COLUMNS / processors / 2)
    return max(read, streams.slower * turns * turn_us)


def group_norm_us(streams: Streams, signature: Signature) -> float | None:
    """`native_group_norm`."""
    data, groups = signature.inputs[0], argument(signature, "group")
    if len(data.shape) < 3 or not isinstance(groups, int) or not elements(data):
        return None
    rows = data.shape[0] * groups
    turns = math.ceil(elements(data) / rows / _GROUP_BLOCK) * streams.waves(rows, _GROUP_BLOCK)
    read = tensor_bytes([data]) / streams.bytes_per_us
    scales = data._replace(shape=(*data.shape[:2], *(1,) * (len(data.shape) - 2)), stride=(1,) * len(data.shape))
    scaled = streams.walked_us(Signature("aten.mul.Tensor", (data, scales), signature.outputs[:1]))
    return 2 * streams.kernel_us + max(read, streams.slower * turns * _GROUP_TURN_US) + scaled


def group_norm_gradient_us(streams: Streams, signature: Signature) -> float | None:
    """`native_group_norm_backward`."""
    if len(signature.inputs) < 2 or len(signature.inputs[1].shape) < 3:
        return None
    data = signature.inputs[1]
    channels = data.shape[0] * data.shape[1]
    threads = 512 if elements(data) >= 512 * channels else 32
    waves = max(1.0, channels / streams.resident(threads))
    waits = streams.slower * (_GROUP_START_US + waves * _GROUP_WAIT_US)
    return waits + elements(data) / (_GROUP_ELEMENTS * streams.elements_per_us)

"""Batch norm of [images, channels, ...] by PyTorch's own kernels (Normalization.cuh), which give each channel to one block.

A block of 512 threads walks a channel, 32 to 512 lanes along an image and the rest over images, and waits for every step:

    steps      = ceil(images / (512 / lanes)) * ceil(positions / lanes)
    walk       = steps * max(wait * waves, issue * channels / processors)
    forward    = walk of the statistics + elements
    backward   = walk with the sums of the gradient first, then the gradient of the input

`wait` is the latency of memory, or of the L2 where the tensor is still there. Backwards the first half of a step's accesses
always comes from memory, because the input was saved long before. The forward's second kernel gives 64 images of a channel a
small block each. With many channels and small images these blocks take longer than their bytes:

    elements   = max(bytes / bandwidth, waves * (start + wait * steps of a block))

Fitted to 70 single calls of `autosac calibrate` on an H100; held out: both steps with batch norms in `benchmarks/step_kinds`.

With channels last, threads hold some channels each, and a number of elements passes through a processor in a cycle:

    time       = start + elements / (rate * processors * clock),     rate = 0.89 forward, 1.16 backward

A vendor's library takes float16 and float32. Its kernels read and write at the bandwidth (`latencies.py`); with channels last
those for channels that are no multiple of 64 take 1.9 times as long. Fitted to every second kind of call of a ResNeXt in
bfloat16 and a MobileNet in float16 on an H200 (`benchmarks/gpu/unseen_later.py`); held out: the others.
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, item_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature, TensorMeta

_BLOCK = 512
_OWN_TYPE = "bfloat16"  # which PyTorch does not give to cuDNN; a capture calls both `native_batch_norm`
# Microseconds: from the L2 and from memory; both passes' accesses of a step backwards.
_WAIT, _WAIT_BACKWARD = (0.22, 0.44), (0.42, 0.97)
_ISSUE, _ISSUE_BACKWARD = 0.118, 0.196  # microseconds of a step, where many blocks share a processor
_CACHED, _CACHED_BACKWARD = 0.32, 0.38  # of the L2
_START_US, _START_BACKWARD_US = 7.0, 3.4
_BLOCK_START_US = 1.7
_MOST_BLOCKS, _SMALL_BLOCK = 256 * 1024, 64
_PASSES, _PASSES_BACKWARD = 3, 5
_LAST, _LAST_BACKWARD = (8.0, 0.89), (18.0, 1.16)  # channels last: start, and elements a cycle and processor
_SLICE, _NO_SLICE = 64, 1.9


def _lanes(positions: int) -> int:
    """The threads along an image."""
    return next((size for size in (32, 64, 128, 256) if positions <= size), _BLOCK)


def _walked(data: TensorMeta) -> tuple[int, int, int, int] | None:
    """Images, channels, positions and the steps of a block; None for other types and layouts."""
    if data.dtype != _OWN_TYPE or len(data.shape) < 2 or data.stride[1] == 1 or not elements(data):
        return None
    images, channels, positions = data.shape[0], data.shape[1], math.prod(data.shape[2:])
    lanes = _lanes(positions)
    steps = math.ceil(images / (_BLOCK // lanes)) * math.ceil(positions / lanes)
    return images, channels, positions, steps


def _waited(waits: tuple[float, float], missed: float) -> float:
    """The wait of a step with this share of its accesses from memory, the others from the L2."""
    cached, uncached = waits
    return cached + (uncached - cached) * missed


def _walk_us(streams: Streams, channels: int, steps: int, wait: float, issue: float) -> float:
    """The walk of all channels' blocks: see the module's docstring."""
    own = max(wait * math.ceil(channels / streams.resident(_BLOCK)), issue * channels / streams.hardware.sm_count)
    return streams.slower * steps * own


def _channels_last_us(
    streams: Streams, data: TensorMeta, passes: int, start_and_rate: tuple[float, float]
) -> float | None:
    """Tensors with channels last; None for others, and where the library's kernels read and write at the bandwidth."""
    if len(data.shape) < 4 or data.stride[1] != 1 or data.shape[1] == 1:
        return None
    if data.dtype == _OWN_TYPE:
        start, rate = start_and_rate
        return start + elements(data) / (rate * streams.elements_per_us)
    if data.shape[1] % _SLICE == 0:
        return None
    return streams.kernel_us + _NO_SLICE * passes * elements(data) * item_bytes(data.dtype) / streams.bytes_per_us


def forward_us(streams: Streams, signature: Signature) -> float | None:
    """`native_batch_norm` in training."""
    data = signature.inputs[0]
    if argument(signature, "training", True) is False:
        return None
    walked = _walked(data)
    if walked is None:
        return _channels_last_us(streams, data, _PASSES, _LAST)
    images, channels, positions, steps = walked
    nbytes = elements(data) * item_bytes(data.dtype)
    missed = streams.missed(nbytes, _CACHED)
    wait = _waited(_WAIT, missed)
    walk = max(_walk_us(streams, channels, steps, wait, _ISSUE), missed * nbytes / streams.bytes_per_us)
    lanes = max(_lanes(positions // 4), min(_lanes(positions), _SMALL_BLOCK))
    rows = max(1, _SMALL_BLOCK // lanes)
    blocks = max(1, min(_MOST_BLOCKS // channels, math.ceil(images / rows)))
    small = math.ceil(images / (rows * blocks)) * math.ceil(positions / lanes)
    latency = streams.slower * streams.waves(channels * blocks, lanes * rows) * (_BLOCK_START_US + wait * small)
    return _START_US + walk + max(2 * nbytes / streams.bytes_per_us, latency)


def backward_us(streams: Streams, signature: Signature) -> float | None:
    """`native_batch_norm_backward` in training."""
    if len(signature.inputs) < 2:
        return None
    data = signature.inputs[1]
    if argument(signature, "train", True) is False:
        return None
    walked = _walked(data)
    if walked is None:
        return _channels_last_us(streams, data, _PASSES_BACKWARD, _LAST_BACKWARD)
    _, channels, _, steps = walked
    nbytes = elements(data) * item_bytes(data.dtype)
    missed = streams.missed(2 * nbytes, _CACHED_BACKWARD)
    wait = (_WAIT_BACKWARD[1] + _waited(_WAIT_BACKWARD, missed)) / 2
    walk = _walk_us(streams, channels, steps, wait, _ISSUE_BACKWARD * wait / _WAIT_BACKWARD[0])
    return _START_BACKWARD_US + max(walk, missed * _PASSES_BACKWARD * nbytes / streams.bytes_per_us)

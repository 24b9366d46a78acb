"""Softmax of long rows, and the negative log likelihood (SoftMax.cu, NLLLoss.cu).

A row that fits neither registers nor shared memory is one block's work. It reads the row three times and writes it once; what
two blocks on every processor are working on together is read again from the L2, if it fits:

    forward   = rows / processors * max(start + issue * elements, (2 + 2 missed) * row / bandwidth of a processor)
    backward  = rows / processors * max(start + issue * elements, (3 + missed) * row / bandwidth of a processor)

with `missed` from 0 to 1 as what is under way grows from 0.35 to 0.7 of the L2. The backward is that of the logarithm; that of
the softmax itself multiplies in a kernel of its own before (`memory_bound.py`).

A softmax across planes (over the classes of images) reads its input three times and writes once; backwards it reads both
tensors twice. One loss of images on an H200, both ways.

The likelihood is one block of up to 1,024 threads, which take the rows in turn. Its gradient fills a tensor with zeros first.
Fitted to 28 single calls each of `autosac calibrate` and the even steps on an H100.
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.memory_bound import row_bytes, softmax_regime
from autosac.estimator.work import argument, base_name, item_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import contiguous, elements, is_contiguous
from autosac.trace import Signature

_ROW_START_US, _ELEMENT_NS = 2.5, 0.19
_CACHED, _BLOCKS_A_PROCESSOR = 0.35, 2
_SUSTAINED = 0.905  # of the peak bandwidth: three reads and a write of 10 GB
_ACROSS, _ACROSS_BACKWARD = 4, 5
_THREADS, _TURN_US = 1024, 0.95
_LIKELIHOOD_US, _GRADIENT_US = 3.0, 3.0
# Rows of the step's loss that left the caches: 18 to 22 us for 512 to 16,384 of them, found by chance.
_UNCACHED_US = 19.0
# Of images: an eighth of a thousand blocks' worth of positions is one block's. One step of a 3D U-Net, both ways.
_IMAGE_BLOCKS, _IMAGE_TURN_US, _IMAGE_GRADIENT_TURN_US = 128, 1.0, 0.55
# A step of CTC's recursion over time, which all samples take at once: one step of a wave encoder, both ways.
_RECURSION_US, _RECURSION_GRADIENT_US = 0.54, 1.1


def softmax_us(streams: Streams, signature: Signature) -> float | None:
    """`_softmax` and `_log_softmax` forward, and the backward of the latter, of rows that are read again."""
    data = signature.inputs[0]
    if _is_across(signature):
        return _across_us(streams, signature)
    item, row = item_bytes(data.dtype), row_bytes(signature)
    if softmax_regime(row, item) not in ("softmax_reread", "softmax_unaligned") or not _rows_are_last(signature):
        return None
    backward = "backward" in base_name(signature.name)
    processors = streams.hardware.sm_count
    under_way = min(elements(data) * item / row, _BLOCKS_A_PROCESSOR * processors) * row
    missed = streams.missed(under_way * (2 if backward else 1), _CACHED)
    passes = 3 + missed if backward else 2 + 2 * missed
    rate = streams.peak_bytes_per_us * _SUSTAINED / processors
    one = max(streams.slower * (_ROW_START_US + _ELEMENT_NS * 1e-3 * row / item), passes * row / rate)
    return streams.kernel_us + max(1.0, elements(data) * item / row / processors) * one


def _is_across(signature: Signature) -> bool:
    """Whether the softmax is over a dimension that others follow, as over the classes of images."""
    data, dim = signature.inputs[0], argument(signature, "dim")
    return isinstance(dim, int) and math.prod(data.shape[dim % len(data.shape) + 1 :]) > 1 if data.shape else False


def _across_us(streams: Streams, signature: Signature) -> float:
    """Each thread walks one position's classes. Tensors that are not contiguous are copied first."""
    copied = sum(0.0 if is_contiguous(m) else streams.copy_us(m, contiguous(m)) for m in signature.inputs)
    passes = _ACROSS_BACKWARD if "backward" in signature.name else _ACROSS
    return streams.kernel_us + copied + passes * tensor_bytes(signature.outputs) / streams.bytes_per_us


def _rows_are_last(signature: Signature) -> bool:
    data, dim = signature.inputs[0], argument(signature, "dim")
    return isinstance(dim, int) and bool(data.shape) and dim % len(data.shape) == len(data.shape) - 1


def likelihood_us(streams: Streams, signature: Signature) -> float | None:
    """`nll_loss_forward` over [rows, classes]."""
    if len(signature.inputs) < 2 or len(signature.inputs[0].shape) != 2:
        return None
    turns = math.ceil(signature.inputs[0].shape[0] / _THREADS)
    least = _UNCACHED_US if tensor_bytes(signature.inputs[:1]) > streams.hardware.l2_bytes else 0.0
    return streams.slower * max(least, _LIKELIHOOD_US + turns * _TURN_US)


def likelihood_gradient_us(streams: Streams, signature: Signature) -> float | None:
    """`nll_loss_backward` over [rows, classes]."""
    if len(signature.inputs) < 3 or len(signature.inputs[1].shape) != 2:
        return None
    turns = math.ceil(signature.inputs[1].shape[0] / _THREADS)
    return streams.fill_us(tensor_bytes(signature.outputs)) + streams.slower * (_GRADIENT_US + turns * _TURN_US)


def likelihood_of_images_us(streams: Streams, signature: Signature) -> float | None:
    """`nll_loss2d_forward` and its gradient, over [images, classes, height, width] (NLLLoss2d.cu): few blocks for an image."""
    backward = "backward" in signature.name
    data = signature.inputs[1 if backward else 0]
    if len(data.shape) != 4:
        return None
    positions = data.shape[2] * data.shape[3]
    blocks = max(1, math.ceil(positions / _THREADS) // _IMAGE_BLOCKS)
    turns = math.ceil(positions / (_THREADS * blocks)) * streams.waves(data.shape[0] * blocks, _THREADS)
    walked = streams.slower * turns * (_IMAGE_GRADIENT_TURN_US if backward else _IMAGE_TURN_US)
    return walked + (streams.fill_us(tensor_bytes(signature.outputs)) if backward else streams.kernel_us)


def recursion_us(streams: Streams, signature: Signature) -> float | None:
    """`_ctc_loss` and its gradient (LossCTC.cu): as many steps as there are times, one after the other."""
    backward = "backward" in signature.name
    data = signature.inputs[1 if backward else 0]
    if not data.shape:
        return None
    step = _RECURSION_GRADIENT_US if backward else _RECURSION_US
    return streams.kernel_us + streams.slower * data.shape[0] * step

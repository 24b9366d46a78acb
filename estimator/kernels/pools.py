"""Pooling and nearest neighbours of images: one thread for each element, which divides to find out where its window lies.

    t = start + elements * cycles / (processors * clock)

    max pooling               2.1 + 0.2 * window               for an element of the result (in three dimensions 0.7 * window)
    its gradient              2.21 + 0.14 * windows            for an element of the image, which lies in so many windows
    average pooling           1.85 + 0.2 * window              for an element of the result
    its gradient              4.0                              for an element of the image
    nearest neighbours        0.8                              for an element of the result
    their gradient            2.9                              for an element of the result; a strided one is copied first
    bilinear                  2.4                              for an element of the large tensor
    its gradient              3.4                              for an element of the large tensor

All of them read and write too, which overlaps; the longer of both counts. A processor of AMD's has half as many lanes, so
that an element takes twice as many of its cycles. Fitted to single calls of `autosac calibrate` and steps on an H100; two
calls of a ResNet on an MI300X were held out. Bilinear: the largest calls of a SegFormer on an H200; its others were held out.
"""

from __future__ import annotations

import math

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, base_name, moved_bytes
from autosac.memory_sim.tensor_sizes import contiguous, elements, is_contiguous
from autosac.trace import Signature

_MAX, _MAX_WINDOW, _MAX_WINDOW_3D = 2.1, 0.2, 0.7
_MAX_GRADIENT, _MAX_GRADIENT_WINDOWS = 2.21, 0.14
_AVERAGE, _AVERAGE_GRADIENT = 1.85, 4.0
_NEAREST, _NEAREST_GRADIENT = 0.8, 2.9
_BILINEAR, _BILINEAR_GRADIENT = 2.4, 3.4
# Of a processor, relative to NVIDIA's. Nearest neighbours need no more cycles: four kinds of calls in TraceLens's Flux and
# Stable Diffusion on an MI300X (171dd747) took 0.60 to 0.90.
_LANES = {"AMD": 0.5}


def pooling_us(streams: Streams, signature: Signature) -> float | None:
    """`max_pool2d_with_indices`, `avg_pool2d` and the same in three dimensions."""
    window, out = _window(signature), signature.outputs[0]
    if not window:
        return None
    size = math.prod(window)
    if "avg" in signature.name:
        cycles = _AVERAGE + _MAX_WINDOW * size
    else:
        cycles = _MAX_WINDOW_3D * size if len(window) == 3 else _MAX + _MAX_WINDOW * size
    return _took_us(streams, signature, elements(out), cycles)


def pooling_gradient_us(streams: Streams, signature: Signature) -> float | None:
    """The gradients of pooling in two dimensions."""
    window, out = _window(signature), signature.outputs[0]
    if len(window) != 2:
        return None
    if "avg" in signature.name:
        return _took_us(streams, signature, elements(out), _AVERAGE_GRADIENT)
    strides = _numbers(argument(signature, "stride"), len(window)) or window
    windows = math.prod(math.ceil(k / s) for k, s in zip(window, strides, strict=True))
    return _took_us(streams, signature, elements(out), _MAX_GRADIENT + _MAX_GRADIENT_WINDOWS * windows)


def nearest_us(streams: Streams, signature: Signature) -> float | None:
    """`upsample_nearest2d` and its gradient."""
    given, out = signature.inputs[0], signature.outputs[0]
    if "backward" not in base_name(signature.name):
        return _took_us(streams, signature, elements(out), _NEAREST, lanes=1.0)
    copied = 0.0 if is_contiguous(given) else streams.copy_us(given, contiguous(given))
    return copied + _took_us(streams, signature, elements(out), _NEAREST_GRADIENT)


def bilinear_us(streams: Streams, signature: Signature) -> float | None:
    """`upsample_bilinear2d` and its gradient, which adds every element of the large tensor to four of the small one; None if
    both are as large, which is a copy.
    """
    if signature.inputs[0].shape == signature.outputs[0].shape:
        return None
    if "backward" in base_name(signature.name):
        return _took_us(streams, signature, elements(signature.inputs[0]), _BILINEAR_GRADIENT)
    return _took_us(streams, signature, elements(signature.outputs[0]), _BILINEAR)


def _took_us(streams: Streams, signature: Signature, count: int, cycles: float, *, lanes: float | None = None) -> float:
    """`lanes`: in place of the vendor's."""
    rate = streams.elements_per_us * (_LANES.get(streams.hardware.vendor, 1.0) if lanes is None else lanes)
    moved = moved_bytes(signature, "elementwise") / streams.bytes_per_us
    return streams.kernel_us + max(moved, count * cycles / rate)


def _window(signature: Signature) -> tuple[int, ...]:
    dimensions = 3 if "3d" in signature.name else 2
    return _numbers(argument(signature, "kernel_size"), dimensions)


def _numbers(value: object, count: int) -> tuple[int, ...]:
    """As many numbers as there are dimensions; one number stands for all."""
    given = (value,) if isinstance(value, int) else value
    numbers = tuple(n for n in given if isinstance(n, int)) if isinstance(given, tuple) else ()
    return numbers * count if len(numbers) == 1 else numbers if len(numbers) == count else ()

"""Convolutions: the layout conversions around a kernel, and the implicit matrix product inside it.

Tensor cores take channels last. A convolution of contiguous images is therefore surrounded by kernels that transpose its
operands, which a channels-last model is spared:

    t = sum over the parts wanted (forward; gradient of the input; gradient of the weight) of
            conversions of the part's operands + product
    conversion = max(kernel, 2 * positions * ceil32(channels) * item / bandwidth)        tiles of 32 x 32 are transposed
    product    = start + 2 * positions * K * C' * taps / (peak * efficiency)             C': channels of a group, in eights

    positions = images * height * width of the output, K = output channels, taps = elements of a filter

Kernels of fewer than eight channels (the first layer, patch embeddings) wait for their operands: they multiply a tenth of what
the peak allows (`_FEW_CHANNELS`).
On Hopper products in 16 bits are dealt in tiles of 128 positions and 128 channels, whole ones also where a layer has fewer,
and in whole waves of them; the gradient of the weight is split along positions. A bias is added by a kernel of its own, and
its gradient is a sum.

A depthwise convolution multiplies no matrices. cuDNN has kernels of its own for it in float16 and with channels last; float32
with channels last runs in the general grouped kernel, many times slower (`depthwise_float32`). All others run in PyTorch's own
kernels (DepthwiseConv2d.cu), a thread for each element:

    forward, input   elements * (taps + 11) / (8.6 a cycle * processors * clock); strided inputs' gradients 1.35 times as long
    weight           a block for each tap of each channel, which takes 8 images at once and 32 positions of each:
                     taps * channels / processors * images / 8 * (first + turn * positions / 32)

What each number is from stands beside it; `docs/causes.md` has the errors, fitted and held out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.kernels.sums import Grid, grid_us
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, argument, arithmetic, family, item_bytes
from autosac.trace import Signature, TensorMeta

# Share of the peak: "dense" (GeForce cards state their own), "float32" without tensor cores; of the float32 peak: "depthwise"
# in 16 bits, "depthwise_float32" with channels last (fitted to one step of ConvNeXt V2 on an H100), "depthwise_contiguous".
_NVIDIA = {
    "dense": 0.55,
    "float32": 0.70,
    "depthwise": 0.23,
    "depthwise_float32": 0.0127,
    "depthwise_contiguous": 0.06,
}
# MIOpen in TraceLens's MI300X traces of a ResNet-18 and of Stable Diffusion 3.5, bfloat16, 36 kinds of calls; held out: Flux,
# 12 kinds.
_AMD = _NVIDIA | {"dense": 0.24}
# What a position costs beside its filter's elements. Fitted, with "depthwise", to ConvNeXt V2 (7 x 7, H100) and MobileNetV2's
# steps (3 x 3, RTX 3090).
_DEPTHWISE_TAPS = 27
# Operations a cycle and processor: one patch embedding in TraceLens's H100 traces (16.7 GFLOP in 196 us); OWLv2's and a
# ResNet's first layer in its MI300X traces (held out: TimeSformer's, 45 -> 22 %).
_FEW_CHANNELS = {"NVIDIA": 360.0, "AMD": 480.0}
# PyTorch's own depthwise kernels: taps that a position costs beside its own; taps a cycle and processor; strided inputs; first
# step and turns of an image in microseconds, fewer with many taps, whose blocks share what they read. An EfficientNet in
# bfloat16 on an H100; held out: 36 single calls each way in `autosac calibrate`.
_OWN_TAPS, _OWN_RATE, _OWN_STRIDED = 11.25, 8.63, 1.35
_OWN_FIRST_US, _OWN_TURN_US, _OWN_TAP_US = 0.2, 0.04, 0.36
_WARP, _WARPS = 32, 8
# Hopper's tiles and their share of the peak: a 3D U-Net's and a U-Net's convolutions on an H100.
_TILE, _TILED = 128, {9: 0.60}
_BIAS_ELEMENTS = 1.5  # a cycle and processor, as for all operands that are broadcast
_START_US = {"NVIDIA": 3.0, "AMD": 13.0}
_CONVERSION_US = {"NVIDIA": 3.0, "AMD": 6.0}
# Kernels beside the product and the conversion of each operand: MIOpen clears and casts what it accumulates in float32.
_EXTRA_KERNELS = {"NVIDIA": 0, "AMD": 1}
_TILE_CHANNELS, _ALIGNED_CHANNELS = 32, 8
_REL_STD = 0.3


class _Shape(NamedTuple):
    """A convolution: `data` is what the filter slides over, `spread` the tensor of positions.

    `parts`: those of "forward", "input" and "weight" that are wanted; `strides`: their product.
    """

    data: TensorMeta
    weight: TensorMeta
    spread: TensorMeta
    groups: int
    parts: tuple[str, ...]
    transposed: bool
    strides: int
    bias: bool


def convolution_shape(signature: Signature) -> _Shape | None:
    """The convolution that an operator computes; None if its tensors do not look like one."""
    kind = family(signature.name)
    if kind not in ("convolution", "convolution_backward") or not signature.outputs:
        return None
    backward = kind == "convolution_backward"
    if len(signature.inputs) < (3 if backward else 2):
        return None
    data, weight = signature.inputs[1:3] if backward else signature.inputs[:2]
    other = signature.inputs[0] if backward else signature.outputs[0]
    if len(weight.shape) < 3 or len(data.shape) != len(weight.shape) or len(other.shape) != len(weight.shape):
        return None
    transposed = bool(argument(signature, "transposed", False)) or "transpose" in signature.name
    if transposed:
        data, other = other, data
    mask = argument(signature, "output_mask")
    wanted = mask if isinstance(mask, tuple) else (True, True)
    parts = tuple(p for p, w in zip(("input", "weight"), wanted, strict=False) if w) if backward else ("forward",)
    groups, stride = argument(signature, "groups", 1), argument(signature, "stride", 1)
    strides = math.prod(s for s in stride if isinstance(s, int)) if isinstance(stride, tuple) else 1
    bias = isinstance(mask, tuple) and bool(mask[-1]) if backward else len(signature.inputs) > 2
    return _Shape(data, weight, other, groups if isinstance(groups, int) else 1, parts, transposed, strides, bias)


def channels_last(meta: TensorMeta) -> bool:
    """Whether channels are the fastest dimension of [images, channels, ...]."""
    return meta.shape[1] == 1 or meta.stride[1] == 1


class Convolutions:
    """The model of one GPU. `tf32`: float32 convolutions may use tensor cores."""

    def __init__(self, streams: Streams, *, tf32: bool = True) -> None:
        """Model the GPU of `streams`; its profile's efficiencies of convolutions, where it has any, come first."""
        hardware = streams.hardware
        self._hardware = hardware
        self._tf32 = tf32
        self._streams = streams
        vendor = hardware.vendor if hardware.vendor in _START_US else "NVIDIA"
        self._start_ms = _START_US[vendor] * 1e-3
        self._conversion_ms = _CONVERSION_US[vendor] * 1e-3
        self._extra = _EXTRA_KERNELS[vendor]
        own = dict(hardware.efficiency)
        given = {"dense": own.get("convolution"), "depthwise": own.get("depthwise")}
        shares: Mapping[str, float] = _AMD if vendor == "AMD" else _NVIDIA
        self._few_channels = _FEW_CHANNELS[vendor]
        self._shares = {name: given.get(name) or share for name, share in shares.items()}

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the convolutions on the device; None for all other operators."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if self._hardware.device == "cpu" or not signature.inputs or signature.inputs[0].place != "device":
            return None
        shape = convolution_shape(signature)
        if shape is None:
            return None
        ms = sum(self._part(shape, part) for part in shape.parts) + self._bias(shape)
        return Estimate(max(ms, self._hardware.kernel_us * 1e-3), "convolution", _REL_STD)

    def _part(self, shape: _Shape, part: str) -> float:
        depthwise = shape.groups > 1 and shape.weight.shape[1] == 1
        unit = arithmetic(shape.data.dtype, tf32=self._tf32)
        if depthwise and self._runs_own_kernels(shape):
            return self._hardware.kernel_us * 1e-3 + self._own_depthwise(shape, part)
        tiled = None if depthwise else self._tiles(shape, part, unit)
        product = tiled or (self._depthwise(shape) if depthwise else self._product(shape, unit))
        moved = sum(map(_bytes, (shape.data, shape.spread))) / self._bytes_per_ms
        ms = self._start_ms + max(product, moved)
        if depthwise or unit == "float32" or channels_last(shape.data):
            return ms
        return ms + self._conversions(shape, part)

    @property
    def _bytes_per_ms(self) -> float:
        return self._hardware.mem_bandwidth_gbps * 1e6 * STREAMED

    def _product(self, shape: _Shape, unit: str) -> float:
        channels = shape.weight.shape[1]
        few = channels < _ALIGNED_CHANNELS and unit != "float32"
        padded = math.ceil(channels / _ALIGNED_CHANNELS) * _ALIGNED_CHANNELS if unit != "float32" else channels
        flops = 2.0 * math.prod(shape.spread.shape) * padded * math.prod(shape.weight.shape[2:])
        rate = self._hardware.peak_flops(unit) * self._shares["float32" if unit == "float32" else "dense"]
        if few:
            rate = min(rate, self._few_channels * self._hardware.sm_count * self._hardware.boost_mhz * 1e6)
        return flops / rate * 1e3

    def _tiles(self, shape: _Shape, part: str, unit: str) -> float | None:
        """The product in whole tiles; None where the rate of large products is all that is known."""
        share = _TILED.get(self._hardware.compute_capability[0]) if self._hardware.vendor == "NVIDIA" else None
        channels = shape.weight.shape[1]
        if share is None or unit not in ("float16", "bfloat16") or shape.groups > 1 or channels < _ALIGNED_CHANNELS:
            return None
        out, taps = shape.weight.shape[0], math.prod(shape.weight.shape[2:])
        rate = self._hardware.peak_flops(unit) * share / 1e3
        spread, data = (math.prod(m.shape) / m.shape[1] for m in (shape.spread, shape.data))
        if part == "weight":
            return 2.0 * spread * _whole(out) * _whole(channels * taps) / rate
        back = (part == "input") != shape.transposed
        positions, columns, depth = (
            (data, channels, out * taps / shape.strides) if back else (spread, out, channels * taps)
        )
        tiles = _whole(positions) * _whole(columns) / _TILE**2
        waves = math.ceil(tiles / self._hardware.sm_count)
        return waves * 2.0 * _TILE**2 * depth / (rate / self._hardware.sm_count)

    def _bias(self, shape: _Shape) -> float:
        """Adding it, or summing its gradient."""
        if not shape.bias or self._hardware.vendor != "NVIDIA":
            return 0.0
        out = shape.data if shape.transposed else shape.spread
        if "forward" not in shape.parts:
            grid = Grid.of(out, frozenset(range(len(out.shape))) - {1}, self._hardware.sm_count)
            return grid_us(self._streams, grid, _bytes(out)) * 1e-3
        if shape.groups > 1 and self._runs_own_kernels(shape):
            return 0.0
        if channels_last(shape.data):
            return 2 * _bytes(out) / self._bytes_per_ms
        issued = math.prod(out.shape) / (_BIAS_ELEMENTS * self._hardware.sm_count * self._hardware.boost_mhz * 1e3)
        return max(issued, 2 * _bytes(out) / self._bytes_per_ms)

    def _runs_own_kernels(self, shape: _Shape) -> bool:
        """Whether PyTorch takes its own depthwise kernels: contiguous images that are not in float16."""
        own = self._hardware.vendor == "NVIDIA" and not channels_last(shape.data) and not shape.transposed
        return own and shape.data.dtype != "float16" and len(shape.data.shape) <= 4

    def _own_depthwise(self, shape: _Shape, part: str) -> float:
        taps = math.prod(shape.weight.shape[2:])
        cycles_per_ms = self._hardware.sm_count * self._hardware.boost_mhz * 1e3
        if part != "weight":
            slower = _OWN_STRIDED if part == "input" and shape.strides > 1 else 1.0
            count = math.prod((shape.data if part == "input" else shape.spread).shape)
            return slower * count * (taps + _OWN_TAPS) / (_OWN_RATE * cycles_per_ms)
        blocks = max(1.0, shape.weight.shape[0] * taps / self._hardware.sm_count)
        turns = math.ceil(math.prod(shape.spread.shape[2:]) / _WARP)
        image = _OWN_FIRST_US + (_OWN_TURN_US + _OWN_TAP_US / taps) * turns
        return self._streams.slower * blocks * shape.spread.shape[0] / _WARPS * image * 1e-3

    def _depthwise(self, shape: _Shape) -> float:
        taps = math.prod(shape.weight.shape[2:])
        name, flops = "depthwise", 2.0 * math.prod(shape.spread.shape) * (taps + _DEPTHWISE_TAPS)
        if item_bytes(shape.data.dtype) > 2:
            flops = 2.0 * math.prod(shape.spread.shape) * taps
            name = "depthwise_float32" if channels_last(shape.data) else "depthwise_contiguous"
        return flops / (self._hardware.peak_flops("float32") * self._shares[name]) * 1e3

    def _conversions(self, shape: _Shape, part: str) -> float:
        """Operands to channels last and the result back; a 1 x 1 filter needs none."""
        pointwise = math.prod(shape.weight.shape[2:]) == 1
        operands = (shape.data, shape.spread) if pointwise else (shape.data, shape.spread, shape.weight)
        extra = 0 if pointwise and part == "forward" else self._extra
        return sum(self._conversion(meta) for meta in operands) + extra * self._conversion_ms

    def _conversion(self, meta: TensorMeta) -> float:
        channels = math.ceil(meta.shape[1] / _TILE_CHANNELS) * _TILE_CHANNELS
        moved = 2.0 * math.prod(meta.shape) / meta.shape[1] * channels * item_bytes(meta.dtype)
        return max(self._conversion_ms, moved / self._bytes_per_ms)


def _whole(count: float) -> float:
    return math.ceil(count / _TILE) * _TILE


def _bytes(meta: TensorMeta) -> float:
    return float(math.prod(meta.shape) * item_bytes(meta.dtype))

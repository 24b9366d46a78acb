"""The roofline: an operator takes as long as its arithmetic or its memory traffic, whichever is longer.

    t = kernels * kernel_us + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))

The efficiencies are what large operators of each family sustain on data-centre GPUs in PyTorch; a profile may
override them (its `[efficiency]` table). They are rough on purpose: this model knows every operator on every
GPU and is the last to be asked. Copies between host and device move at the PCIe rate. An operator that no
table knows is charged for its bytes under the source "bytes", so that reports can list it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import (
    STREAMED,
    Work,
    attention_shape,
    crosses_to_host,
    family,
    kernel_count,
    reduces_outer,
    tensor_bytes,
    work_of,
)
from autosac.trace import Signature

# Share of the peak rate (first group) or of the memory bandwidth (second) that large operators reach.
_EFFICIENCY = {
    "matmul": 0.72,
    "batched_matmul": 0.65,
    "convolution": 0.55,
    "depthwise": 0.10,
    "attention_forward": 0.60,
    "attention_backward": 0.45,
    "attention_math": 0.30,
    "memory": STREAMED,
    "reduction": 0.80,
    "outer_reduction": 0.42,
    "gather": 0.70,
    "scatter": 0.50,
    "link": 0.80,
}
_MEMORY_KEY = {
    "reduction": "reduction",
    "outer_reduction": "outer_reduction",
    "softmax": "reduction",
    "norm": "reduction",
    "norm_backward": "norm_backward",
    "sort": "reduction",
    "gather": "gather",
    "scatter": "scatter",
}
_ATTENTION_TILE = 64
_HEAD_SIZES = (32, 64, 96, 128, 192, 256)
_REL_STD = {"matmul": 0.15, "memory": 0.20, "unknown": 0.50}


class Roofline:
    """The roofline model of one GPU.

    `tf32`: float32 matrix products may use tensor cores (convolutions: `conv_tf32`).
    """

    def __init__(self, hardware: Hardware, *, tf32: bool = False, conv_tf32: bool = True) -> None:
        """Model `hardware`."""
        self._hardware = hardware
        self._tf32 = tf32
        self._conv_tf32 = conv_tf32
        efficiency = _EFFICIENCY | dict(hardware.efficiency)
        self._efficiency = {"norm_backward": efficiency["reduction"], **efficiency}

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate]:
        """Every operator's time; see the module's docstring."""
        return [self._estimate(signature) for signature in signatures]

    def milliseconds(self, work: Work, kernels: int = 1) -> float:
        """The roofline of this much work, in as many kernels."""
        hardware, efficiency = self._hardware, self._efficiency
        memory = efficiency[_MEMORY_KEY.get(work.family, "memory")]
        seconds = work.nbytes / (hardware.mem_bandwidth_gbps * 1e9 * memory)
        if work.flops:
            rate = hardware.peak_flops(work.arithmetic) * efficiency[work.family]
            seconds = max(seconds, work.flops / rate)
        return kernels * hardware.kernel_us * 1e-3 + seconds * 1e3

    def _estimate(self, signature: Signature) -> Estimate:
        metas = (*signature.inputs, *signature.outputs)
        if not any(meta.place == "device" for meta in metas) or family(signature.name) == "host":
            return Estimate(self._hardware.kernel_us * 1e-3 if signature.inputs else 0.0, "roofline", 0.5)
        if crosses_to_host(signature):
            moved = max(tensor_bytes(signature.inputs), tensor_bytes(signature.outputs))
            ms = moved / (self._hardware.pcie_gbps * 1e9 * self._efficiency["link"]) * 1e3
            return Estimate(max(self._hardware.kernel_us * 1e-3, ms), "roofline", _REL_STD["memory"])
        convolution = family(signature.name).startswith("convolution")
        work = work_of(signature, tf32=self._conv_tf32 if convolution else self._tf32)
        if not work.family:
            return Estimate(self.milliseconds(work), "bytes", _REL_STD["unknown"])
        if work.family == "attention_forward" or work.family == "attention_backward":
            work = work._replace(flops=work.flops * _padding(signature))
        if work.family == "reduction" and reduces_outer(signature):
            work = work._replace(family="outer_reduction")
        spread = _REL_STD["matmul" if work.flops else "memory"]
        return Estimate(self.milliseconds(work, kernel_count(signature)), "roofline", spread)


def _padding(signature: Signature) -> float:
    """What a fused kernel computes, in whole tiles, relative to what is asked of it."""
    shape = attention_shape(signature)
    if shape is None:
        return 1.0
    sizes = (shape.query_length, shape.key_length)
    padded = math.prod(math.ceil(size / _ATTENTION_TILE) * _ATTENTION_TILE for size in sizes) / math.prod(sizes)
    head = next((size for size in _HEAD_SIZES if size >= shape.head_size), shape.head_size)
    return padded * head / shape.head_size

"""Memory-bound kernels on AMD's GPUs: PyTorch's own, built for them, which issue more than they move.

contiguous   t = start + max(traffic, elements * cycles of the function)
walked       strided, broadcast or assembled operands: an address for every element.
                 t = late + max(traffic, elements * (first + more * (other operands of the result's size)))
             Where neighbours lie in different sectors of an input, every element costs `across` instead.
softmax      rows of up to 1,024 elements stay in registers and are bound by traffic; longer ones are read three times,
             element by element
layer norm   and RMS norm, the same kernels: 1.4 TB/s in 16 bits; one block walks a row
sums         t = start + traffic + what one block takes for a row
lookup       `embedding`: one block for each row

Cycles are of one compute unit.
"""

from __future__ import annotations

import math

from autosac.estimator.hardware import Hardware
from autosac.estimator.memory_bound import row_bytes
from autosac.estimator.rocm.rates import bytes_per_us
from autosac.estimator.walks import access, walked, walked_across
from autosac.estimator.work import base_name, family, item_bytes, kernel_count, moved_bytes, reduces_outer
from autosac.memory_sim.tensor_sizes import is_contiguous
from autosac.trace import Signature

_START_US, _CONVERTED_START_US, _LATE_US = 2.3, 3.8, 5.8
# Functions that take longer than their traffic, in 16 bits: sigmoid 0.81, silu 0.76 to 0.92, gelu 0.81; tanh 1.78.
_EXPONENTIAL_CYCLES, _TANGENT_CYCLES = 0.83, 1.78
_EXPONENTIALS = (
    "sigmoid",
    "silu",
    "gelu",
    "exp",
    "elu",
    "softplus",
    "mish",
    "log_sigmoid_forward",
    "sin",
    "cos",
    "log",
)
_FIRST, _MORE, _ACROSS, _ACROSS_PARTS = 0.68, 0.34, 4.9, 3.3
_PARTS = 1.5  # of a concatenation of strided tensors
_REGISTERS, _SOFTMAX_CYCLES, _SHORT_ROW_CYCLES = 1024, 2.1, 15.0
_SOFTMAX_SHARE = 0.83
_NORM_START_US, _NORM_SHARE = 5.0, 0.264
_OF_ROWS = ("native_layer_norm", "_fused_rms_norm")
# Each kernel in a trace of small norms; how often the gradient walks a row of 64 KiB in it.
_NORM_KERNEL_US, _GRADIENT_PASSES = 6.0, 3.0
_SUM_START_US = 5.5
# What one block reads: rows of 151,936 float32 (`argmax`), of 64 KiB (layer norm). Longer rows are shared by several.
_BLOCK_BYTES_PER_US, _SHARED_BYTES = 8_900.0, 2**20
_LOOKUP_START_US, _LOOKUP_ROW_CYCLES, _LOOKUP_CYCLES = 5.0, 250.0, 0.6


class RocmMemory:
    """The memory-bound kernels of one GPU. Times are in microseconds; None where a rule does not hold."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._peak_bytes_per_us = hardware.mem_bandwidth_gbps * 1e3
        self._bytes_per_us = bytes_per_us(hardware)
        self._cycles_per_us = hardware.sm_count * hardware.boost_mhz

    def _traffic_us(self, nbytes: float) -> float:
        return nbytes / self._bytes_per_us

    def elementwise_us(self, signature: Signature) -> float | None:
        """Pointwise functions, copies, fills and concatenations."""
        kind = access(signature)
        if signature.name.startswith("aten._foreach") or kernel_count(signature) > 1:
            return None
        elements = math.prod(signature.outputs[0].shape)
        traffic = self._traffic_us(moved_bytes(signature, family(signature.name)))
        if kind in ("elementwise", "converted"):
            start = _START_US if kind == "elementwise" else _CONVERTED_START_US
            return start + max(traffic, elements * _function_cycles(signature) / self._cycles_per_us)
        return _LATE_US + max(traffic, elements * _walk_cycles(signature) / self._cycles_per_us)

    def softmax_us(self, signature: Signature) -> float | None:
        """`_softmax` and `_log_softmax`; None for their gradients."""
        data = signature.inputs[0]
        if "_backward" in signature.name or not row_bytes(signature):
            return None
        elements = math.prod(data.shape)
        row = row_bytes(signature) / item_bytes(data.dtype)
        traffic = self._traffic_us(moved_bytes(signature, "softmax")) / _SOFTMAX_SHARE
        if row > _REGISTERS:
            return _LATE_US + max(traffic, elements * _SOFTMAX_CYCLES / self._cycles_per_us)
        return max(_START_US + traffic, _LATE_US + elements / row * _SHORT_ROW_CYCLES / self._cycles_per_us)

    def norm_us(self, signature: Signature) -> float | None:
        """Norms and their gradients; None for batch norms in bfloat16 (`latencies.py`)."""
        base, kind = base_name(signature.name), family(signature.name)
        moved = moved_bytes(signature, kind)
        if "batch_norm" in base and signature.inputs[0].dtype == "bfloat16":
            return None
        started = _NORM_START_US if base == "native_layer_norm" else _NORM_KERNEL_US * kernel_count(signature)
        if base.removesuffix("_backward") not in _OF_ROWS:
            return started + self._traffic_us(moved) / _SOFTMAX_SHARE
        passes = _GRADIENT_PASSES if base.endswith("_backward") else 1.0
        streamed = moved / (self._peak_bytes_per_us * _NORM_SHARE)
        return started + max(streamed, passes * _walked_us(row_bytes(signature)))

    def sum_us(self, signature: Signature) -> float | None:
        """Sums, means, norms and extrema of rows."""
        data = signature.inputs[0]
        results = math.prod(signature.outputs[0].shape)
        if reduces_outer(signature) or results >= math.prod(data.shape):
            return None
        row = math.prod(data.shape) / results * item_bytes(data.dtype) if results > 1 else 0.0
        return _SUM_START_US + self._traffic_us(moved_bytes(signature, "reduction")) + _walked_us(row)

    def lookup_us(self, signature: Signature) -> float | None:
        """`embedding`: one block of threads for each row."""
        if base_name(signature.name) != "embedding" or len(signature.inputs) < 2:
            return None
        rows, row = math.prod(signature.inputs[1].shape), signature.inputs[0].shape[-1]
        return _LOOKUP_START_US + rows * (_LOOKUP_ROW_CYCLES + _LOOKUP_CYCLES * row) / self._cycles_per_us


def _walked_us(row: float) -> float:
    """What one block takes for a row of so many bytes."""
    return min(row, _SHARED_BYTES) / _BLOCK_BYTES_PER_US


def _function_cycles(signature: Signature) -> float:
    base = base_name(signature.name).rstrip("_")
    if base == "tanh":
        return _TANGENT_CYCLES
    return _EXPONENTIAL_CYCLES if base in _EXPONENTIALS else 0.0


def _walk_cycles(signature: Signature) -> float:
    if base_name(signature.name) in ("cat", "stack"):
        largest = max(signature.inputs, key=lambda meta: math.prod(meta.shape))
        if largest.stride[-1:] not in ((), (1,)):
            return _ACROSS_PARTS
        return _FIRST if all(is_contiguous(meta) for meta in signature.inputs) else _PARTS
    size = math.prod(signature.outputs[0].shape)
    full = sum(math.prod(meta.shape) == size for meta in walked(signature))
    return max(_FIRST + _MORE * max(0, full - 1), walked_across(signature) * _ACROSS)

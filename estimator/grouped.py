"""Grouped matrix products since Hopper: the products of a mixture's experts, in one kernel.

PyTorch's kernel (CUTLASS) walks tiles of the result of 128 rows; a group's last tile is as slow as a full one. It reads the
weights of every group while it multiplies, and both cost:

    forward (groups of rows)             time = sqrt((LOOP * product)^2 + (bytes / (READ * bandwidth))^2)
    weights' gradient (groups along k)   time = (product^p + (bytes of the result / WRITE)^p)^(1/p),   p = 1.3

with the price of one product of as many rows, rounded up to tiles, or of as many sums. A gradient's result is written once a
tile is done, after its loop, which is short where a group has few rows; WRITE is what the processors write like this, not the
memory.

Hopper's figures were fitted to 72 of 144 products that `benchmarks/gpu/products.py` measured on an H200 (every second one;
torch 2.11), and judged on the others (`docs/causes.md`).

On Blackwell the loop takes 1.19 times the product, and a gradient 1.9 times. These were fitted to torchao's tables of
`torch._grouped_mm` in bfloat16 on a B200, forward and backward, with one and four groups; those with two and eight are held
out (`python -m benchmarks.pull_requests`).
"""

from __future__ import annotations

import math
from typing import Final

from autosac.estimator.hardware import Hardware
from autosac.estimator.work import Matmul, base_name, tensor_bytes
from autosac.trace import Signature

_TILE: Final = 128
_LOOP: Final = 1.05
_READ: Final = 0.85
_WRITE: Final = 16.7e3  # bytes per processor and microsecond
_OVERLAP: Final = 1.3
_BLACKWELL: Final = 10  # compute capability
_BLACKWELL_LOOP: Final = 1.19
_BLACKWELL_GRADIENT: Final = 1.9


def is_grouped(signature: Signature) -> bool:
    """Whether it multiplies groups."""
    return "grouped_mm" in base_name(signature.name)


def as_one(signature: Signature, shape: Matmul) -> Matmul:
    """The one product that does the same work: all groups' rows, in whole tiles, or the whole length of the sums."""
    if _is_gradient(signature):
        return shape._replace(batch=1, k=shape.batch * shape.k)
    return shape._replace(m=math.ceil(shape.m / _TILE) * _TILE)


def grouped_ms(signature: Signature, product_ms: float, hardware: Hardware) -> float:
    """Milliseconds of the kernel, if the product `as_one` takes `product_ms`."""
    blackwell = hardware.compute_capability[0] >= _BLACKWELL
    if _is_gradient(signature):
        if blackwell:
            return _BLACKWELL_GRADIENT * product_ms
        written_ms = tensor_bytes(signature.outputs) / (_WRITE * hardware.sm_count) / 1e3
        return float((product_ms**_OVERLAP + written_ms**_OVERLAP) ** (1 / _OVERLAP))
    moved = tensor_bytes(signature.inputs) + tensor_bytes(signature.outputs)
    loop_ms = (_BLACKWELL_LOOP if blackwell else _LOOP) * product_ms
    return math.hypot(loop_ms, moved / (_READ * hardware.mem_bandwidth_gbps * 1e9) * 1e3)


def _is_gradient(signature: Signature) -> bool:
    """Whether it sums over the groups' rows, as the gradient of weights does."""
    return len(signature.outputs[0].shape) == 3

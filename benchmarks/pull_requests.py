"""Kernels whose times are in descriptions of PyTorch's pull requests, beside their prices. No rule has seen them.

    python -m benchmarks.pull_requests

- 145746 (January 2025), `relu` on an H100 after the change that loads 16 bytes at once, as PyTorch does since 2.7;
- 195542 (September 2026), conversions from bfloat16 to float32 on an A100, before the change. Each call is waited for;
- 87445 (October 2022), layer norm, forward and backward in one, on an A100. Sizes whose times grow with them: shorter ones are
  host time. The memory of both A100s is not said: both parts are shown.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from autosac.estimator import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.trace import Signature, TensorMeta

H100, A100S = "h100-sxm-80gb", ("a100-sxm-80gb", "a100-sxm-40gb")
RELU = {2**25: 48.9, 2**26: 93.2, 2**27: 180.8, 2**28: 356.2, 2**29: 708.1}  # elements, us
CONVERTED = {512: 8.63, 2**17: 9.98, 2**19: 11.01, 2**20: 15.12, 2**21: 20.30, 2**23: 53.87, 2**26: 362.46}
NORMS = {  # rows, columns: us in float32 and in float16
    (6144, 1024): (165.3, 112.2),
    (8192, 1024): (211.9, 144.8),
    (6144, 1536): (236.6, 145.7),
    (8192, 1536): (307.8, 186.1),
}


class Timed(NamedTuple):
    """Something that was timed: its name, the kernels that it runs, and what was published."""

    name: str
    signatures: tuple[Signature, ...]
    published_us: float


def contiguous(dtype: str, *shape: int) -> TensorMeta:
    """A contiguous tensor."""
    strides, pitch = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim], pitch = pitch, pitch * shape[dim]
    return TensorMeta(shape, tuple(strides), dtype)


def relu(elements: int) -> tuple[Signature, ...]:
    """One `relu` in bfloat16."""
    data = contiguous("bfloat16", elements)
    return (Signature("aten.relu.default", (data,), (data,)),)


def converted(elements: int) -> tuple[Signature, ...]:
    """One conversion to float32."""
    return (
        Signature("aten._to_copy.default", (contiguous("bfloat16", elements),), (contiguous("float32", elements),)),
    )


def norm(dtype: str, rows: int, columns: int) -> tuple[Signature, ...]:
    """A layer norm with weight and bias, and its gradients."""
    data, weight, row = contiguous(dtype, rows, columns), contiguous(dtype, columns), contiguous("float32", rows, 1)
    arguments = (("normalized_shape", (columns,)),)
    forward = Signature("aten.native_layer_norm.default", (data, weight, weight), (data, row, row), arguments)
    inputs = (data, data, row, row, weight, weight)
    return forward, Signature("aten.native_layer_norm_backward.default", inputs, (data, weight, weight), arguments)


def price_us(gpu: str, signatures: tuple[Signature, ...]) -> float:
    """What the shipped models say of these kernels, one after the other."""
    answers = first_estimates(default_models(load_hardware(gpu)).operators, list(signatures))
    return sum(1e3 * answer.ms for answer in answers if answer is not None)


def show(title: str, gpu: str, timed: list[Timed]) -> None:
    """Print a table, and its median error."""
    print(f"\n{title}, {gpu}\n{'':28}  published us  priced us   error")
    errors = []
    for row in timed:
        us = price_us(gpu, row.signatures)
        errors.append(100 * (us / row.published_us - 1))
        print(f"{row.name:28}  {row.published_us:12.1f}  {us:9.1f}  {errors[-1]:+5.1f}%")
    print(f"median error {statistics.median(map(abs, errors)):.1f}%")


def main() -> None:
    """Print all tables."""
    show("relu, bfloat16", H100, [Timed(f"{n:,}", relu(n), us) for n, us in RELU.items()])
    for gpu in A100S:
        show("bfloat16 to float32", gpu, [Timed(f"{n:,}", converted(n), us) for n, us in CONVERTED.items()])
    for gpu in A100S:
        norms = [
            Timed(f"{rows:,} x {columns:,}, {dtype}", norm(dtype, rows, columns), us)
            for (rows, columns), both in NORMS.items()
            for dtype, us in zip(("float32", "float16"), both, strict=True)
        ]
        show("layer norm, forward and backward", gpu, norms)


if __name__ == "__main__":
    main()

"""Kernels whose times are in descriptions of PyTorch's and torchao's pull requests, beside their prices. No rule has seen the
first three.

    python -m benchmarks.pull_requests

- 145746 (January 2025), `relu` on an H100 after the change that loads 16 bytes at once, as PyTorch does since 2.7;
- 195542 (September 2026), conversions from bfloat16 to float32 on an A100, before the change. Each call is waited for;
- 87445 (October 2022), layer norm, forward and backward in one, on an A100. Sizes whose times grow with them: shorter ones are
  host time. The memory of both A100s is not said: both parts are shown;
- 175760 (February 2026), `index_add` of rows on an H100, as since March 2026; 183950 (May 2026), the same on a B200 with half
  of the rows for one place. The first, and the two widest on the B200, set what additions take (`kernels/rows.py`);
- torchao's 2999 (September 2025) and README of mixtures (torch 2.10), grouped products on a B200, forward and backward of a
  mean square. Those with one and four groups set what Blackwell's take (`grouped.py`).
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
SUMMED = {  # GPU, rows added, places, width, dtype: us
    (H100, 2**22, 2**22, 128, "bfloat16"): 2230.0,
    ("b200-sxm-180gb", 7_770_000, 1_720_000, 128, "float32"): 19_830.0,
    ("b200-sxm-180gb", 7_770_000, 1_720_000, 256, "float32"): 36_830.0,
    ("b200-sxm-180gb", 7_770_000, 1_720_000, 512, "float32"): 46_010.0,
    ("b200-sxm-180gb", 7_770_000, 1_720_000, 1024, "float32"): 98_870.0,
}
GROUPED = {  # rows, columns, sums: us by groups
    (16_384, 8192, 5120): {1: 4403.5, 2: 4225.0, 4: 4100.1, 8: 4246.4},
    (128_000, 8192, 5120): {1: 43140.2, 2: 39487.6, 4: 39189.2, 8: 37700.7},
    (128_000, 2048, 7168): {1: 13064.8, 2: 14900.2, 4: 15823.6, 8: 14966.8},
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


def summed(rows: int, places: int, width: int, dtype: str) -> tuple[Signature, ...]:
    """Rows that are added to others by index: half to any, half to one, on the B200."""
    table = contiguous(dtype, places, width)

    def adding(many: int, to: TensorMeta) -> Signature:
        inputs = (to, contiguous("int64", many), contiguous(dtype, many, width))
        return Signature("aten.index_add_.default", inputs, (to,), (("dim", 0),), mutates=(0,))

    if rows == places:
        return (adding(rows, table),)
    return adding(rows // 2, table), adding(rows // 2, contiguous(dtype, 1, width))


def grouped(rows: int, columns: int, sums: int, groups: int) -> tuple[Signature, ...]:
    """A grouped product, its two gradients, and a mean square with its gradient in one generated kernel each."""
    bf16, ends = "bfloat16", contiguous("int32", groups)
    data, out = contiguous(bf16, rows, sums), contiguous(bf16, rows, columns)
    weights = TensorMeta((groups, sums, columns), (sums * columns, 1, sums), bf16)
    turned = TensorMeta((columns, rows), (1, columns), bf16)
    back = contiguous(bf16, groups, columns, sums)
    return (
        Signature("aten._grouped_mm.default", (data, weights, ends), (out,)),
        Signature("triton.triton_red_fused_0", (out,), (), (("nbytes", 2 * rows * columns),)),
        Signature("triton.triton_poi_fused_0", (out,), (out,), (("nbytes", 4 * rows * columns),)),
        Signature("aten._grouped_mm.default", (out, back, ends), (data,)),
        Signature("aten._grouped_mm.default", (turned, data, ends), (back,)),
    )


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
    for gpu in dict.fromkeys(gpu for gpu, *_ in SUMMED):
        show(
            "index_add of rows",
            gpu,
            [Timed(f"{n:,} x {w}, {d}", summed(n, p, w, d), us) for (g, n, p, w, d), us in SUMMED.items() if g == gpu],
        )
    for fitted, counts in (("fitted", (1, 4)), ("held out", (2, 8))):
        products = [
            Timed(f"{m:,} x {n} x {k}, {groups}", grouped(m, n, k, groups), by[groups])
            for (m, n, k), by in GROUPED.items()
            for groups in counts
        ]
        show(f"grouped products, forward and backward, {fitted}", "b200-sxm-180gb", products)


if __name__ == "__main__":
    main()

"""Takes out of measured fp8 products what their measurement held besides: the quantisation of x.

The frameworks timed a whole layer, y = quantised(x) W^T, of an x in 16 bits. A training job quantises by itself, once for two
products or in a fused kernel, and `_scaled_mm` is the product alone. The share is seen in narrow products: with n columns,

    t(n) = start + c m k  +  read m k bytes  +  2 m n k / rate

where the first two are the quantisation. Of 32,768 x 4,096 and n = 128 to 4,096 TensorRT-LLM's times on an H100 lie on a line
that begins at 0.36 ms, the product with the roles of m and n exchanged takes a quarter of the time, and c is the same for all
m and k. `start` and c are one pair for each GPU and framework; only shapes that no test holds out are used.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from autosac.estimator import load_hardware
from autosac.estimator.features import Rates, gemm_baseline_ms
from autosac.estimator.hardware import Hardware
from benchmarks.measurements import Array, Measured, gemm

_NARROW = 1024  # columns; beyond, kernels change with n
_LARGE = 2**21  # elements of x; of smaller ones the starts are most of the time
_KERNEL_MS = 0.003  # of the start that stays: the product's own
_BEST_SHARE = 0.85  # of the roofline that a product may reach: what goes beyond it has lost too much


def products(data: Path, gpu: str, dtype: str) -> tuple[Measured, Array]:
    """Measured products alone, as `gemm` has them, and for each shape the least share of the measured time that they are."""
    whole = gemm(data, gpu, dtype)
    if dtype != "fp8":
        return whole, np.ones(len(whole.shapes))
    alone = without_quantization(whole, load_hardware(gpu))
    return alone, np.nanmin(alone.ms / whole.ms, axis=1)


def without_quantization(measured: Measured, hardware: Hardware) -> Measured:
    """The times of the products alone, [shapes, frameworks] in ms."""
    ms = measured.ms.copy()
    rates = Rates.of(hardware, "float8")
    m, n, k = measured.shapes.T
    least_ms = gemm_baseline_ms(m, n, k, 1.0, rates) / _BEST_SHARE
    elements = m * k
    for column in range(ms.shape[1]):
        start_ms, element_ms = quantization(measured, column, hardware)
        alone = ms[:, column] - max(0.0, start_ms - _KERNEL_MS) - element_ms * elements
        ms[:, column] = np.minimum(np.maximum(alone, least_ms), ms[:, column])
    return replace(measured, ms=ms)


def quantization(measured: Measured, column: int, hardware: Hardware) -> tuple[float, float]:
    """What one framework's quantisation takes: a start, and a time for an element of x; ms."""
    narrow = (measured.shapes[:, 1] <= _NARROW) & np.isfinite(measured.ms[:, column]) & ~measured.held_out
    groups: dict[tuple[float, float], list[tuple[float, float]]] = defaultdict(list)
    for (m, n, k), ms in zip(measured.shapes[narrow], measured.ms[narrow, column], strict=True):
        if m * k >= _LARGE:
            groups[m, k].append((n, ms))
    elements, beginnings = [], []
    for (m, k), rows in groups.items():
        if len(rows) >= 4:
            n, ms = np.array(rows).T
            beginnings.append(_line(n, ms)[0] - m * k / (hardware.mem_bandwidth_gbps * 1e6))
            elements.append(m * k)
    start, slope = _line(np.array(elements), np.array(beginnings))
    return max(0.0, start), slope


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Beginning and slope of the line with the least relative squares."""
    columns = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    beginning, slope = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    return float(beginning), float(slope)

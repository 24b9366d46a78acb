"""Matrix products in 16 and 8 bits on AMD's matrix cores: tiles of the result, dealt to the compute units in waves.

    t = start + max(min over tile shapes and splits s of k: W(T s / P) + reduction, traffic) + 0.79 * result / bandwidth
    W(w) = prologue + (ceil(w) - 1) next + ceil(w) 2 a b k / s / (r e_ab)
    e_ab = 0.614 a b / (a b + 40 (a + b))

T tiles of a x b elements, P compute units, each of the rate r: what a tile computes for each element that it loads grows
with its sides. A split adds the parts in another kernel. Operands whose rows do not begin at multiples of 16 bytes are
loaded element by element.
"""

from __future__ import annotations

import itertools
import math

from autosac.estimator import grouped
from autosac.estimator.hardware import Hardware
from autosac.estimator.learned import row_alignment
from autosac.estimator.rocm.rates import bytes_per_us
from autosac.estimator.work import Matmul, arithmetic, item_bytes, matmul_shape
from autosac.trace import Signature

_SIDES = (32, 64, 96, 128, 160, 192, 224, 256)
_TILES = ((16, 16), (16, 32), (32, 16), *itertools.product(_SIDES, _SIDES))
_SPLITS = (1, 2, 3, 4, 8, 16)
_LEAST_K, _REDUCTION_US = 256, 2.0  # of one part, and what another kernel takes to begin
# The largest tiles reach 0.468 of the peak, as products of 15,360 rows and more do. The others were fitted together to 57
# kinds of products (median error 9 %); held out: 29 others (13 %), and 36 of HunyuanVideo (9 %).
_PEAK_SHARE, _LOADED, _START_US, _WRITTEN = 0.614, 40.0, 4.7, 0.79
_PROLOGUE_US, _NEXT_US = 2.0, 0.45  # of the first wave, and of each further one, which begins beside the one before
_FITTED_MHZ = 2100.0
# Rows of 5,185 and 3,137 elements: 1.5 to 2.5 times as long where an operand has them.
_UNALIGNED, _ALIGNED_BYTES = 2.0, 16
# A few rows cannot keep enough loads under way: 2.6 to 2.9 TB/s for 2 and 15 rows.
_FEW_ROWS, _FEW_SHARE = 64, 0.6


def product_us(hardware: Hardware, signature: Signature) -> float | None:
    """A matrix product, or a batch of them; None in wider types and for groups of different sizes."""
    product = matmul_shape(signature)
    if product is None or grouped.is_grouped(signature):
        return None
    unit = arithmetic(product.dtype, tf32=False)
    if unit not in ("bfloat16", "float16", "float8") or min(product.batch, product.m, product.n, product.k) < 1:
        return None
    bandwidth = bytes_per_us(hardware)
    item, result = item_bytes(product.dtype), item_bytes(signature.outputs[0].dtype)
    factors = product.batch * product.k * (product.m + product.n) * item
    written = product.batch * product.m * product.n * result / bandwidth
    traffic = factors / bandwidth / (_FEW_SHARE if min(product.m, product.n) < _FEW_ROWS else 1.0) + written
    busy = max(_tiles_us(hardware, product, unit, bandwidth), traffic)
    if row_alignment(signature._replace(outputs=())) < _ALIGNED_BYTES and product.k > 1:
        busy *= _UNALIGNED
    return _START_US + busy + _WRITTEN * written


def _tiles_us(hardware: Hardware, p: Matmul, unit: str, bandwidth: float) -> float:
    """What the arithmetic takes in the best tile shape and split."""
    rate = hardware.peak_flops(unit) / hardware.sm_count * 1e-6 * _PEAK_SHARE  # FLOP a microsecond and compute unit
    slower = _FITTED_MHZ / hardware.boost_mhz
    best = math.inf
    for rows, columns in _TILES:
        tiles = p.batch * math.ceil(p.m / rows) * math.ceil(p.n / columns)
        area = rows * columns
        flops_us = 2 * area * p.k / (rate * area / (area + _LOADED * (rows + columns)))
        for split in _SPLITS:
            if split > 1 and (p.k / split < _LEAST_K or tiles * split / 2 > hardware.sm_count):
                break
            waves = math.ceil(tiles * split / hardware.sm_count)
            parts = _REDUCTION_US + (split + 1) * p.batch * p.m * p.n * 4 / bandwidth if split > 1 else 0.0
            best = min(best, slower * (_PROLOGUE_US + (waves - 1) * _NEXT_US) + waves * flops_us / split + parts)
    return best

"""Products that no matrix unit computes, in plain float32 or float64: tiles of the result, dealt to the processors in waves.

There are no tensor cores to feed, so a kernel's rate inside a tile is nearly constant and what varies is how many
processors have a tile to work on. With T tiles of a x b elements on P processors and a rate r of one processor,

    t = min over tile shapes and splits s of k:   W(T s / P) * (2 a b k / s) / (r e_ab)  +  reduction of the s parts
        + 0.75 * result / bandwidth
    W(w) = w + idle * (ceil(w) - w)

e_ab is a tile shape's rate relative to the largest; `idle` is below one because two tiles share a processor, so that
the last ones run faster when they are alone. Three quarters of the time that the result takes to be written lie beside no
arithmetic: what a score matrix of a shallow product costs (fitted to [2048, 64] x [64, 2048] in NeuSight's tables, H100 and
A100). Processors with 64 float32 lanes (compute capability 7 and 8.0) feed nearly all of them, those with 128 do not; least
where half of these compute in integers, too (8.6, 8.9 and 12). Before compute capability 8.0 nothing multiplies bfloat16, and
such products convert on the way to float32 (`_CONVERTED`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import STREAMED, Matmul, arithmetic, family, matmul_shape
from autosac.trace import Signature

_TILES = (
    ((128, 128), 1.0),
    ((256, 128), 1.0),
    ((128, 256), 1.0),
    ((128, 64), 0.94),
    ((64, 128), 0.94),
    ((64, 64), 0.85),
)
_SPLITS = (1, 2, 3, 4, 8, 16)
_EFFICIENCY = (
    0.785  # of the peak inside a tile; chosen so that three float32 Llama steps measured on an H100 come out right
)
_EFFICIENCY_64_LANES = 0.95  # NeuSight's tables, A100: 16 kinds of products
# Square products of ten GPUs (`benchmarks/square_products.py`): 0.62 to 0.69 of the data sheet's peak on RTX 3090, 4090, 5090,
# A6000 and PRO 6000; held out: 3080, 3070, 4070 SUPER, 4070 Ti SUPER, A4000 (0.71, 0.67, 0.70, 0.69, 0.62).
_EFFICIENCY_SHARED_LANES = 0.68
# Rate of products in bfloat16 relative to float32, from the same table: a V100 and an RTX 2080 Ti; held out: a V100S (0.73),
# an RTX 2080 and a T10 (0.56, 0.56). Three T4s, which reach their power, have 0.46 to 0.59.
_CONVERTED = {(7, 5): 0.56, (7, 0): 0.73}
_WRITTEN_ALONE = 0.75
_REL_STD = 0.08


class TiledMatmul:
    """The tile model of products that no tensor core computes. `tf32`: float32 is not one of them."""

    def __init__(self, hardware: Hardware, *, tf32: bool = False) -> None:
        """Model `hardware`. Its profile's `matmul_float32` is the share of the peak inside a tile; without it, its `matmul`
        efficiency, if it has one, scales the rate.
        """
        self._hardware = hardware
        self._tf32 = tf32
        fed = _fed(hardware.compute_capability)
        own = dict(hardware.efficiency)
        self._efficiency = own.get("matmul_float32", fed * min(1.0, own.get("matmul", 1.0) / 0.72))

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the products in plain float32 and float64; None for all others."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if family(signature.name) not in ("matmul", "batched_matmul"):
            return None
        product = matmul_shape(signature)
        if product is None:
            return None
        unit = arithmetic(product.dtype, tf32=self._tf32)
        if unit == "bfloat16" and self._hardware.half != unit:
            return Estimate(self.milliseconds(product, "float32") / self._converted(), "tiles", _REL_STD)
        if unit not in ("float32", "float64"):
            return None
        return Estimate(self.milliseconds(product, unit), "tiles", _REL_STD)

    def _converted(self) -> float:
        capability = self._hardware.compute_capability
        return next((rate for since, rate in _CONVERTED.items() if capability >= since), 1.0)

    def milliseconds(self, p: Matmul, unit: str) -> float:
        """The formula of the module's docstring, and never less than reading and writing takes."""
        hardware = self._hardware
        item = 8 if unit == "float64" else 4
        rate = hardware.peak_flops(unit) * self._efficiency / hardware.sm_count
        bandwidth = hardware.mem_bandwidth_gbps * 1e9 * STREAMED
        best = math.inf
        for (rows, columns), share in _TILES:
            tiles = p.batch * math.ceil(p.m / rows) * math.ceil(p.n / columns)
            for split in _SPLITS:
                if split > 1 and (p.k / split < 256 or 2 * tiles >= hardware.sm_count):
                    break
                waves = math.ceil(tiles * split / hardware.sm_count)
                compute = waves * 2 * rows * columns * p.k / split / (rate * share)
                partial = (split + 1) * p.batch * p.m * p.n * item / bandwidth if split > 1 else 0.0
                best = min(best, compute + partial)
        moved = p.batch * (p.m * p.k + p.k * p.n + p.m * p.n) * item / bandwidth
        written = p.batch * p.m * p.n * item / bandwidth
        return max(best + _WRITTEN_ALONE * written, moved, hardware.kernel_us * 1e-6) * 1e3


def _fed(capability: tuple[int, int]) -> float:
    """The share of the float32 peak that kernels reach inside a tile."""
    if capability <= (8, 0):
        return _EFFICIENCY_64_LANES
    return _EFFICIENCY_SHARED_LANES if capability[0] in (8, 12) else _EFFICIENCY

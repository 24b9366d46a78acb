"""Products in plain float32 or float64: tiles of the result, dealt to the processors in waves.

There are no tensor cores to feed, so a kernel's rate inside a tile is nearly constant and what varies is how many
processors have a tile to work on. With T tiles of a x b elements on P processors and a rate r of one processor,

    t = min over tile shapes and splits s of k:   W(T s / P) * (2 a b k / s) / (r e_ab)  +  reduction of the s parts
        + 0.75 * result / bandwidth
    W(w) = w + idle * (ceil(w) - w)

e_ab is a tile shape's rate relative to the largest; `idle` is below one because two tiles share a processor, so that
the last ones run faster when they are alone. Three quarters of the time that the result takes to be written lie beside no
arithmetic: what a score matrix of a shallow product costs (fitted to [2048, 64] x [64, 2048] in NeuSight's tables, H100 and
A100). Processors with 64 float32 lanes (compute capability 7.0 and 8.0) feed nearly all of them, those with 128 do not.
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
        fed = _EFFICIENCY_64_LANES if hardware.compute_capability in ((7, 0), (8, 0)) else _EFFICIENCY
        own = dict(hardware.efficiency)
        self._efficiency = own.get("matmul_float32", fed * min(1.0, own.get("matmul", 1.0) / 0.72))

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the products in plain float32 and float64; None for all others."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if family(signature.name) not in ("matmul", "batched_matmul"):
            return None
        product = matmul_shape(signature)
        if product is None or product.dtype not in ("float32", "float64"):
            return None
        unit = arithmetic(product.dtype, tf32=self._tf32)
        if unit == "tf32":
            return None
        return Estimate(self.milliseconds(product, unit), "tiles", _REL_STD)

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

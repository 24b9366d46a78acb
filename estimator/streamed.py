"""What it takes to read and write so many bytes: contiguous elementwise kernels on GPUs of NVIDIA.

    t = start + x * (h / fast + (1 - h) / slow)

`h` is the share of the traffic that the L2 serves. In a step a kernel's operands were often written just before, so that
small ones are still there: all of them up to 0.68 of the L2, none beyond 1.66 times, on a line over the logarithm between.
The L2 gives each processor 18 bytes a cycle. Of the memory's peak 91 % were reached on the H100 of those steps; by the steps
of a published study another reached less, and 89.5 % lies between. Benchmarks that clear the L2 before each call see h = 0.

Fitted to the even ones of 20 training steps on an H100, and judged on the odd ones, on single calls and on traces of other
GPUs (`benchmarks/fit_elementwise.py`, `docs/causes.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware

SHARE = 0.895
"""Of the peak bandwidth."""

CYCLE_BYTES = 18.0
"""From the L2, for each processor."""

CACHED = (0.68, 1.66)
"""Of the L2: up to so much traffic all of it hits, and from so much on none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The traffic of one GPU. `warm`: operands may still be in the L2, as in a step."""

    hardware: Hardware
    warm: bool = True

    def cached(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of so much traffic that the L2 serves."""
        if not self.warm:
            return np.zeros_like(nbytes)
        full, none = CACHED
        left = np.log(none * self.hardware.l2_bytes) - np.log(np.maximum(nbytes, 1.0))
        return np.asarray(np.clip(left / math.log(none / full), 0.0, 1.0))

    def relative(self, hit: float) -> float:
        """What a byte takes of which the L2 serves this share, relative to one from memory."""
        fast, slow = self._rates()
        return hit * slow / fast + 1 - hit

    def _rates(self) -> tuple[float, float]:
        """Bytes a millisecond from the L2, and from memory."""
        hardware = self.hardware
        slow = SHARE * hardware.mem_bandwidth_gbps * 1e6
        return max(CYCLE_BYTES * hardware.sm_count * hardware.boost_mhz * 1e3, slow), slow

    def traffic_ms(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the bytes take, without a start."""
        fast, slow = self._rates()
        hit = self.cached(nbytes)
        return np.asarray(nbytes * (hit / fast + (1 - hit) / slow))

    def milliseconds(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """A contiguous elementwise kernel."""
        return self.hardware.kernel_us * 1e-3 + self.traffic_ms(nbytes)

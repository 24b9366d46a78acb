"""Triton kernels that torch.compile's Inductor generates: pointwise, persistent reductions, looped reductions.

A generated kernel streams: each of its buffers is read or written once, whatever is fused into it. It takes

    t = launch(kind) + (nbytes + again) / (share * memory bandwidth)

with the bytes that Inductor counts for it (slices and gathered rows, not whole tables). A looped reduction walks its row once
for each of its loops. `again` is what it reads anew: from memory where the rows that are under way together are larger than
the L2, and from the L2, at twice the memory's rate, where they are not.

Fitted to hand-written Triton kernels of the same kinds on an H100 with a cold L2 (`benchmarks/fit_generated.py`, which also
prints how far kernels that the fit has not seen are off). A launch is scaled with the GPU's shortest kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import argument, generated_kind, item_bytes, tensor_bytes
from autosac.trace import Signature

SHARE = 0.915
"""Of the peak memory bandwidth."""

LAUNCH_US = {"pointwise": 6.1, "persistent": 6.8, "looped": 11.4}
"""On the GPU of the fit, with what a benchmark's events add."""

_BLOCKS_PER_PROCESSOR = 4
_FROM_CACHE = 0.5
_REL_STD = 0.05


class GeneratedKernels:
    """Prices of generated kernels on one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._hardware = hardware

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """The formula of the module's docstring; None for what Inductor has not generated."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        kind = generated_kind(signature.name)
        if kind not in LAUNCH_US:
            return None
        given = argument(signature, "nbytes")
        nbytes = float(given) if isinstance(given, int | float) else float(tensor_bytes(signature.inputs))
        hardware = self._hardware
        launch_us = max(hardware.kernel_us, LAUNCH_US[kind] - LAUNCH_US["pointwise"] + hardware.kernel_us)
        rate = hardware.mem_bandwidth_gbps * 1e9 * SHARE
        seconds = (nbytes + self._again(signature)) / rate
        return Estimate(launch_us * 1e-3 + seconds * 1e3, f"generated:{kind}", _REL_STD)

    def _again(self, signature: Signature) -> float:
        loops, reduced, rows = (_count(signature, name) for name in ("loops", "reduced", "rows"))
        if loops < 2:
            return 0.0
        row = max((item_bytes(m.dtype) for m in signature.inputs if math.prod(m.shape) >= rows * reduced), default=0)
        together = min(rows, self._hardware.sm_count * _BLOCKS_PER_PROCESSOR) * reduced * row
        share = 1.0 if together > self._hardware.l2_bytes else _FROM_CACHE
        return share * (loops - 1) * rows * reduced * row


def _count(signature: Signature, name: str) -> int:
    value = argument(signature, name, 1)
    return value if isinstance(value, int) else 1

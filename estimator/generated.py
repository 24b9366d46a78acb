"""Triton kernels that torch.compile's Inductor generates: pointwise, persistent reductions, looped reductions.

A generated kernel streams: each of its buffers is read or written once, whatever is fused into it. It takes

    t = launch(kind) + max(
        (nbytes + again) / (share * memory bandwidth),
        across / (2 a cycle * processors * clock) + computing,
        atomic / (1.05 a cycle * processors * clock),
        walk,
    )

with the bytes that Inductor counts for it (slices and gathered rows, not whole tables). A looped reduction walks its row once
for each of its loops. `again` is what it reads anew where the rows that are under way together are larger than the L2. Where
they are not, a processor, which has four rows under way, takes its time for each (`walk`); only memory as fast as an H200's or
a B200's waits for that.

Two things that a change of layout costs, as in the quantisation for float8 products, whose factors are stored both ways:

- a pointwise kernel whose inputs and outputs are contiguous along different dimensions walks tiles, and reaches `TILED` of the
  rate of others;
- a reduction walks its rows. What it reads or writes where neighbours lie side by side in a column instead (`across`, counted
  in elements, of the rarer direction) touches a sector for each element, as eager kernels do that walk so (`walks.py`).

`atomic`: additions to places that others add to, too (`scatter_add`), as eager ones in 16 bits (`kernels/rows.py`).

`computing`: its instructions. A GPU issues half as many a second as its peak in single precision, and half of that in double
precision; one for the special units takes four turns. Most kernels wait for memory. Those compute for longer that work out
a value of a row for each of its elements, as float8's scales by row, in double precision.

Fitted to hand-written Triton kernels of the same kinds on an H100 with a cold L2 (`benchmarks/fit_generated.py`, which also
prints how far kernels that the fit has not seen are off). A launch is scaled with the GPU's shortest kernel. Walks and the
launch of looped kernels: NVIDIA's RMS norms on an H200 and a GB200 (`benchmarks/norms.py`); held out: those on a GB300, layer
norms, and steps on an H200 (`benchmarks/generated_kernels.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.kernels.rows import SUMMED
from autosac.estimator.models import Estimate
from autosac.estimator.work import argument, generated_kind, item_bytes, tensor_bytes
from autosac.trace import Signature

SHARE = 0.915
"""Of the peak memory bandwidth."""

TILED = 0.66
"""Of `SHARE`, for kernels that walk tiles. On H100s: 1.4 of 2.2 TB/s (pytorch issue 133242), 1.5 of 2.0 (issue 130015), 1.7 of
2.8 (triton issue 7815).
"""

ACROSS = 2.0
"""Elements that a processor walks in a cycle where neighbours lie in different sectors, beside what the kernel computes: five
such kernels of a step in float8 by row on an H200 (`benchmarks/generated_kernels.py`), one that this torch fuses otherwise.
"""

SPECIAL = 4
"""Turns that an instruction of the special units takes. They issue one where eight of another kind go; half of these are taken
to run beside it.
"""

LAUNCH_US = {"pointwise": 0.0, "persistent": 0.7, "looped": 1.8}
"""More than a GPU's shortest kernel, which has the gap before the next one."""

WALK_US, WALK_US_PER_KIB, WALK_MHZ = 0.69, 0.057, 1980.0
"""What a processor takes for a row, and for each KiB that it moves of it, anew or not, at which clock."""

_BLOCKS_PER_PROCESSOR = 4
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
        launch_us = LAUNCH_US[kind] + hardware.kernel_us
        rate = hardware.mem_bandwidth_gbps * 1e9 * SHARE * (TILED if argument(signature, "tiles") else 1.0)
        sectors = _count(signature, "across", 0) / (ACROSS * hardware.sm_count * hardware.boost_mhz * 1e6)
        atomics = 2 * _count(signature, "atomic", 0) / (SUMMED * hardware.sm_count * hardware.boost_mhz * 1e6)
        walk, again = self._rows_again(signature, nbytes)
        seconds = max((nbytes + again) / rate, sectors + self._computing_s(signature), atomics, walk)
        return Estimate(launch_us * 1e-3 + seconds * 1e3, f"generated:{kind}", _REL_STD)

    def _computing_s(self, signature: Signature) -> float:
        """Double precision has half as many units, and next to none on GPUs that are not made for it (not measured there)."""
        single, special, double = (_count(signature, name, 0) for name in ("single", "special", "double"))
        rate = self._hardware.peak_flops("float32") / 2
        return (single + SPECIAL * special) / rate + double / min(rate / 2, self._hardware.peak_flops("float64") / 2)

    def _rows_again(self, signature: Signature, nbytes: float) -> tuple[float, float]:
        """Of a reduction that walks its rows more than once: seconds of its walk, and the bytes that memory gives it anew."""
        loops, reduced, rows = (_count(signature, name) for name in ("loops", "reduced", "rows"))
        if loops < 2:
            return 0.0, 0.0
        hardware = self._hardware
        row = max((item_bytes(m.dtype) for m in signature.inputs if math.prod(m.shape) >= rows * reduced), default=0)
        again, at_once = (loops - 1) * rows * reduced * row, hardware.sm_count * _BLOCKS_PER_PROCESSOR
        if min(rows, at_once) * reduced * row > hardware.l2_bytes:
            return 0.0, again
        row_us = (WALK_US + WALK_US_PER_KIB * (nbytes + again) / rows / 1024) * WALK_MHZ / hardware.boost_mhz
        return max(1.0, rows / at_once) * row_us * 1e-6, 0.0


def _count(signature: Signature, name: str, otherwise: int = 1) -> int:
    value = argument(signature, name, otherwise)
    return value if isinstance(value, int) else otherwise

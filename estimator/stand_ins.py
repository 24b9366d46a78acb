"""What stand-ins for custom kernels cost (`autosac.integrations.stand_ins`), from the FLOPs and bytes that they state.

    t = launch + max(flops / rate, bytes / (SHARE_OF_BANDWIDTH * memory bandwidth))

The rate is SHARE_OF_PEAK of the peak, or what a stand-in states for a multiprocessor and a cycle (`per_cycle`). The shares are
what large products and streaming kernels reach; nothing is fitted to any stand-in, hence the wide error.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import argument, arithmetic
from autosac.trace import Signature

PREFIX = "stand_in."
SHARE_OF_PEAK = 0.65
SHARE_OF_BANDWIDTH = 0.9
_REL_STD = 0.3


def is_computing(signature: Signature) -> bool:
    """Whether an operator is a stand-in that states FLOPs: it draws power as products do (`power.py`)."""
    return signature.name.startswith(PREFIX) and bool(argument(signature, "flops", 0.0))


class StandIns:
    """Prices of stand-ins on one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._hardware = hardware

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """The formula of the module's docstring; None for all other operators."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if not signature.name.startswith(PREFIX):
            return None
        hardware = self._hardware
        dtype = signature.inputs[0].dtype if signature.inputs else "float32"
        flops, nbytes, per_cycle = (
            float(argument(signature, name, 0.0) or 0.0)  # type: ignore[arg-type]
            for name in ("flops", "nbytes", "per_cycle")
        )
        cycles_per_s = hardware.sm_count * hardware.boost_mhz * 1e6  # of all multiprocessors
        seconds = max(
            flops / (per_cycle * cycles_per_s or SHARE_OF_PEAK * hardware.peak_flops(arithmetic(dtype))),
            nbytes / (SHARE_OF_BANDWIDTH * hardware.mem_bandwidth_gbps * 1e9),
        )
        return Estimate(hardware.kernel_us * 1e-3 + seconds * 1e3, "stand-in", _REL_STD)

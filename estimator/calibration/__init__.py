"""Calibration: measures operators, collectives and host on the machine at hand, and makes a hardware profile of them.

`calibrate` does it; what it leaves beside the profile is read by `load_calibrated` and served by `CalibratedOperators` and
`CalibratedCollectives`. Only what measures needs PyTorch, and imports it when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosac.estimator.calibration.fitted import (
    Calibrated,
    CalibratedCollectives,
    CalibratedOperators,
    load_calibrated,
)
from autosac.estimator.calibration.host_memory import HostMemory, memory_state_ms

if TYPE_CHECKING:
    from autosac.estimator.calibration.campaign import Campaign, CampaignResult, calibrate

_LAZY = dict.fromkeys(("Campaign", "CampaignResult", "calibrate"), "autosac.estimator.calibration.campaign")

__all__ = [
    "Calibrated",
    "CalibratedCollectives",
    "CalibratedOperators",
    "Campaign",
    "CampaignResult",
    "HostMemory",
    "calibrate",
    "load_calibrated",
    "memory_state_ms",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

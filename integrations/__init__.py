"""Making real jobs obey a plan: `apply` for any eager PyTorch model, `observe` to see what a plan would
decide on, and the TorchTitan plugin in `autosac.integrations.torchtitan`. Importing this package imports
nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosac.integrations.apply import PlanMismatchWarning, apply
    from autosac.integrations.observe import RegionListener, RegionRecorder, observe

__all__ = ["PlanMismatchWarning", "RegionListener", "RegionRecorder", "apply", "observe"]

_HOMES = {"PlanMismatchWarning": "apply", "apply": "apply"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'observe')}"), name)

"""AutoSAC: plans selective activation checkpointing by simulating the training step, without a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosac.api import apply, compile_options, observe, plan, search, simulate, summary
    from autosac.configurations.space.offers import Offer
    from autosac.configurations.space.request import SearchRequest
    from autosac.errors import (
        AutosacError,
        CaptureError,
        HardwareError,
        InfeasibleError,
        PlanError,
        SimulationError,
        TraceError,
        UsageError,
    )
    from autosac.integrations.chunked_loss import chunked_loss
    from autosac.plans import Plan
    from autosac.simulation import Simulation
    from autosac.trace import Trace

__all__ = [
    "AutosacError",
    "CaptureError",
    "HardwareError",
    "InfeasibleError",
    "Offer",
    "Plan",
    "PlanError",
    "SearchRequest",
    "Simulation",
    "SimulationError",
    "Trace",
    "TraceError",
    "UsageError",
    "apply",
    "chunked_loss",
    "compile_options",
    "observe",
    "plan",
    "search",
    "simulate",
    "summary",
]

_HOME = {
    "apply": "api",
    "chunked_loss": "integrations.chunked_loss",
    "compile_options": "api",
    "observe": "api",
    "plan": "api",
    "search": "api",
    "simulate": "api",
    "summary": "api",
    "Offer": "configurations.space.offers",
    "Plan": "plans",
    "SearchRequest": "configurations.space.request",
    "Simulation": "simulation",
    "Trace": "trace",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that importing one room does not import all of them."""
    if name not in __all__:
        raise AttributeError(f"module 'autosac' has no attribute {name!r}")
    return getattr(import_module(f"autosac.{_HOME.get(name, 'errors')}"), name)

"""What one thing costs: hardware and cluster profiles, operator and collective cost models, prices of traces.

`price(trace, hardware, cluster)` answers with the device time of every event; which models served is part of
the answer. Names that need heavy imports are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autosac.estimator.cluster import Cluster, Placement, default_cluster, known_clusters, load_cluster
from autosac.estimator.hardware import Hardware, known_hardware, load_hardware
from autosac.estimator.models import CollectiveModel, Estimate, Models, OperatorModel
from autosac.estimator.pricing import Pricing, default_models, price

# name -> module of what is loaded on first use
_LAZY: dict[str, str] = {}

__all__ = [
    "Cluster",
    "CollectiveModel",
    "Estimate",
    "Hardware",
    "Models",
    "OperatorModel",
    "Placement",
    "Pricing",
    "default_cluster",
    "default_models",
    "known_clusters",
    "known_hardware",
    "load_cluster",
    "load_hardware",
    "price",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

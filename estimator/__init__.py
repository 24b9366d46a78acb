"""What one thing costs: hardware and cluster profiles, operator and collective cost models, prices of traces.

`price(trace, hardware, cluster)` answers with the device time of every event; which models served is part of the
answer. `SACEstimator` turns a priced trace into per-module operator statistics; its names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosac.estimator.attention import LearnedAttention
from autosac.estimator.cluster import Cluster, Placement, default_cluster, known_clusters, load_cluster
from autosac.estimator.collectives import AlphaBeta
from autosac.estimator.hardware import Hardware, known_hardware, load_hardware
from autosac.estimator.learned import LearnedMatmul
from autosac.estimator.log_sigmoid import Curve, LogSigmoid
from autosac.estimator.memory_bound import LearnedMemory
from autosac.estimator.models import CollectiveModel, Estimate, Models, OperatorModel
from autosac.estimator.nccl import ChunkModel, ChunkProfile
from autosac.estimator.network.flows import FlowModel
from autosac.estimator.pricing import Pricing, default_models, price
from autosac.estimator.profiled import ProfiledModel, save_measured
from autosac.estimator.roofline import Roofline
from autosac.estimator.statistical import Corrected, Observation
from autosac.estimator.tiled import TiledMatmul

if TYPE_CHECKING:
    from autosac.estimator.sac_estimator import SACEstimator
    from autosac.estimator.sac_stats import SACModGreedyOrder, SACModStats, SACModTradeoffStats

# name -> module of what is loaded on first use
_LAZY: dict[str, str] = {
    "SACEstimator": "autosac.estimator.sac_estimator",
    "SACModGreedyOrder": "autosac.estimator.sac_stats",
    "SACModStats": "autosac.estimator.sac_stats",
    "SACModTradeoffStats": "autosac.estimator.sac_stats",
}

__all__ = [
    "AlphaBeta",
    "ChunkModel",
    "ChunkProfile",
    "Cluster",
    "CollectiveModel",
    "Corrected",
    "Curve",
    "Estimate",
    "FlowModel",
    "Hardware",
    "LearnedAttention",
    "LearnedMatmul",
    "LearnedMemory",
    "LogSigmoid",
    "Models",
    "Observation",
    "OperatorModel",
    "Placement",
    "Pricing",
    "ProfiledModel",
    "Roofline",
    "SACEstimator",
    "SACModGreedyOrder",
    "SACModStats",
    "SACModTradeoffStats",
    "TiledMatmul",
    "default_cluster",
    "default_models",
    "known_clusters",
    "known_hardware",
    "load_cluster",
    "load_hardware",
    "price",
    "save_measured",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

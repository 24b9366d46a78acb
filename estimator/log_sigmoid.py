"""Collectives with bandwidth that grows with the message: log-sigmoid curves fitted to nccl-tests (TorchSim
section F).

    B(D) = L / (1 + exp(-k (log(D + 1) - D0)))                                  eq. 1, with b = 0
    t = latency + hop (n - 1) + f S / B                                         f: what a ring moves, see
    below

Inside a node each (link generation, collective) has a curve of its own, fitted for 2, 4 and 8 GPUs (L and D0
shift by a constant for every doubling of the ranks); L is stored as a share of the link's nominal bandwidth,
so the same curve serves other clusters. Without NVLink, two GPUs were fitted (`benchmarks/fit_collectives`). Between nodes
nothing was measured for this project: one curve in bytes per rank with parameters typical of InfiniBand (`_NETWORK`), which a
calibrated cluster replaces.

On M nodes with K ranks each, n = M K, ring segments inside and between nodes work at the same time, so the
slower counts (TorchSim Table 10 adds them; NCCL pipelines chunks through the whole ring):

    all_gather, reduce_scatter   f = (n-1)/n
    all_reduce                   ring f = 2 (n-1)/n; tree 2 S/B and 2 (K-1) + 2 log2(M) hops; the faster
    all_to_all                   (K-1)/n S inside, (n-K)/n S per rank outside
    broadcast                    f = 1; send and recv as an all_to_all of two ranks
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autosac.errors import SimulationError
from autosac.estimator.cluster import Placement
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate

_MODELS = Path(__file__).resolve().parent / "data" / "models"
_LINKS = ("NVLink5", "NVLink4", "NVLink3", "NVLink2", "PCIe4", "PCIe5", "xGMI")
_STAND_INS = {"NVLink2": "NVLink3", "PCIe5": "PCIe4", "xGMI": "NVLink3"}
# Of AMD's links 48 of 64 GB/s are left for data (RCCL's `ncclTopoXGMISpeed`), of which large collectives reach 93 %: about
# 315 GB/s on eight MI300X (RCCL's usage tips). How that grows with the message is taken from the stand-in.
_SHARES = {"xGMI": 0.75 * 0.93}
_CURVES = {
    "reduce": "reduce_scatter",
    "gather": "all_gather",
    "scatter": "all_gather",
    "broadcast": "all_gather",
}
_CURVES |= {"barrier": "all_reduce", "send": "all_to_all", "recv": "all_to_all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One fitted collective:

    Times in microseconds, `share` of the nominal bandwidth, midpoint as log bytes.
    """

    latency_us: float
    hop_us: float
    share: float
    steepness: float
    midpoint: float
    share_per_doubling: float = 0.0
    midpoint_per_doubling: float = 0.0
    rel_std: float = 0.2

    def bandwidth(self, nbytes: float, ranks: int, link_gbps: float) -> float:
        """B(D) in bytes per microsecond for this many ranks (the curve is centred on eight)."""
        doublings = math.log2(ranks / 8)
        limit = self.share * math.exp(self.share_per_doubling * doublings) * link_gbps * 1e3
        distance = math.log(nbytes + 1) - self.midpoint - self.midpoint_per_doubling * doublings
        return limit / (1 + math.exp(min(-self.steepness * distance, 60.0)))


# Not measured for this project: InfiniBand with GPUDirect reaches about 0.88 of its rate, half of it at 512 KiB per rank.
_NETWORK = Curve(latency_us=0.0, hop_us=0.0, share=0.88, steepness=0.6, midpoint=math.log(2**19), rel_std=0.2)


@cache
def fitted_curves() -> dict[str, dict[str, Curve]]:
    """Link generation -> collective -> curve, as shipped."""
    table: dict[str, Any] = json.loads((_MODELS / "collectives.json").read_text(encoding="utf-8"))
    return {link: {kind: Curve(**values) for kind, values in kinds.items()} for link, kinds in table.items()}


class LogSigmoid:
    """The log-sigmoid model for GPUs of one type. `network` replaces the curve of the links between nodes."""

    def __init__(self, hardware: Hardware, *, network: Curve = _NETWORK) -> None:
        """Use the curves of the GPU's link generation, or of the nearest that was measured."""
        link = next((name for name in _LINKS if hardware.link.startswith(name)), "PCIe4")
        self._link = _STAND_INS.get(link, link)
        self._curves = fitted_curves()[self._link]
        if link in _SHARES:
            known = {"share": _SHARES[link], "share_per_doubling": 0.0}
            self._curves = {kind: replace(curve, **known) for kind, curve in self._curves.items()}
        self._source = "log-sigmoid" if link == self._link else f"log-sigmoid@{self._link}"
        self._memory_gbps = hardware.mem_bandwidth_gbps
        self._network = network

    def bandwidth(self, kind: str, nbytes: float, p: Placement) -> float:
        """What the links inside a node give a transfer of this size, in bytes per microsecond. More than eight GPUs, which
        nothing was fitted to, get what eight do.
        """
        curve = self._curves[_CURVES.get(kind, kind)]
        return curve.bandwidth(nbytes, min(p.ranks_per_node if p.nodes > 1 else p.ranks, 8), p.intra_gbps)

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer. SimulationError for an unknown kind."""
        name = _CURVES.get(kind, kind)
        if name not in self._curves:
            raise SimulationError(f"no cost model knows the collective {kind!r}")
        curve = self._curves[name]
        std = math.hypot(curve.rel_std, self._network.rel_std if placement.nodes > 1 else 0.0)
        if placement.ranks == 1:
            return Estimate((curve.latency_us + 2 * nbytes / (self._memory_gbps * 1e3)) * 1e-3, self._source, std)
        return Estimate(self._microseconds(kind, curve, nbytes, placement) * 1e-3, self._source, std)

    def _microseconds(self, kind: str, curve: Curve, nbytes: int, p: Placement) -> float:
        n, m, k = p.ranks, p.nodes, p.ranks_per_node
        size = 4.0 if kind == "barrier" else float(nbytes)
        if kind in ("send", "recv"):
            return curve.latency_us + self._point_to_point(curve, size, p)
        inside = self.bandwidth(kind, size, p) if k > 1 else math.inf
        outside = self._network.bandwidth(size / n, 8, p.inter_gbps) if m > 1 else math.inf
        start = curve.latency_us + curve.hop_us * (min(n, k) - 1)
        if kind == "all_to_all":
            spread = (n - k) / n * size / (outside / k) if m > 1 else 0.0
            return start + max((k - 1 if m > 1 else n - 1) / n * size / inside, spread) + (m > 1) * p.inter_latency_us
        ring_hops = (m - 1) * p.inter_latency_us + (n - m - (k - 1)) * p.intra_latency_us
        share = {"all_reduce": 2 * (n - 1) / n, "barrier": 2 * (n - 1) / n, "broadcast": 1.0}.get(kind, (n - 1) / n)
        twice = 2 if kind in ("all_reduce", "barrier") else 1
        ring = share * size / min(inside, outside) + twice * max(ring_hops, 0.0)
        if twice == 1 or m == 1:
            return start + ring
        tree = 2 * size / (0.92 * min(inside, outside)) + 2 * math.log2(m) * p.inter_latency_us
        return start + min(ring, tree)

    def _point_to_point(self, curve: Curve, size: float, p: Placement) -> float:
        """An all_to_all of two ranks sends half of its buffer: this one has twice the size."""
        if p.nodes == 1:
            return curve.hop_us + size / curve.bandwidth(2 * size, 2, p.intra_gbps)
        return p.inter_latency_us + size / self._network.bandwidth(size, 8, p.inter_gbps)

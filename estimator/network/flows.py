"""Collectives as flows: messages on the links of a cluster, whose slowest link sets the pace.

A group's messages load ports, adapters and uplinks (`fabric`). They move in lockstep, so that alone

    t = start + latencies + max over links of bytes / (capacity * efficiency)

    ring       with NCCL's latencies by protocol (the fastest of LL, LL128 and Simple is taken), n ranks on M nodes, K of
               them on each, f = (n-1)/n (all_reduce: 2 (n-1)/n, broadcast: 1), a and A a step's latency inside and between
               nodes:
               latencies (n - M) a + (M - 1) A; f S / K bytes on an adapter, f S (K-1)/K through a port, or f S where GPUs
               are joined by PCIe, which leads to the adapters, too
    tree       all_reduce, if faster: latencies 2 ((K-1) a + log2(M) A); 2 S / K bytes on an adapter at 92 %
    pairs      all_to_all: S/n to each other rank, (n-K)/n S on a GPU's adapter, (K-1)/n S through its port;
               0.5 us for each peer
    send, recv S bytes

Inside one node, where nothing is shared, times are those of the fitted curves (`LogSigmoid`). Between nodes the efficiency
grows with the bytes of one rank, b, as 1 / (1 + exp(-k (log(b + 1) - b0))): `NETWORK`, `_PAYLOAD`, fitted to autoparallel's
model of nccl-tests on 2 to 16 nodes of eight H100s (all_gather of 128 KiB to 4 GiB; median error 5.7 %; held out, 32 nodes:
6.2 %; `benchmarks/fit_network.py`).

An estimate's `use` says which share of its links the transfer takes meanwhile: bytes / (capacity * t), with the capacity that
messages of 1 GiB reach. The engine shares links between transfers that run at the same time, so that a small message, which
is bound by latency, hardly disturbs a large one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autosac.errors import SimulationError
from autosac.estimator.cluster import Placement
from autosac.estimator.hardware import Hardware
from autosac.estimator.log_sigmoid import Curve, LogSigmoid
from autosac.estimator.models import Estimate
from autosac.estimator.nccl import latencies_us
from autosac.runtime_sim import LinkUse

NETWORK = Curve(latency_us=0.0, hop_us=0.0, share=1.0, steepness=0.316, midpoint=13.19, rel_std=0.1)
_PAYLOAD = {"LL": 0.05, "LL128": 0.92, "Simple": 1.0}
_TREE_SHARE = 0.92
_LARGE_BYTES = 2**30  # what links give such a message is all that they can carry for several
_USUAL_STEP_US = 4.0  # the latency of a step between nodes that NCCL's tables assume; a cluster's own may be longer
_PEER_US = 0.5
_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier")
_WHOLE = ("broadcast", "reduce", "gather", "scatter")


class FlowModel:
    """The flow model for GPUs of one type; see the module's docstring. `network` replaces the curve between nodes."""

    def __init__(self, hardware: Hardware, *, network: Curve = NETWORK) -> None:
        """Model collectives between GPUs of this type."""
        self._inside = LogSigmoid(hardware)
        self._network = network
        self._takes_port = hardware.link.startswith("PCIe")  # what leaves for the network

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer, alone. SimulationError for an unknown kind."""
        inside = self._inside.estimate(kind, nbytes, placement)
        if placement.ranks == 1:
            return inside
        if placement.nodes == 1:
            return inside._replace(use=self._use(kind, nbytes, placement, inside.ms))
        std = math.hypot(inside.rel_std, self._network.rel_std)
        if placement.fabric is not None and kind in _RINGS:
            std = math.hypot(std, placement.fabric.ring_std)
        ms = self._between_us(kind, nbytes, placement) * 1e-3
        return Estimate(ms, "flows", std, self._use(kind, nbytes, placement, ms))

    def _use(self, kind: str, nbytes: int, p: Placement, ms: float) -> LinkUse:
        """The shares of the links of each GPU that the transfer takes, alone."""
        moved = ms * 1e6  # bytes at 1 GB/s
        port, adapter = self._bytes(kind, nbytes, p)
        whole = replace(p, intra_gbps=p.fabric.port_gbps) if p.fabric else p
        port_gbps = self._inside.bandwidth(kind, _LARGE_BYTES, whole) * 1e-3
        adapters_gbps = p.fabric.adapters_gbps if p.fabric else p.inter_gbps
        adapter_gbps = self._network.bandwidth(_LARGE_BYTES, 8, adapters_gbps) * 1e-3 / p.ranks_per_node
        above = 0.0
        if p.fabric is not None:
            above = p.fabric.pair_uplinks if kind in ("all_to_all", "send", "recv") else p.fabric.ring_uplinks
        busy = adapter / (adapter_gbps * moved)
        return LinkUse(
            port=min(1.0, port / (port_gbps * moved)),
            adapter=min(1.0, busy),
            uplink=min(1.0, busy * above),
            rate=max(port, adapter, 1.0) / moved,
        )

    def _bytes(self, kind: str, nbytes: int, p: Placement) -> tuple[float, float]:
        """Bytes that leave a GPU through its port, and through its adapter."""
        n, k, many = p.ranks, p.ranks_per_node, p.nodes > 1
        if kind in ("send", "recv"):
            return (0.0, float(nbytes)) if many else (float(nbytes), 0.0)
        if kind == "all_to_all":
            return (k - 1) / n * nbytes, (n - k) / n * nbytes
        moved = _factor(kind, n) * (4 if kind == "barrier" else nbytes)
        return (moved * self._share_of_port(k), moved / k) if many else (moved, 0.0)

    def _share_of_port(self, ranks_per_node: int) -> float:
        return 1.0 if self._takes_port else (ranks_per_node - 1) / ranks_per_node

    def _between_us(self, kind: str, nbytes: int, p: Placement) -> float:
        size = 4.0 if kind == "barrier" else float(nbytes)
        extra = max(0.0, p.inter_latency_us - _USUAL_STEP_US)
        fabric = p.fabric
        adapters = fabric.adapters_gbps if fabric else p.inter_gbps
        if kind in ("send", "recv", "all_to_all"):
            above = max(1.0, fabric.pair_uplinks) if fabric else 1.0
            one = adapters / p.ranks_per_node / above
            if kind != "all_to_all":
                return self._ring_us(0, 1, size, size, one, extra, tree=False)
            inside = self._inside.bandwidth(kind, size, p)
            away, near = (p.ranks - p.ranks_per_node) / p.ranks * size, (p.ranks_per_node - 1) / p.ranks * size
            start, _, step = latencies_us("ring", "Simple")
            time = max(away / self._network.bandwidth(away, 8, one), near / inside)
            return start + step + extra + _PEER_US * p.ranks + time
        if kind not in _RINGS:
            raise SimulationError(f"no cost model knows the collective {kind!r}")
        capacity = adapters / (max(1.0, fabric.ring_uplinks) if fabric else 1.0)
        moved, n, m, k = _factor(kind, p.ranks) * size, p.ranks, p.nodes, p.ranks_per_node
        passes = 2 if kind in ("all_reduce", "barrier") else 1
        ring = self._ring_us(passes * (n - m), passes * (m - 1), moved, size / n, capacity, extra, tree=False)
        port = moved * self._share_of_port(k) / self._inside.bandwidth(kind, size, p) if k > 1 else 0.0
        if passes == 1:
            return max(ring, port)
        levels = math.log2(m)
        tree = self._ring_us(2 * (k - 1), 2 * levels, 2 * size, size / n, capacity * _TREE_SHARE, extra, tree=True)
        return max(min(ring, tree), port)

    def _ring_us(
        self, near: float, far: float, moved: float, part: float, gbps: float, extra_us: float, *, tree: bool
    ) -> float:
        """Microseconds for `moved` bytes over links of `gbps`, `part` of them a rank's, with so many steps."""
        bandwidth = self._network.bandwidth(part, 8, gbps)
        times = []
        for protocol, payload in _PAYLOAD.items():
            start, inside, between = latencies_us("tree" if tree else "ring", protocol)
            times.append(start + near * inside + far * (between + extra_us) + moved / (payload * bandwidth))
        return min(times)


def _factor(kind: str, n: int) -> float:
    """Bytes that a ring moves over each of its links, as a multiple of the size."""
    if kind in ("all_reduce", "barrier"):
        return 2 * (n - 1) / n
    return 1.0 if kind in _WHOLE else (n - 1) / n

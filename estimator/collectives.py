"""Collectives by latency and bandwidth (alpha-beta), with links inside a node and between nodes.

With n ranks on M nodes, K of them on a node, S bytes in nccl-tests' sense of size, B the bandwidth of the
slowest link that a ring crosses, a the latency of a step inside a node, A between nodes, c a constant for
starting the kernel:

    all_gather, reduce_scatter   (n-1)/n S/B + c + (n-M) a + (M-1) A                     ring
    all_reduce                   2 (n-1)/n S/B + c + 2 ((n-M) a + (M-1) A)               ring, or
                                 2 S/B + c + 2 ((K-1) a + log2(M) A)                     tree, if faster
    all_to_all                   max((K-1)/n S/B_intra, (n-K)/n S/(B_inter/K)) + c + a or A
    broadcast                    S/B + c + (n-M) a + (M-1) A                             ring, pipelined
    send, recv                   S/B + c + a or A
    barrier                      all_reduce of four bytes

A group of one rank copies on the device: two times S over the memory bandwidth.
"""

from __future__ import annotations

import math

from autosac.errors import SimulationError
from autosac.estimator.cluster import Placement
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate

_LINK_EFFICIENCY = 0.80
_START_US = 8.0
_REL_STD = 0.15


class AlphaBeta:
    """The alpha-beta model; see the module's docstring. Bandwidths are `efficiency` of the nominal ones."""

    def __init__(
        self, hardware: Hardware, *, efficiency: float = _LINK_EFFICIENCY, start_us: float = _START_US
    ) -> None:
        """Model collectives between GPUs of this type."""
        self._memory_gbps = hardware.mem_bandwidth_gbps
        self._efficiency = efficiency
        self._start_us = start_us

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer. SimulationError for an unknown kind."""
        return Estimate(self.microseconds(kind, nbytes, placement) * 1e-3, "alpha-beta", _REL_STD)

    def microseconds(self, kind: str, nbytes: int, p: Placement) -> float:
        """The formula of the module's docstring, in microseconds (1 GB/s is 10^3 bytes per microsecond)."""
        n, m, k = p.ranks, p.nodes, p.ranks_per_node
        if n == 1:
            return self._start_us + 2 * nbytes / (self._memory_gbps * 1e3)
        intra = p.intra_gbps * self._efficiency * 1e3
        inter = p.inter_gbps * self._efficiency * 1e3
        slowest = min(intra, inter) if m > 1 and k > 1 else inter if m > 1 else intra
        hops = (n - m) * p.intra_latency_us + (m - 1) * p.inter_latency_us
        hop = p.inter_latency_us if m > 1 else p.intra_latency_us
        match kind:
            case "all_gather" | "reduce_scatter":
                time = (n - 1) / n * nbytes / slowest + hops
            case "all_reduce" | "barrier":
                size = 4 if kind == "barrier" else nbytes
                ring = 2 * ((n - 1) / n * size / slowest + hops)
                levels = (k - 1) * p.intra_latency_us + math.log2(m) * p.inter_latency_us
                tree = 2 * (size / slowest + levels)
                time = min(ring, tree)
            case "all_to_all":
                inside = (k - 1) / n * nbytes / intra
                outside = (n - k) / n * nbytes / (inter / k) if m > 1 else 0.0
                time = max(inside, outside) + hop
            case "broadcast" | "reduce" | "gather" | "scatter":
                time = nbytes / slowest + hops
            case "send" | "recv":
                time = nbytes / slowest + hop
            case _:
                raise SimulationError(f"no cost model knows the collective {kind!r}")
        return self._start_us + time

"""NCCL's choice of algorithm and protocol, and the chunk-level white-box model of collectives that builds on
it.

**Choice** (`choose`). NCCL estimates ``latency + size / bandwidth`` for every (algorithm, protocol) and takes
the fastest. The latencies and protocol shares below are those of NCCL's tuning tables (`src/graph/tuning.cc`,
BSD-3), in microseconds: a constant for the algorithm and protocol, and one for every step inside a node and
between nodes.

    ring   all_reduce 2 (n-1) steps, the others n-1, of which (M-1) or 2 (M-1) are between nodes
    tree   all_reduce on several nodes: 2 ((K-1) inside + log2(M) between), 2 S / (0.92 B)

**Chunks** (`ChunkModel`, Moye section 5.3). NCCL cuts a message into chunks that follow each other through
the ring: every rank of every channel holds at most one chunk at a time. With alpha the time to start, beta
and gamma the time that a chunk takes over a link inside and between nodes, delta the time to reduce a byte
and eta the number of rounds:

    all_gather       alpha + eta (N-1) gamma                                              eq. 2
    reduce_scatter   alpha + eta (N-1) gamma + delta S                                    eq. 3
    all_reduce       alpha + eta 2 (N-1) gamma + delta S          ring                    eq. 4
                     alpha + gamma (eta - 1) + 2 beta (K-1) + 2 gamma log2(M) + delta S   tree, eq. 5

    eta = ceil(S / (N channels chunk)) on a ring, ceil(S / (channels chunk)) on a tree

Equations 3 and 4 as printed have a second term ``eta (N-1)`` without a unit; here it is part of delta. A
chunk never grows beyond what the message needs, as in NCCL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from autosac.errors import SimulationError
from autosac.estimator.cluster import Placement
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate

PROTOCOLS = ("LL", "LL128", "Simple")
# Share of the bandwidth that is payload: LL sends four bytes of flag with four of data, LL128 eight with 120.
_PAYLOAD = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
_START_US = {
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
}
_INTRA_US = {
    "ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
    "tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
}
_INTER_US = {
    "ring": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
    "tree": {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
}
_TREE_SHARE = 0.92
_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter")


class NcclChoice(NamedTuple):
    """What NCCL would run, and how long its own tuning model thinks it takes."""

    algorithm: str
    protocol: str
    microseconds: float


def latencies_us(algorithm: str, protocol: str) -> tuple[float, float, float]:
    """NCCL's own figures: to start, for a step inside a node, for a step between nodes. `algorithm`: "ring" or "tree"."""
    return _START_US[algorithm][protocol], _INTRA_US[algorithm][protocol], _INTER_US[algorithm][protocol]


def choose(kind: str, nbytes: int, placement: Placement, *, efficiency: float = 0.8) -> NcclChoice:
    """NCCL's choice for a collective. SimulationError if it is not one that has a choice."""
    if kind not in _RINGS:
        raise SimulationError(f"NCCL has no algorithms to choose from for {kind!r}")
    options = []
    for algorithm in ("ring", "tree") if kind == "all_reduce" and placement.nodes > 1 else ("ring",):
        for protocol in PROTOCOLS:
            options.append(
                NcclChoice(algorithm, protocol, _tuned(kind, nbytes, placement, algorithm, protocol, efficiency))
            )
    return min(options, key=lambda choice: choice.microseconds)


def _tuned(kind: str, nbytes: int, p: Placement, algorithm: str, protocol: str, efficiency: float) -> float:
    n, m, k = p.ranks, p.nodes, p.ranks_per_node
    bandwidth = _slowest(p) * efficiency * _PAYLOAD[protocol] * 1e3
    intra, inter = _INTRA_US[algorithm][protocol], _INTER_US[algorithm][protocol]
    if algorithm == "tree":
        latency = 2 * ((k - 1) * intra + math.log2(m) * inter)
        return _START_US["tree"][protocol] + latency + 2 * nbytes / (_TREE_SHARE * bandwidth)
    passes = 2 if kind == "all_reduce" else 1
    between = passes * (m - 1)
    latency = (passes * (n - 1) - between) * intra + between * inter
    moved = nbytes if kind == "broadcast" else passes * (n - 1) / n * nbytes
    return _START_US["ring"][protocol] + latency + moved / bandwidth


def _slowest(p: Placement) -> float:
    if p.nodes == 1:
        return p.intra_gbps
    return min(p.intra_gbps, p.inter_gbps) if p.ranks_per_node > 1 else p.inter_gbps


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProfile:
    """What Moye profiles offline, here from NCCL's defaults.

    `channels` work side by side; `chunk_bytes` by protocol (the buffer's 4 MiB over eight steps for Simple);
    `reduce_gbps` is the rate at which a GPU adds what it receives; `link_efficiency` is what a link reaches.
    """

    channels: int = 16
    chunk_bytes: tuple[tuple[str, int], ...] = (("LL", 2**15), ("LL128", 2**17), ("Simple", 2**19))
    reduce_gbps: float = 2000.0
    link_efficiency: float = 0.8

    def __post_init__(self) -> None:
        """Nothing may be zero."""
        sizes = dict(self.chunk_bytes)
        if set(sizes) != set(PROTOCOLS) or min(self.channels, *sizes.values()) < 1:
            raise SimulationError("a chunk profile needs channels and a chunk size for LL, LL128 and Simple")
        if not 0 < self.link_efficiency <= 1 or self.reduce_gbps <= 0:
            raise SimulationError("a chunk profile needs a link efficiency in (0, 1] and a positive reduce_gbps")


class ChunkModel:
    """The white-box model; see the module's docstring."""

    def __init__(self, hardware: Hardware, profile: ChunkProfile | None = None) -> None:
        """Model collectives between GPUs of this type."""
        self._profile = profile or ChunkProfile()
        self._memory_gbps = hardware.mem_bandwidth_gbps

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer. SimulationError for an unknown kind."""
        return Estimate(self.microseconds(kind, nbytes, placement) * 1e-3, "chunks", 0.2)

    def microseconds(self, kind: str, nbytes: int, p: Placement) -> float:
        """Equations 2 to 5; transfers without a ring move their chunks over the slowest link."""
        if p.ranks == 1:
            return _START_US["ring"]["Simple"] + 2 * nbytes / (self._memory_gbps * 1e3)
        size = 4 if kind == "barrier" else max(nbytes, 1)
        kind = "all_reduce" if kind == "barrier" else kind
        if kind in ("send", "recv", "all_to_all"):
            return self._pairs(kind, size, p)
        choice = choose(kind, size, p, efficiency=self._profile.link_efficiency)
        alpha = _START_US[choice.algorithm][choice.protocol]
        split = self._profile.channels * (p.ranks if choice.algorithm == "ring" and kind != "broadcast" else 1)
        chunk = min(dict(self._profile.chunk_bytes)[choice.protocol], math.ceil(size / split))
        eta = math.ceil(size / (split * chunk))
        beta = self._step(choice, chunk, p.intra_gbps, inter=False)
        gamma = self._step(choice, chunk, _slowest(p), inter=p.nodes > 1)
        delta = size / (self._profile.reduce_gbps * 1e3) if kind in ("all_reduce", "reduce_scatter", "reduce") else 0.0
        if choice.algorithm == "tree":
            deep = 2 * beta * (p.ranks_per_node - 1) + 2 * gamma * math.log2(p.nodes)
            return alpha + gamma * (eta - 1) + deep + delta
        if kind == "broadcast":
            return alpha + gamma * (eta - 1 + p.ranks - 1) + delta
        rounds = eta * (p.ranks - 1) * (2 if kind == "all_reduce" else 1)
        return alpha + gamma * rounds + delta

    def _step(self, choice: NcclChoice, chunk: int, gbps: float, *, inter: bool) -> float:
        """One chunk of every channel over a link:

        The chunks in flight hide all but the first part of the latency.
        """
        payload = self._profile.link_efficiency * _PAYLOAD[choice.protocol] * gbps * 1e3
        latency = (_INTER_US if inter else _INTRA_US)[choice.algorithm][choice.protocol]
        full = dict(self._profile.chunk_bytes)[choice.protocol]
        return latency * (1 - 0.75 * chunk / full) + chunk * self._profile.channels / payload

    def _pairs(self, kind: str, size: int, p: Placement) -> float:
        efficiency = self._profile.link_efficiency * 1e3
        inside, outside = p.intra_gbps * efficiency, p.inter_gbps * efficiency / p.ranks_per_node
        start = _START_US["ring"]["Simple"] + (p.inter_latency_us if p.nodes > 1 else p.intra_latency_us)
        if kind != "all_to_all":
            return start + size / (outside * p.ranks_per_node if p.nodes > 1 else inside)
        n, k = p.ranks, p.ranks_per_node
        return start + max((k - 1) / n * size / inside, (n - k) / n * size / outside)

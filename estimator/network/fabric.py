"""What the flows of a process group load of a cluster: ports inside nodes, network adapters, uplinks of racks.

The fabric: each GPU has a port to the others of its node and a share of the node's network adapters. The adapters of a rack
(or of one rail of it) meet in a leaf switch, whose uplinks go to the spine and carry all of its adapters at once, divided by
the oversubscription. The collectives of a job are alike on all of its groups: while this group communicates, its siblings on
the other GPUs of the same nodes and racks do, so that a GPU has its own part of every link that is shared::

    adapters    B/G for each of the node's G GPUs; a group with K ranks on a node has K B/G           `adapters_gbps`
    uplinks     the same divided by the oversubscription

Flows per group, in units of what each adapter carries:

    ring        NCCL runs a ring through each adapter. Its flow leaves every node once, and rack r (where the group has m_r
                nodes) as often as the ring leaves it, x_r times: x_r / m_r of the leaf's adapters send upwards
    pairs       every rank sends to every other one: of what leaves its node, (n - n_r) / (n - K) leaves its rack

With even spreading the uplinks take (x_r / m_r) times the oversubscription as long as the adapters take. With hashing, the
flows of the fullest uplink do, `chance.most_loaded`; NCCL's two channels for each adapter are two flows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.network.chance import most_loaded

FLOWS_PER_ADAPTER = 2


class Uplinks(NamedTuple):
    """A leaf: how many adapters meet in it, its uplinks (0: traffic spreads evenly over them), and its oversubscription."""

    adapters: int
    paths: int
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a group's flows load; see the module's docstring. Bandwidths in GB/s, one direction.

    `port_gbps` is that of one GPU's whole port, `adapters_gbps` that of the adapters of the group's ranks on one node.
    `ring_uplinks` and `pair_uplinks` say how much longer uplinks take than adapters; `ring_std`: relative standard deviation
    of that, by collisions.
    """

    port_gbps: float
    adapters_gbps: float
    ring_uplinks: float = 0.0
    pair_uplinks: float = 0.0
    ring_std: float = 0.0

    @staticmethod
    def of(
        racks: NDArray[np.int64],
        ranks_per_node: NDArray[np.int64],
        *,
        port_gbps: float,
        adapters_gbps: float,
        uplinks: Uplinks,
    ) -> Fabric:
        """The loads of a group. `racks`, `ranks_per_node`: shape [nodes], in the ring's order."""
        if racks[0] == racks[-1]:  # in order: all nodes are in one rack
            return Fabric(port_gbps=port_gbps, adapters_gbps=adapters_gbps)
        names, inside, nodes = np.unique(racks, return_inverse=True, return_counts=True)
        leaving = np.bincount(inside[racks != np.roll(racks, -1)], minlength=len(names))
        ring, std = _ring((leaving / nodes).max(), len(names), uplinks)
        members = np.bincount(inside, weights=ranks_per_node)
        total, node = members.sum(), ranks_per_node.max()
        pairs = (total - members.min()) / (total - node) * uplinks.oversubscription
        return Fabric(
            port_gbps=port_gbps, adapters_gbps=adapters_gbps, ring_uplinks=ring, pair_uplinks=float(pairs), ring_std=std
        )


def _ring(leaving: float, racks: int, uplinks: Uplinks) -> tuple[float, float]:
    """How much longer the uplinks take than the adapters, and its relative standard deviation."""
    if not uplinks.paths:
        return leaving * uplinks.oversubscription, 0.0
    flows = max(1, round(leaving * uplinks.adapters * FLOWS_PER_ADAPTER))
    fullest = most_loaded(flows, uplinks.paths, racks)
    one = uplinks.oversubscription * uplinks.paths / (FLOWS_PER_ADAPTER * uplinks.adapters)
    return fullest.mean * one, fullest.std / fullest.mean

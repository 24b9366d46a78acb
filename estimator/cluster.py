"""Clusters: how many GPUs a node has, and which links join them. Three tiers: node, rack, everything.

A cluster is a TOML file (see `data/clusters`); `load_cluster` takes the name of a shipped preset or a path,
and `default_cluster` makes one for a GPU type and a world size. Ranks fill nodes in order, as torchrun does.

`Placement` says what of the topology one process group sees; it is derived from the group's ranks:

    ranks            n
    nodes            M, distinct ``rank // gpus_per_node``
    ranks_per_node   K, the most ranks that share a node
    racks            distinct ``node // nodes_per_rack``
    inter_gbps       what one node's share of the network offers this group: each of a node's GPUs brings
                     1/gpus_per_node of the node's bandwidth (sibling groups use the rest), divided by the
                     oversubscription where racks are crossed
    intra_gbps       what one of the group's GPUs has to the others of the group in its node: behind a switch its whole port,
                     in a full mesh its links to these others only
    fabric           how the group's flows load ports, network adapters and uplinks (`network.fabric`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from autosac.errors import HardwareError
from autosac.estimator import profiles
from autosac.estimator.hardware import Hardware
from autosac.estimator.network.chance import SPREAD
from autosac.estimator.network.fabric import Fabric, Uplinks
from autosac.estimator.profiles import BytesOrNone, NotNegative, Positive, Text
from autosac.files.schema import STRICT, Name, Within

_NIC_GBPS = 25.0  # a GPU type without a preset: one 200-Gb/s network adapter for every two GPUs
_NCCL_BUFFER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the ranks of one process group lie. See the module's docstring."""

    ranks: int
    nodes: int
    ranks_per_node: int
    racks: int
    intra_gbps: float
    intra_latency_us: float
    inter_gbps: float
    inter_latency_us: float
    fabric: Fabric | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs. Bandwidths in GB/s (10^9 bytes per second), one direction.

    `intra_gbps` is the bandwidth from one GPU to the others of its node, `inter_gbps` that from one whole node to the
    network. `nodes_per_rack` (0: all nodes are in one rack) and `oversubscription` (1: none) describe the third tier.
    `intra_links`: a "switch" connects the GPUs of a node, or a "mesh" with a link for each pair.
    `rail_optimized`: GPUs with the same number in their nodes share a leaf switch of the rack, else all GPUs of a rack do.
    `uplinks_per_leaf`: hashing chooses one of them for each flow (0: traffic is spread evenly over all uplinks).
    `gpu_spread`: the relative standard deviation of the GPUs' speeds (`network.chance`).
    `nccl_buffer_bytes`: memory of one communicator on the GPU, outside of PyTorch.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    name: Name
    description: Text = ""
    source: Text = ""
    nodes: Annotated[int, Within(1, 2**17)] = 1
    gpus_per_node: Annotated[int, Within(1, 2**12)]
    intra_gbps: Positive
    intra_latency_us: NotNegative
    inter_gbps: Positive
    inter_latency_us: NotNegative
    nodes_per_rack: Annotated[int, Within(0, 2**17)] = 0
    oversubscription: Annotated[float, Within(1, 1e7)] = 1.0
    intra_links: Literal["switch", "mesh"] = "switch"
    rail_optimized: bool = False
    uplinks_per_leaf: Annotated[int, Within(0, 2**12)] = 0
    gpu_spread: Annotated[float, Within(1e-4, 0.5, zero=True)] = SPREAD
    nccl_buffer_bytes: BytesOrNone = _NCCL_BUFFER_BYTES

    def __post_init__(self) -> None:
        if self.uplinks_per_leaf and not self.nodes_per_rack:
            raise ValueError("uplinks_per_leaf needs nodes_per_rack: without racks there are no uplinks")

    @property
    def world_size(self) -> int:
        """GPUs in the cluster."""
        return self.nodes * self.gpus_per_node

    def sized(self, world_size: int) -> Cluster:
        """The same machines, as many as `world_size` ranks fill. HardwareError if that is not positive."""
        if world_size < 1:
            raise HardwareError(f"world size must be at least 1, not {world_size}")
        return replace(self, nodes=-(-world_size // self.gpus_per_node))

    def place(self, ranks: Sequence[int]) -> Placement:
        """What the group of these global ranks sees of the cluster."""
        nodes, per_node = np.unique(np.asarray(ranks) // self.gpus_per_node, return_counts=True)
        racks = nodes // self.nodes_per_rack if self.nodes_per_rack else np.zeros_like(nodes)
        crossed = len(np.unique(racks))
        most = int(per_node.max())
        share = self.inter_gbps * most / self.gpus_per_node
        linked = (most - 1) / (self.gpus_per_node - 1) if self.intra_links == "mesh" and most > 1 else 1.0
        return Placement(
            ranks=len(ranks),
            nodes=len(nodes),
            ranks_per_node=most,
            racks=crossed,
            intra_gbps=self.intra_gbps * linked,
            intra_latency_us=self.intra_latency_us,
            inter_gbps=share / self.oversubscription if crossed > 1 else share,
            inter_latency_us=self.inter_latency_us,
            fabric=Fabric.of(racks, per_node, port_gbps=self.intra_gbps, adapters_gbps=share, uplinks=self._uplinks),
        )

    @property
    def _uplinks(self) -> Uplinks:
        """What joins the racks."""
        return Uplinks(
            adapters=self.nodes_per_rack * (1 if self.rail_optimized else self.gpus_per_node),
            paths=self.uplinks_per_leaf,
            oversubscription=self.oversubscription,
        )


def known_clusters() -> tuple[str, ...]:
    """The names of the shipped cluster presets."""
    return profiles.shipped("clusters")


@lru_cache(maxsize=64)
def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by the name of a preset or from a TOML file. HardwareError if it is unknown or wrong."""
    table, path = profiles.read("clusters", name_or_path)
    return profiles.value_of(table, Cluster, path)


def default_cluster(hardware: Hardware, world_size: int) -> Cluster:
    """The machines that this GPU usually comes in, as many as `world_size` ranks fill."""
    if hardware.cluster:
        return load_cluster(hardware.cluster).sized(world_size)
    generic = Cluster(
        name=f"{hardware.name} x 8",
        description="eight GPUs per node and one 200-Gb/s network adapter per two GPUs",
        nodes=1,
        gpus_per_node=8,
        intra_gbps=hardware.link_gbps,
        intra_latency_us=1.0,
        inter_gbps=4 * _NIC_GBPS,
        inter_latency_us=5.0,
    )
    return generic.sized(world_size)

"""What FSDP's transfers take of a rank's time and links at least, layer by layer.

A rank gathers the parameters of its layers and scatters their gradients, over the ranks of FSDP's group. The time X during
which at least one of these transfers is under way on a rank is no less than

1. the sum of its gathers, and that of its scatters, each as long as alone: those of one kind wait for each other on a stream;
2. for each of its links, the sum over all of them of (time alone) times (share of the link that it takes alone): a link is
   never used for more than the whole (`autosac.runtime_sim.sharing`).

Every layer's message is taken to be as fast, byte for byte, as one message of all layers would be: no model of collectives
gives fewer bytes a millisecond to a larger message. Padding, and what stands before and behind the layers, count nothing.
A step's transfers lie in it: gathers follow the optimizer's last step, scatters come before its next one. So a step takes no
less than X and the optimizer's.

Experts that expert parallelism shares out are gathered by themselves, over the ranks that hold the same ones.

What that means for a step's time is said in `bounds.bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autosac.configurations.space.layout import Layout
from autosac.estimator.models import Estimate
from autosac.estimator.pricing import default_models
from autosac.runtime_sim import ConstantOverlap
from autosac.simulation import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of one layer: milliseconds of a gather and of a scatter, and what of them each link (port, adapter, uplink) is taken.

    `slowdown`: by which factor computation beside such a transfer is slower, at least.
    """

    gather_ms: float = 0.0
    scatter_ms: float = 0.0
    gather_links_ms: tuple[float, ...] = ()
    scatter_links_ms: tuple[float, ...] = ()
    slowdown: float = 1.0

    def of_links_ms(self, gathers: float, scatters: float) -> list[float]:
        """What so many transfers take of each link."""
        links = zip(self.gather_links_ms, self.scatter_links_ms, strict=True)
        return [gathers * gather + scatters * scatter for gather, scatter in links]


NO_TRAFFIC = Traffic()


class Transfers(NamedTuple):
    """So many gathers and scatters of a kind."""

    of: Traffic
    gathers: float
    scatters: float


def busy_ms(*kinds: Transfers) -> float:
    """How long at least one of these transfers is under way, at least. See the module."""
    links = [some.of.of_links_ms(some.gathers, some.scatters) for some in kinds if some.of is not NO_TRAFFIC]
    gathers_ms = sum(some.gathers * some.of.gather_ms for some in kinds)
    scatters_ms = sum(some.scatters * some.of.scatter_ms for some in kinds)
    return max(gathers_ms, scatters_ms, *map(sum, zip(*links, strict=True)))


def least_slowdown(*kinds: Transfers) -> float:
    """By which factor computation beside any of these transfers is slower, at least."""
    return min((some.of.slowdown for some in kinds if some.of is not NO_TRAFFIC), default=1.0)


class Roads:
    """The links of a target, and what transfers take on them."""

    def __init__(self, target: Target) -> None:
        self._cluster, self._overlap = target.cluster, target.overlap
        self._model = target.collectives or default_models(target.hardware).collectives
        self._estimate = lru_cache(maxsize=4096)(self._estimated)

    def traffic(
        self, layout: Layout, layers: int, layer_parameters: float, compute_bytes: int, gradient_bytes: int
    ) -> Traffic:
        """Of one layer of a layout; none without FSDP. `layer_parameters`: those that all of FSDP's ranks share, unsharded."""
        ranks = layout.shard * layout.context
        return self._of_group(
            layout, layers, layer_parameters / layout.tensor, compute_bytes, gradient_bytes, ranks, layout.tensor
        )

    def expert_traffic(
        self, layout: Layout, layers: int, expert_parameters: float, compute_bytes: int, gradient_bytes: int
    ) -> Traffic:
        """Of the experts of one layer; none without expert parallelism. `expert_parameters`: of all experts, unsharded."""
        apart = layout.expert * layout.expert_tensor  # ranks that hold different parts of a layer's experts
        if layout.expert == 1:
            return NO_TRAFFIC
        ranks = layout.shard * layout.context * layout.tensor // apart
        return self._of_group(layout, layers, expert_parameters / apart, compute_bytes, gradient_bytes, ranks, apart)

    def _of_group(
        self,
        layout: Layout,
        layers: int,
        parameters: float,
        compute_bytes: int,
        gradient_bytes: int,
        ranks: int,
        stride: int,
    ) -> Traffic:
        """Of one layer's parameters on a rank, which so many ranks share, each of them `stride` after the one before."""
        per_node = self._cluster.gpus_per_node
        stage = layout.world_size // layout.pipeline
        aligned = layout.pipeline == 1 or stage % per_node == 0 or per_node % stage == 0
        numbers = layers * parameters
        if ranks == 1 or not aligned or not isinstance(self._overlap, ConstantOverlap) or numbers < 1:
            return NO_TRAFFIC
        gather = self._estimate("all_gather", int(numbers * compute_bytes), ranks, stride)
        scatter = self._estimate("reduce_scatter", int(numbers * gradient_bytes), ranks, stride)
        crosses = (ranks - 1) * stride >= per_node
        return Traffic(
            gather_ms=gather.ms / layers,
            scatter_ms=scatter.ms / layers,
            gather_links_ms=_links_ms(gather, layers),
            scatter_links_ms=_links_ms(scatter, layers),
            slowdown=self._overlap.compute_inter if crosses else self._overlap.compute_intra,
        )

    def hop_ms(self, layout: Layout, nbytes: int) -> float:
        """What sending so many bytes from one pipeline stage to the next takes, alone; 0 without a pipeline."""
        if layout.pipeline == 1 or not nbytes:
            return 0.0
        return self._estimate("send", nbytes, 2, layout.world_size // layout.pipeline).ms

    def _estimated(self, kind: str, nbytes: int, ranks: int, stride: int) -> Estimate:
        return self._model.estimate(kind, nbytes, self._cluster.place(range(0, ranks * stride, stride)))


def _links_ms(estimate: Estimate, layers: int) -> tuple[float, ...]:
    use = estimate.use
    return (
        (0.0, 0.0, 0.0) if use is None else tuple(estimate.ms * x / layers for x in (use.port, use.adapter, use.uplink))
    )

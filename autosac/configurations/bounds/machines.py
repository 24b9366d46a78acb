"""The machines that a search may use, as its layouts ask for them: targets, memory, links, and what a step costs there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from autosac.configurations.bounds.traffic import Roads
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.wanted import Wanted
from autosac.planning.closed_loop import Goal
from autosac.quantities import parse_budget
from autosac.simulation import Target


class Machines:
    """Of the offers of a search."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.offers: Mapping[str, Offer] = {offer.gpu: offer for offer in wanted.request.offers}
        self._targets: dict[tuple[str, str], Target] = {}
        self._names: dict[str, str] = {}
        self._roads: dict[str, Roads] = {}

    def per_node(self, gpu: str) -> int:
        """GPUs of a node."""
        return self._target(gpu, "").cluster.gpus_per_node

    def target(self, layout: Layout) -> Target:
        """What a layout runs on."""
        return self._target(layout.gpu, layout.allocator)

    def _target(self, gpu: str, allocator: str) -> Target:
        if (gpu, allocator) not in self._targets:
            offer = self.offers[gpu]
            conf = allocator or self._wanted.space.allocator[0]
            self._targets[gpu, allocator] = Target.of(gpu, offer.world_size, cluster=offer.cluster, allocator=conf)
        return self._targets[gpu, allocator]

    def roads(self, gpu: str) -> Roads:
        """What FSDP's transfers take between GPUs of a kind."""
        if gpu not in self._roads:
            self._roads[gpu] = Roads(self._target(gpu, ""))
        return self._roads[gpu]

    def budget_bytes(self, layout: Layout, budget: str | None = None) -> int:
        """Within the search's budget or another one, which may be a share of the GPU."""
        return parse_budget(budget or self._wanted.request.budget, self.target(layout).hardware.usable_bytes)

    def budgets_bytes(self) -> dict[str, int]:
        """The search's budget, by the kinds of GPUs."""
        budget = self._wanted.request.budget
        return {gpu: parse_budget(budget, self._target(gpu, "").hardware.usable_bytes) for gpu in self.offers}

    def room_bytes(self, layout: Layout, budget: str | None = None) -> int:
        """What simulated allocations may take of the budget, without what a calibrated GPU is known to take beside them."""
        hardware = self.target(layout).hardware
        reserved = self._wanted.goal.budget_kind == "reserved"
        beside = hardware.more_reserved_bytes if reserved else hardware.more_active_bytes
        return self.budget_bytes(layout, budget) - beside

    def goal(self, layout: Layout) -> Goal:
        """What a layout's plans are for."""
        return replace(
            self._wanted.goal,
            budget_bytes=self.budget_bytes(layout),
            offload=layout.activation_offload,
            chunk_loss=layout.chunk_loss,
        )

    def key(self, kind: str, layout: Layout) -> str:
        """A question's name: the layout, and the machines that it is asked for."""
        if layout.gpu not in self._names:
            target = self._target(layout.gpu, layout.allocator)
            described = f"{target.hardware} {target.cluster} {target.host} {target.overlap}"
            self._names[layout.gpu] = hashlib.sha256(described.encode()).hexdigest()[:12]
        return f"{kind} {layout.key} on={self._names[layout.gpu]}"

    def weight(self, layout: Layout) -> float:
        """What a millisecond of a layout's step counts for the objective."""
        return self.offers[layout.gpu].weight(self._wanted.request.objective)

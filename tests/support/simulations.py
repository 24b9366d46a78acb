"""Simulations of which something is given instead of simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autosac.memory_sim import AllocatorReport
from autosac.runtime_sim import Timeline
from autosac.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class GivenSimulation(Simulation):
    """With this timeline, and with what the allocator is said to do if that is given."""

    given_timeline: Timeline
    given_allocation: AllocatorReport | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """As given."""
        return self.given_timeline

    @cached_property
    def unlimited_allocation(self) -> AllocatorReport:
        """As given, else simulated."""
        return self.given_allocation if self.given_allocation is not None else super().unlimited_allocation

"""What `torch.cuda.memory_stats` counts: allocations, bytes and segments, of all pools and of each.

Allocations and their bytes are counted as they come and go. Segments, and what is left of them beside allocations, are looked
at when somebody asks: their peaks and sums are those of such moments.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autosac.capture.cuda.functions import Count
from autosac.memory_sim.allocator import CachingAllocator
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.viewer import segment

ALL = "all"
_POOLS = (ALL, "large_pool", "small_pool")
_Counts = dict[str, dict[str, Count]]


class _Tally:
    """A `Count` that changes in place: each allocation of a script changes six."""

    __slots__ = ("added", "peak", "present")

    def __init__(self) -> None:
        self.present = self.peak = self.added = 0

    def add(self, number: int) -> None:
        """So much has come, or (less than 0) has gone."""
        self.present += number
        if number > 0:
            self.added += number
            self.peak = max(self.peak, self.present)


class MemoryCounts:
    """Of one allocator, whose blocks are told of."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        names = ("allocation", "allocated_bytes", "requested_bytes")
        self._tallies = {pool: {name: _Tally() for name in names} for pool in _POOLS}
        self._looked_at: _Counts = {}

    def made(self, block: Block) -> None:
        """A block has been allocated."""
        self._add(block, 1)

    def freed(self, block: Block) -> None:
        """Its last reference goes; before the allocator is told."""
        self._add(block, -1)

    def _add(self, block: Block, number: int) -> None:
        for pool in (ALL, self._name(block)):
            tallies = self._tallies[pool]
            tallies["allocation"].add(number)
            tallies["allocated_bytes"].add(number * block.size)
            tallies["requested_bytes"].add(number * block.requested)

    def _name(self, block: Block) -> str:
        return "small_pool" if block.pool is self._allocator.small else "large_pool"

    def reset_peaks(self) -> None:
        """Peaks begin anew at the present values."""
        for tallies in self._tallies.values():
            for tally in tallies.values():
                tally.peak = tally.present
        for counts in self._looked_at.values():
            for pool, count in counts.items():
                counts[pool] = count.reset()

    def table(self, live: Collection[Block]) -> _Counts:
        """All of them, by name and pool; `live` are the blocks that are allocated."""
        present = self._present(live)
        for name, found in present.items():
            counts = self._looked_at.setdefault(name, dict.fromkeys(_POOLS, Count()))
            for pool in _POOLS:
                counts[pool] = counts[pool].changed(found[pool] - counts[pool].present)
        table: _Counts = {name: dict(counts) for name, counts in self._looked_at.items()}
        for pool, tallies in self._tallies.items():
            for name, tally in tallies.items():
                table.setdefault(name, {})[pool] = Count(tally.present, tally.peak, tally.added)
        return table

    def segments(self, live: Collection[Block]) -> list[dict[str, Any]]:
        """As `torch.cuda.memory_snapshot` lists them, without stacks."""
        return [segment(run) for run in self._allocator.segments(live)]

    def _present(self, live: Collection[Block]) -> dict[str, dict[str, int]]:
        """What there is now of what is looked at."""
        names = ("segment", "reserved_bytes", "active", "active_bytes", "inactive_split", "inactive_split_bytes")
        found = {name: dict.fromkeys(_POOLS, 0) for name in names}

        def add(name: str, pool: str, number: int) -> None:
            found[name][ALL] += number
            found[name][pool] += number

        for run in self._allocator.segments(live):
            pool = self._name(run[0])
            add("segment", pool, 1)
            for block in run:
                add("reserved_bytes", pool, block.size)
                if not block.is_free:
                    add("active", pool, 1)
                    add("active_bytes", pool, block.size)
                elif len(run) > 1:
                    add("inactive_split", pool, 1)
                    add("inactive_split_bytes", pool, block.size)
        return found

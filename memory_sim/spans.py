"""When what a region's forward made is held, and when its backward uses it.

For one forward execution of a module that could be checkpointed (a Region of the trace, captured without checkpointing):

- `held`: events from the end of its forward to the beginning of its backward. Here checkpointing changes the memory.
- `active`: events of its backward, which with checkpointing begins with the recomputation.
- `implicit`: storages made inside that autograd holds from the forward to the backward (not the region's outputs, which
  live on as the inputs of what follows, whatever is decided here).

The backward begins with the first operator of the backward phase, in the module or below, that reads an implicit storage
of this very execution, and ends with the last of their frees; so microbatches and repeated calls of one module find their
own backward, in whatever order a pipeline schedule runs them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from autosac.memory_sim.allocator_config import BLOCK_BYTES
from autosac.trace import Alloc, Collective, Free, Op, Phase, Region, Trace


class Span(NamedTuple):
    """See the module's docstring. Ranges are [first, last) in `trace.events`; `region` is an index into `trace.regions`."""

    region: int
    held_first: int
    active_first: int
    active_last: int
    implicit: tuple[int, ...]
    boundary: tuple[int, ...]


class StorageEvents:
    """Where each storage of the step is allocated, freed, and read in the backward phase."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.alloc: dict[int, int] = {}
        self.free: dict[int, int] = {}
        self.backward_reads: dict[int, list[int]] = {}
        for i, event in enumerate(trace.events):
            kind = type(event)
            if kind is Alloc:
                self.alloc[event.storage] = i  # type: ignore[union-attr]
            elif kind is Free:
                self.free[event.storage] = i  # type: ignore[union-attr]
            elif (kind is Op or kind is Collective) and event.phase is Phase.BACKWARD:  # type: ignore[union-attr]
                for storage in event.inputs:  # type: ignore[union-attr]
                    self.backward_reads.setdefault(storage, []).append(i)
        self._allocated = sorted((i, storage) for storage, i in self.alloc.items())

    def bytes_of(self, storages: Sequence[int]) -> int:
        """Allocated bytes, each rounded to the caching allocator's block."""
        return sum(-(-self.trace.storages[s].nbytes // BLOCK_BYTES) * BLOCK_BYTES for s in storages)

    def allocated_between(self, first: int, last: int) -> list[int]:
        """Storages allocated by events ``first <= i < last``."""
        low = bisect.bisect_left(self._allocated, (first, -1))
        high = bisect.bisect_left(self._allocated, (last, -1))
        return [storage for _, storage in self._allocated[low:high]]

    def free_of(self, storage: int) -> int:
        """The event that frees a storage; the step's end if none does."""
        return self.free.get(storage, len(self.trace.events))


def region_spans(trace: Trace, lifetimes: StorageEvents) -> tuple[Span | None, ...]:
    """The span of every region of the trace; None where no backward uses what it made."""
    return tuple(_span(i, region, lifetimes) for i, region in enumerate(trace.regions))


def _span(position: int, region: Region, lifetimes: StorageEvents) -> Span | None:
    outputs = set(region.outputs)
    made = [
        s
        for s in lifetimes.allocated_between(region.first, region.last)
        if s not in outputs and lifetimes.free_of(s) >= region.last
    ]
    reads = [read for s in made for read in lifetimes.backward_reads.get(s, ())[:1] if read >= region.last]
    if not reads:
        return None
    active_first = min(reads)
    implicit = tuple(s for s in made if lifetimes.free_of(s) >= active_first)
    ends = [lifetimes.free_of(s) for s in implicit if lifetimes.free_of(s) < len(lifetimes.trace.events)]
    # Inputs that would be freed before the region's backward: checkpointing has to hold them.
    boundary = tuple(s for s in region.inputs if lifetimes.free_of(s) < active_first)
    return Span(position, region.last, active_first, max(ends, default=active_first) + 1, implicit, boundary)

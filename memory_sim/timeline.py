"""Bytes on the device over one training step (TorchSim section D).

`MemoryTimeline.live_bytes[i]` is what PyTorch calls *allocated*: the sum, after event i, of all live
allocations, each rounded up to the caching allocator's 512 bytes; `high_bytes[i]` adds what the operator at
event i takes only while it runs. It is a lower bound of PyTorch's own counters
(`allocated`, `active`), which also include up to 1 MiB of every large block that was not worth splitting, and of
*reserved* memory, which is what the device runs out of: both come from `autosac.memory_sim.replay`.

The series is a cumulative sum over allocations and frees (`lifetimes`); categories, modules' states and
attribution are made on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autosac.memory_sim.allocator_config import BLOCK_BYTES
from autosac.memory_sim.attribution import PeakReport, peak_report
from autosac.memory_sim.categories import Category, categorise
from autosac.memory_sim.lifetimes import IntArray, Lifetimes, trace_lifetimes
from autosac.memory_sim.modules import ModuleSpan, module_spans
from autosac.memory_sim.range_maximum import RangeMaximum
from autosac.memory_sim.workspaces import WorkspaceModel
from autosac.trace import Trace


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Allocated bytes of one rank over its step. Event indices are those of ``trace.events``."""

    trace: Trace
    lifetimes: Lifetimes
    live_bytes: IntArray
    high_bytes: IntArray

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at any time."""
        return int(self.high_bytes[self.peak_event])

    @cached_property
    def peak_event(self) -> int:
        """The first event at which the peak is reached."""
        return int(np.argmax(self.high_bytes))

    def peak_between(self, first: int, last: int) -> int:
        """The most allocated during events ``first <= i < last`` (not empty), in constant time."""
        return int(self._maximum(first, last))

    def peaks_between(self, first: npt.ArrayLike, last: npt.ArrayLike) -> IntArray:
        """`peak_between` for arrays of ranges at once."""
        return self._maximum(first, last)

    def peak_event_between(self, first: int, last: int) -> int:
        """The first event of ``first <= i < last`` at which `peak_between` is reached."""
        return first + int(np.argmax(self.high_bytes[first:last]))

    @cached_property
    def categories(self) -> npt.NDArray[np.int8]:
        """The Category of every row of `lifetimes`."""
        return categorise(self.trace, self.lifetimes)

    def category_bytes(self, category: Category) -> IntArray:
        """Allocated bytes of one category after each event; WORKSPACE includes operators' temporaries."""
        series = self.lifetimes.series(np.flatnonzero(self.categories == category))
        return series + self.lifetimes.transient_bytes if category is Category.WORKSPACE else series

    def breakdown_at(self, event: int) -> dict[Category, int]:
        """Bytes by category at an event; they sum to ``high_bytes[event]``; empty ones are left out."""
        rows = self.lifetimes.alive_after(event)
        sums = np.zeros(len(Category), dtype=np.int64)
        np.add.at(sums, self.categories[rows], self.lifetimes.nbytes[rows])
        sums[Category.WORKSPACE] += self.lifetimes.transient_bytes[event]
        return {category: int(sums[category]) for category in Category if sums[category]}

    @cached_property
    def module_spans(self) -> tuple[ModuleSpan, ...]:
        """Memory before, after and at the most within every execution of every module."""
        return module_spans(self.trace, self.live_bytes, self._maximum)

    def peak(self, *, largest: int = 10, event: int | None = None) -> PeakReport:
        """What the peak (or another event) consists of, with the `largest` live allocations."""
        return peak_report(self, self.peak_event if event is None else event, largest)

    @cached_property
    def _maximum(self) -> RangeMaximum:
        return RangeMaximum(self.high_bytes)


def simulate_memory(
    trace: Trace, *, workspaces: WorkspaceModel | None = None, round_to_bytes: int = BLOCK_BYTES
) -> MemoryTimeline:
    """Allocated bytes over the recorded step of a trace that has events.

    `workspaces`: memory of the GPU's libraries; None counts tensors only. `round_to_bytes`: the allocator's granularity (512
    on CUDA; 1 for exact tensor bytes).

    Raises:
        SimulationError: the trace allocates or frees a storage twice.
    """
    assert trace.events, "the trace has no events"
    lifetimes = trace_lifetimes(trace, workspaces, round_to_bytes)
    live = lifetimes.series()
    return MemoryTimeline(
        trace=trace, lifetimes=lifetimes, live_bytes=live, high_bytes=live + lifetimes.transient_bytes
    )

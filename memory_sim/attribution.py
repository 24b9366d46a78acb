"""Who holds the memory at an event: by category, by module subtree, and the largest allocations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autosac.memory_sim.categories import Category
from autosac.memory_sim.lifetimes import IntArray
from autosac.trace import Alloc, Collective, Label, ModuleEnter, ModuleExit, Op, Phase, Storage, Trace

if TYPE_CHECKING:
    from autosac.memory_sim.timeline import MemoryTimeline


class LiveStorage(NamedTuple):
    """One live allocation: `nbytes` rounded; the operator, module and source line that made it. `storage` is
    -1 for what an operator takes only while it runs.
    """

    nbytes: int
    category: Category
    op: str
    module: str
    source: str
    phase: Phase
    storage: int


class ModuleShare(NamedTuple):
    """Live bytes that a module's operators made: `own_bytes`, and `subtree_bytes` with all below it."""

    module: str
    own_bytes: int
    subtree_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """Memory at one event.

    `op`, `module`, `phase`, `source`: what was running. `by_category` and the root's share in `by_module` sum to `nbytes`.
    `by_module` and `largest` are sorted, most bytes first.
    """

    nbytes: int
    event: int
    op: str
    module: str
    phase: Phase
    source: str
    by_category: dict[Category, int]
    by_module: tuple[ModuleShare, ...]
    largest: tuple[LiveStorage, ...]

    @property
    def outside(self) -> str:
        """What runs outside of all modules: the ``"optimizer"``, or the ``"loss"`` (in forward or backward); else empty."""
        if self.phase is Phase.OPTIMIZER:
            return "optimizer"
        return "loss" if not self.module and self.phase in (Phase.FORWARD, Phase.BACKWARD) else ""


def peak_report(timeline: MemoryTimeline, event: int, largest: int) -> PeakReport:
    """The report of one event of a timeline."""
    trace, lifetimes = timeline.trace, timeline.lifetimes
    running = running_at(timeline, event)
    rows = lifetimes.alive_after(event)
    live = _live_storages(timeline, event, rows, largest)
    return PeakReport(
        nbytes=int(timeline.high_bytes[event]),
        event=event,
        op=running.op,
        module=module_name(trace, running.module),
        phase=running.phase,
        source=source_name(trace, running.source),
        by_category=timeline.breakdown_at(event),
        by_module=_by_module(timeline, event, rows),
        largest=live,
    )


class Running(NamedTuple):
    """What runs at an event: operator, module and source by index."""

    op: str
    module: int
    phase: Phase
    source: int


def running_at(timeline: MemoryTimeline, event: int) -> Running:
    """The operator that allocates or runs at this event, or the nearest before it; SETUP if there is none."""
    trace = timeline.trace
    event = timeline.lifetimes.transient_op.get(event, event)
    for i in range(event, -1, -1):
        here = trace.events[i]
        if type(here) is Alloc:
            storage = trace.storages[here.storage]
            return Running(storage.op, storage.module, storage.phase, storage.source)
        if type(here) is Op:
            return Running(trace.signatures[here.signature].name, here.module, here.phase, here.source)
        if type(here) is Collective:
            return Running(here.kind, here.module, here.phase, here.source)
        if type(here) is ModuleEnter or type(here) is ModuleExit:
            return Running("", here.module, here.phase, -1)
    return Running("", -1, Phase.SETUP, -1)


def module_name(trace: Trace, module: int) -> str:
    """Qualified name; "" for the root and for none."""
    return trace.modules[module] if module >= 0 else ""


def source_name(trace: Trace, source: int) -> str:
    """``file.py:line``; "" if not known."""
    return trace.sources[source] if source >= 0 else ""


def _live_storages(timeline: MemoryTimeline, event: int, rows: IntArray, largest: int) -> tuple[LiveStorage, ...]:
    """The `largest` of what is alive, most bytes first, ties in order of allocation."""
    trace, lifetimes = timeline.trace, timeline.lifetimes
    order = rows[np.argsort(-lifetimes.nbytes[rows], kind="stable")][:largest]
    found = []
    for row in order.tolist():
        index = int(lifetimes.storage[row])
        category = Category(int(timeline.categories[row]))
        found.append(_live(trace, lifetimes.storages[index], int(lifetimes.nbytes[row]), category, index))
    if lifetimes.transient_bytes[event]:
        op, module, phase, source = running_at(timeline, event)
        storage = Storage(0, 0, Label.NONE, phase, module, source, f"{op} (temporary)")
        found.append(_live(trace, storage, int(lifetimes.transient_bytes[event]), Category.WORKSPACE, -1))
    return tuple(sorted(found, key=lambda live: -live.nbytes)[:largest])


def _live(trace: Trace, storage: Storage, nbytes: int, category: Category, index: int) -> LiveStorage:
    module, source = module_name(trace, storage.module), source_name(trace, storage.source)
    return LiveStorage(nbytes, category, storage.op, module, source, storage.phase, index)


def _by_module(timeline: MemoryTimeline, event: int, rows: IntArray) -> tuple[ModuleShare, ...]:
    """Shares of all modules that hold anything; -1 (no module) counts as the root."""
    trace, lifetimes = timeline.trace, timeline.lifetimes
    own: dict[int, int] = {}
    for row in rows.tolist():
        module = lifetimes.storages[int(lifetimes.storage[row])].module
        own[module] = own.get(module, 0) + int(lifetimes.nbytes[row])
    if lifetimes.transient_bytes[event]:
        module = running_at(timeline, event).module
        own[module] = own.get(module, 0) + int(lifetimes.transient_bytes[event])
    return module_shares(trace, own)


def module_shares(trace: Trace, own: dict[int, int]) -> tuple[ModuleShare, ...]:
    """Own bytes by module index (-1: outside of all modules) summed up the module tree, most bytes first."""
    own_by_name: dict[str, int] = {}
    subtree: dict[str, int] = {}
    for module, nbytes in own.items():
        name = module_name(trace, module)
        own_by_name[name] = own_by_name.get(name, 0) + nbytes
        above = {""}
        while module >= 0:
            above.add(trace.modules[module])
            module = trace.module_parents[module]
        for ancestor in above:
            subtree[ancestor] = subtree.get(ancestor, 0) + nbytes
    shares = (ModuleShare(name, own_by_name.get(name, 0), nbytes) for name, nbytes in subtree.items())
    return tuple(sorted(shares, key=lambda share: (-share.subtree_bytes, share.module)))

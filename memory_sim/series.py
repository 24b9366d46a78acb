"""What pictures of memory show: bytes by category over a step, thinned, with its peak, its phases and what ran when.

Long steps are thinned: of every bucket of events the one with the most memory is kept, so that no peak is lost, and the last
one, so that nothing is drawn longer than it lasts. Half of the buckets are of equally many events, half of equal times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autosac.errors import UsageError
from autosac.memory_sim.attribution import module_name, running_at
from autosac.memory_sim.categories import Category
from autosac.memory_sim.replay import AllocatorReport
from autosac.memory_sim.timeline import MemoryTimeline
from autosac.trace import Collective, ModuleEnter, ModuleExit, Op, Phase

GIB = 1 << 30
Floats = npt.NDArray[np.float64]

STACK = (
    Category.PARAMETER,
    Category.OPTIMIZER_STATE,
    Category.BUFFER,
    Category.WORKSPACE,
    Category.INPUT,
    Category.GRADIENT,
    Category.UNSHARDED_PARAMETER,
    Category.COMMUNICATION,
    Category.ACTIVATION,
    Category.ACTIVATION_GRADIENT,
    Category.TEMPORARY,
)
"""From the bottom of the stack to its top."""

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER)
"""Those that are distinguished."""


class What(NamedTuple):
    """What ran: operator, module and phase for people."""

    op: str
    module: str
    phase: str


class Stretch(NamedTuple):
    """A part of the step that is of one phase: from `first` to `last` on the axis."""

    phase: Phase
    first: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSeries:
    """What is drawn: at `event[k]` (x value `x[k]`) so many GiB of each category, the total, and reserved
    memory if known; `what[k]` ran then. `unit`: what x counts.
    """

    event: npt.NDArray[np.int64]
    x: Floats
    unit: str
    gib: dict[Category, Floats]
    total_gib: Floats
    reserved_gib: Floats | None
    phases: tuple[Stretch, ...]
    what: tuple[What, ...]

    @property
    def peak(self) -> int:
        """The position of the peak."""
        return int(np.argmax(self.total_gib))

    @property
    def peak_x(self) -> float:
        """Where the peak is."""
        return float(self.x[self.peak])


def timeline_series(
    timeline: MemoryTimeline,
    *,
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | Floats | None = None,
    points: int = 2000,
) -> TimelineSeries:
    """At most `points` events of a timeline, peaks kept; x is `event_ms` (one an event) or the event's number."""
    high = timeline.high_bytes
    x = np.arange(len(high), dtype=np.float64) if event_ms is None else np.asarray(event_ms, dtype=np.float64)
    if len(x) != len(high):
        raise UsageError(f"{len(x)} times for {len(high)} events")
    event = _thinned(high, x, points)
    series = {category: timeline.category_bytes(category)[event] / GIB for category in STACK}
    reserved = None
    if report is not None:
        reserved = report.in_last_step(report.reserved_bytes, len(high))[event] / GIB
    return TimelineSeries(
        event=event,
        x=x[event],
        unit="event of the step" if event_ms is None else "time in the simulated step (ms)",
        gib={category: values for category, values in series.items() if values.any()},
        total_gib=high[event] / GIB,
        reserved_gib=reserved,
        phases=_phases(timeline, x),
        what=tuple(_what(timeline, int(i)) for i in event),
    )


def _thinned(high: npt.NDArray[np.int64], x: Floats, points: int) -> npt.NDArray[np.int64]:
    """The events to draw, at most `points` of them (but at least four): see the module's docstring."""
    if len(high) <= points:
        return np.arange(len(high))
    buckets = max(points // 4, 1)
    by_number = np.linspace(0, len(high), buckets).astype(np.int64)
    by_time = np.searchsorted(x, np.linspace(x[0], x[-1], buckets))
    edges = np.unique(np.concatenate([by_number, by_time]))
    highest = [a + int(np.argmax(high[a:b])) for a, b in pairwise(edges)]
    return np.unique(np.concatenate([highest, edges[1:] - 1]))


def _what(timeline: MemoryTimeline, event: int) -> What:
    running = running_at(timeline, event)
    module = module_name(timeline.trace, running.module) or "outside of all modules"
    return What(running.op or "between operators", module, running.phase.name.lower())


def _phases(timeline: MemoryTimeline, x: Floats) -> tuple[Stretch, ...]:
    """Stretches of the step, each of one phase and up to the next; phases that are not distinguished are left out."""
    begins: list[tuple[Phase, int]] = []
    for i, event in enumerate(timeline.trace.events):
        if isinstance(event, Op | Collective | ModuleEnter | ModuleExit) and (
            not begins or begins[-1][0] is not event.phase
        ):
            begins.append((event.phase, i))
    ends = [begin for _, begin in begins[1:]] + [len(x) - 1]
    return tuple(
        Stretch(phase, float(x[begin]), float(x[end]))
        for (phase, begin), end in zip(begins, ends, strict=False)
        if phase in PHASES
    )

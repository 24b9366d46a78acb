"""When the host comes to a place in a step, or in a part of one, and when the device does: from an executed simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.runtime_sim import simulate
from autosac.simulation import Simulation
from autosac.trace import Trace


class Mark(NamedTuple):
    """A place in the script: a step, the number of its events that came before, and a stream."""

    step: int
    events: int
    stream: int


@dataclass(frozen=True, slots=True)
class Times:
    """A step, or its beginning: when the host has done with each event, when the device has, and the time of all, in ms.

    `alone`: the device was idle before, so that all are done when the device is.
    """

    host_ms: NDArray[np.float64]
    device_ms: NDArray[np.float64]
    stream: NDArray[np.int32]
    total_ms: float
    alone: bool = False

    def stretched(self, by: float) -> Times:
        """Everything takes longer."""
        return Times(self.host_ms * by, self.device_ms * by, self.stream, self.total_ms * by)

    def host_at(self, events: int) -> float:
        return float(self.host_ms[min(events, len(self.host_ms)) - 1]) if events and len(self.host_ms) else 0.0

    def device_at(self, mark: Mark) -> float:
        """When the stream has done all that was issued to it before; stream -1: when all have."""
        ended = self.device_ms[: mark.events]
        if mark.stream >= 0:
            ended = ended[self.stream[: mark.events] == mark.stream]
        ended = ended[np.isfinite(ended)]
        return float(ended.max()) if ended.size else self.host_at(mark.events)


def steady(simulation: Simulation) -> Times:
    """A step among many like it."""
    rank = simulation.timeline.ranks[simulation.stage]
    first_ms = float(np.nanmin(rank.host_start_ms)) if len(rank.host_start_ms) else 0.0
    return Times(
        np.maximum.accumulate(np.nan_to_num(rank.host_end_ms - first_ms)),
        rank.end_ms - first_ms,
        rank.stream,
        simulation.step_ms,
    )


def alone(simulation: Simulation) -> Times:
    """A step, or a part of it, executed once from an idle device."""
    trace: Trace = simulation.trace
    if not trace.events:
        return Times(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int32), 0.0)
    target = simulation.target
    timeline = simulate(
        [trace],
        [simulation.pricing],
        host=target.host,
        overlap=target.overlap,
        gpus_per_node=target.cluster.gpus_per_node,
        steps=1,
    )
    rank = timeline.ranks[0]
    host_ms = np.maximum.accumulate(np.nan_to_num(rank.host_end_ms))
    return Times(host_ms, rank.end_ms, rank.stream, timeline.makespan_ms, alone=True)

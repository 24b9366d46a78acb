"""From traces and prices to a timeline.

A training job repeats its step, and the host runs ahead of the device. The time that counts is the step's in
that steady state: the trace is executed `steps` times back to back and `makespan_ms` is the difference
between the last two completion times. With T(k) the completion of k steps (max-plus linear in k for a fixed
program), T(k) - T(k-1) tends to the cycle time; two steps already give it exactly for jobs that are bound by
the host or by the device throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.runtime_sim.buffers import Buffers
from autosac.runtime_sim.execute import Problem
from autosac.runtime_sim.host import HostModel, host_costs
from autosac.runtime_sim.overlap import ConstantOverlap, OverlapModel
from autosac.runtime_sim.program import LinkUse, describe
from autosac.runtime_sim.timeline import Timeline, timeline_of
from autosac.trace import Trace


class Priced(Protocol):
    """What the simulator needs of a pricing: device milliseconds per event of the trace."""

    @property
    def event_ms(self) -> NDArray[np.float64]:
        """One finite number, 0 or more, per event."""

    @property
    def link_use(self) -> Mapping[int, LinkUse]:
        """What the collective of an event takes of the links; all of those that it needs where the event is missing."""


def simulate(
    traces: Trace | Sequence[Trace],
    pricings: Priced | Sequence[Priced],
    *,
    host: HostModel | None = None,
    overlap: OverlapModel | None = None,
    gpus_per_node: int = 8,
    steps: int = 2,
    selective_modules: Collection[str] = (),
    buffers: Buffers | None = None,
) -> Timeline:
    """Execute one rank's trace, or those of several distinct ranks together.

    Args:
        traces: a trace, or one for each distinct rank.
        pricings: one for each trace: the duration (ms) of each of its events.
        host: the host model; None: `HostModel()`.
        overlap: how computation and communication slow each other down; None: `ConstantOverlap()`.
        gpus_per_node: consecutive ranks that form a node.
        steps: number of steps to execute, of which the last counts (see the module's docstring).
        selective_modules: modules whose forward runs under selective activation checkpointing, which costs host time for
            every operator.
        buffers: NCCL's for messages from one rank to another, which count where ranks would be deadlocked otherwise; None:
            `Buffers()`.

    Returns:
        When everything ran (ms).

    Raises:
        SimulationError: a trace is empty, a price is not a duration, the ranks do not fit together, or there is a deadlock.
    """
    one = isinstance(traces, Trace)
    sequence: tuple[Trace, ...] = (traces,) if isinstance(traces, Trace) else tuple(traces)
    priced: tuple[Any, ...] = (pricings,) if one else tuple(pricings)  # type: ignore[arg-type]
    if not sequence:
        raise SimulationError("there is no trace to simulate")
    if len(priced) != len(sequence):
        raise SimulationError(f"{len(sequence)} traces need as many pricings, not {len(priced)}")
    if steps < 1 or gpus_per_node < 1:
        raise SimulationError(f"steps ({steps}) and gpus_per_node ({gpus_per_node}) must be at least 1")
    host = host or HostModel()
    selective = _selective(sequence, selective_modules)
    return timeline_of(
        Problem(
            traces=sequence,
            event_ms=tuple(_checked(trace, p.event_ms) for trace, p in zip(sequence, priced, strict=True)),
            host_ms=tuple(host_costs(trace, host, names) for trace, names in zip(sequence, selective, strict=True)),
            link_use=tuple(p.link_use for p in priced),
            host=host,
            overlap=overlap or ConstantOverlap(),
            gpus_per_node=gpus_per_node,
            steps=steps,
            buffers=buffers or Buffers(),
        )
    )


def _checked(trace: Trace, event_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    if not trace.events:
        raise SimulationError("the trace is empty: it has no events")
    times = np.asarray(event_ms, dtype=np.float64)
    if times.shape != (len(trace.events),):
        raise SimulationError(f"the pricing has {times.size} durations, the trace {len(trace.events)} events")
    wrong = np.flatnonzero(~(np.isfinite(times) & (times >= 0)))
    if wrong.size:
        index = int(wrong[0])
        raise SimulationError(f"{describe(trace, index)} is priced at {times[index]} ms, which is not a duration")
    return times


def _selective(traces: Sequence[Trace], modules: Collection[str]) -> list[list[str]]:
    """The selectively checkpointed modules of each trace (every rank has a part of the modules)."""
    present = [[name for name in modules if name in set(trace.modules)] for trace in traces]
    missing = set(modules).difference(*present)
    if missing:
        raise SimulationError(f"no trace has a module named {min(missing)!r}")
    return present

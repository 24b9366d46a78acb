"""Small traces, written event by event with the duration of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from autosac.runtime_sim import INSTANT_HOST, LinkUse, NoInterference, Timeline, simulate
from autosac.trace import (
    Collective,
    Event,
    EventRecord,
    EventWait,
    Group,
    HostWait,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    Region,
    Signature,
    StreamWait,
    TensorMeta,
    Trace,
    WorkWait,
)
from traces import trace_of

DEVICE = TensorMeta((4,), (1,), "float32")
CPU = TensorMeta((4,), (1,), "float32", "cpu")
SIGNATURES = {
    "mm": Signature("aten.mm.default", (DEVICE, DEVICE), (DEVICE,)),
    "view": Signature("aten.view.default", (DEVICE,), (DEVICE,), is_view=True),
    "h2d": Signature("aten._to_copy.default", (CPU,), (DEVICE,)),
    "d2h": Signature("aten.copy_.default", (CPU, DEVICE), (CPU,), mutates=(0,)),
    "item": Signature("aten._local_scalar_dense.default", (DEVICE,), ()),
    "cpu": Signature("aten.add.Tensor", (CPU, CPU), (CPU,)),
    "foreach": Signature("aten._foreach_add_.List", (DEVICE,) * 8, (DEVICE,) * 8),
    "triton": Signature("triton.fused_add", (DEVICE,), (DEVICE,)),
}


class Priced(NamedTuple):
    """The durations of a trace's events."""

    event_ms: NDArray[np.float64]
    link_use: Mapping[int, LinkUse] = MappingProxyType({})


class Job:
    """One rank's trace under construction."""

    def __init__(self, rank: int = 0, groups: tuple[Group, ...] | None = None, **info: Any) -> None:
        self.info = {"rank": rank, **info}
        self.groups = groups or (Group.of("dp", range(2)),)
        self.events: list[Event] = []
        self.prologue: list[Event] = []
        self.ms: list[float] = []
        self.modules = ["", "a", "a.b", "c"]
        self.regions: tuple[Region, ...] = ()
        self.works = 0

    def add(self, event: Event, ms: float = 0.0) -> Job:
        """Append an event that takes `ms` on the device."""
        self.events.append(event)
        self.ms.append(ms)
        return self

    def op(self, ms: float, stream: int = 0, kind: str = "mm", module: int = 0, phase: Phase = Phase.FORWARD) -> Job:
        """Append an operator."""
        return self.add(Op(list(SIGNATURES).index(kind), stream, module, phase, 0, (0,), (1,)), ms)

    def collective(
        self,
        ms: float,
        stream: int = 0,
        kind: str = "all_gather",
        group: int = 0,
        asynchronous: bool = True,
        work: int = -1,
        peer: int = -1,
        batch: int = -1,
        module: int = 0,
        phase: Phase = Phase.FORWARD,
    ) -> Job:
        """Append a collective, send or recv."""
        if work < 0:
            self.works += 1
            work = 1000 + self.works
        return self.add(
            Collective(kind, 64, group, stream, asynchronous, work, peer, batch, 0, module, phase, 0, (0,), (1,)),
            ms,
        )

    def record(self, event: int, stream: int) -> Job:
        """Append an event's record."""
        return self.add(EventRecord(event, stream))

    def wait(self, event: int, stream: int) -> Job:
        """Append a stream's wait for an event."""
        return self.add(EventWait(event, stream))

    def wait_stream(self, stream: int, other: int) -> Job:
        """Append a stream's wait for another."""
        return self.add(StreamWait(stream, other))

    def wait_work(self, work: int, stream: int = 0) -> Job:
        """Append a stream's wait for a collective."""
        return self.add(WorkWait(work, stream))

    def sync(self, stream: int = -1, event: int = -1, reason: str = "device") -> Job:
        """Append a wait of the host."""
        return self.add(HostWait(stream, event, reason))

    def enter(self, module: int, phase: Phase = Phase.FORWARD) -> Job:
        """Append a module's begin."""
        return self.add(ModuleEnter(module, phase))

    def exit(self, module: int, phase: Phase = Phase.FORWARD) -> Job:
        """Append a module's end."""
        return self.add(ModuleExit(module, phase))

    @property
    def trace(self) -> Trace:
        """The trace so far."""
        return trace_of(
            self.events,
            prologue=self.prologue,
            signatures=SIGNATURES.values(),
            modules=self.modules,
            sources=("model.py:1",),
            groups=self.groups,
            regions=self.regions,
            streams=("compute", "gather", "scatter", "copies"),
            **self.info,
        )

    @property
    def priced(self) -> Priced:
        """Its durations."""
        return Priced(np.array(self.ms))


@pytest.fixture(scope="session")
def job() -> type[Job]:
    """The builder of traces."""
    return Job


@pytest.fixture(scope="session")
def run() -> Callable[..., Timeline]:
    """Simulate jobs once, by default with a host that costs nothing and without interference.

    `link_use`: what their transfers take of the links, by event.
    """

    def run(*jobs: Job, **settings: object) -> Timeline:
        defaults = {"host": INSTANT_HOST, "overlap": NoInterference(), "steps": 1}
        use = settings.pop("link_use", {})
        return simulate(
            [j.trace for j in jobs], [j.priced._replace(link_use=use) for j in jobs], **{**defaults, **settings}
        )

    return run

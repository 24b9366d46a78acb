"""A linked program: what the engine executes. Plain data; `linking` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from autosac.trace import Collective, Op, Trace

LANES = 6  # per rank, out and in: its port inside the node, its network adapter, its part of the uplink to other racks


class Engine(IntEnum):
    """The part of the GPU that an item needs. HOST: it needs none."""

    COMPUTE = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    COMMUNICATION = 3
    HOST = 4


class HostPoint(NamedTuple):
    """The host, `cost_ms` after the point before: issues `item`, or (if -1) waits for the items `waits`, then
    pays `sync_ms`.
    """

    cost_ms: float
    item: int
    waits: tuple[int, ...]
    sync_ms: float
    event: int


class LinkUse(NamedTuple):
    """What a transfer that runs alone takes of its ranks' links: shares (0 to 1) of the port inside the node, of the network
    adapter and of the uplink. `rate`: how fast its flows are then, on a scale that all transfers share (GB/s).
    """

    port: float = 0.0
    adapter: float = 0.0
    uplink: float = 0.0
    rate: float = 1.0


WHOLE_PORT, WHOLE_ADAPTER = LinkUse(port=1.0), LinkUse(adapter=1.0)
"""Of collective models that do not say: a transfer takes all of the links that it needs."""


class Transfer(NamedTuple):
    """What its members do together. `uses`: what it takes of each lane at a rate of 1, `limit` the rate that it has alone;
    `missing` the ranks that never join; `after_start` the item of another rank that has to have started, or -1.
    """

    members: tuple[int, ...]
    ms: float
    uses: dict[int, float]
    limit: float
    ranks: tuple[int, ...]
    slowdown: float
    inter_node: bool
    label: str
    missing: tuple[int, ...]
    after_start: int = -1


class Leg(NamedTuple):
    """One event of a communication item, and the transfer that carries it."""

    event: int
    transfer: int


@dataclass(slots=True)
class Program:
    """The linked program. Per item: rank and stream (by position), event, step, engine, duration,
    dependencies, slowdowns.

    `slowdowns` are the (intra-node, inter-node) factors of a computation kernel. `stream_names` are per rank;
    `points` the hosts' work per rank; `step_ends` the positions in `points` where a host has issued a step.
    """

    ranks: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    dependencies: list[tuple[int, ...]] = field(default_factory=list)
    slowdowns: list[tuple[float, float]] = field(default_factory=list)
    legs: dict[int, list[Leg]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    points: list[list[HostPoint]] = field(default_factory=list)
    step_ends: list[list[int]] = field(default_factory=list)
    stream_names: list[list[str]] = field(default_factory=list)


def describe(trace: Trace, index: int) -> str:
    """An event in words: operator or collective, module, source line."""
    event = trace.events[index]
    if type(event) is Op:
        what = trace.signatures[event.signature].name
    elif type(event) is Collective:
        what = event.kind + (
            f" {'to' if event.kind == 'send' else 'from'} rank {event.peer}" if event.peer >= 0 else ""
        )
    else:
        return f"{type(event).__name__} (event {index})"
    module = trace.modules[event.module] if 0 <= event.module < len(trace.modules) else ""
    source = trace.sources[event.source] if 0 <= event.source < len(trace.sources) else ""
    return f"{what} (event {index}" + f", module {module!r}" * bool(module) + f", {source}" * bool(source) + ")"

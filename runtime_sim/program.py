"""Traces, linked into one static program: device items, what each of them waits for, and what each host does.

Everything that streams and events express is known before any duration is, because each host issues in a
fixed order. Every stream has a *frontier*, the items that whatever is enqueued next must wait for: a vector
clock with at most one item per stream, since a stream is a FIFO. With `F[s]` the frontier of stream `s`
(TorchSim Table 8)::

    Op on s                     item i waits for F[s];             F[s] := {s: i}
    EventRecord(e, s)           E[e] := F[s]
    EventWait(e, s)             F[s] := F[s] | E[e]
    StreamWait(s, o)            F[s] := F[s] | F[o]
    Collective, synchronous     like an Op on s
    Collective, asynchronous    item i waits for F[g] | F[s];      F[g] := {g: i};  W[work] := {g: i}
    WorkWait(w, s)              F[s] := F[s] | W[w]                (the host goes on)
    HostWait                    the host waits for F[stream], E[event], or every F

`g` is the stream of the collective's process group; a single send or recv has one per pair of ranks, as NCCL
does, and transfers of one batch (batch_isend_irecv) are one item. Between ranks, items meet in *transfers*
(Maya's waitmap): the k-th collective of a group on every simulated rank of that group, the k-th send with the
k-th recv of a pair. A transfer lasts as long as the slowest of its members says. Ranks that are not simulated
are never waited for.

An event or work that only an earlier step completed (it is recorded later in the step, or in the prologue)
does not make anybody wait. One that nothing ever completes is a SimulationError, since CUDA would not wait
where the job means it to.

Index into the code: `link` drives one `_Rank` per trace; `_classify` derives an operator's engine from its
signature.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.runtime_sim.overlap import OverlapModel
from autosac.trace import (
    Collective,
    Event,
    EventRecord,
    EventWait,
    Group,
    HostWait,
    Op,
    Signature,
    StreamWait,
    Trace,
    WorkWait,
)

Frontier = dict[int, int]


class Engine(IntEnum):
    """The part of the GPU that an item needs. HOST: it needs none."""

    COMPUTE = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    COMMUNICATION = 3
    HOST = 4


class Point(NamedTuple):
    """The host, `cost_ms` after the point before: issues `item`, or (if -1) waits for the items `waits`, then
    pays `sync_ms`.
    """

    cost_ms: float
    item: int
    waits: tuple[int, ...]
    sync_ms: float
    event: int


class Transfer(NamedTuple):
    """What its members do together. `lanes` are the link directions it loads; `missing` the ranks that never
    join.
    """

    members: tuple[int, ...]
    ms: float
    lanes: tuple[int, ...]
    ranks: tuple[int, ...]
    slowdown: float
    inter_node: bool
    label: str
    missing: tuple[int, ...]


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
    points: list[list[Point]] = field(default_factory=list)
    step_ends: list[list[int]] = field(default_factory=list)
    stream_names: list[list[str]] = field(default_factory=list)


_RELEVANT = {Op, Collective, EventRecord, EventWait, StreamWait, WorkWait, HostWait}
LANES = 4  # per rank: out and in, inside the node; out and in, between nodes


def _classify(signature: Signature) -> Engine:
    """The engine of an operator that launches work: a copy engine if it moves data between host and device,
    else compute.
    """
    written = {meta.place for meta in signature.outputs}
    written |= {signature.inputs[i].place for i in signature.mutates}
    read = {meta.place for i, meta in enumerate(signature.inputs) if i not in signature.mutates}
    if signature.name.startswith("aten._local_scalar_dense") and read == {"device"}:
        return Engine.DEVICE_TO_HOST
    if "device" not in read | written:
        return Engine.HOST
    if read == {"cpu"} and written == {"device"}:
        return Engine.HOST_TO_DEVICE
    if read == {"device"} and written == {"cpu"}:
        return Engine.DEVICE_TO_HOST
    return Engine.COMPUTE


def _streams(event: Event) -> tuple[int, ...]:
    """The streams that an event names."""
    return getattr(event, "stream", -1), getattr(event, "other", -1)


def _merge(into: Frontier, other: Frontier) -> None:
    for stream, item in other.items():
        if into.get(stream, -1) < item:
            into[stream] = item


class _Pending(NamedTuple):
    """A transfer that is being collected: what each rank that takes part brings to it."""

    expected: tuple[int, ...]
    label: str
    members: dict[int, tuple[int, float, str]]  # rank position -> (item, ms, kind)
    inter_node: bool
    slots: list[tuple[int, int]]  # (item, position in its legs)


class _Linker:
    """Collects transfers across ranks while they are linked one after the other."""

    def __init__(self, program: Program, ranks: list[int], gpus_per_node: int, overlap: OverlapModel) -> None:
        self.program = program
        self.position = {rank: i for i, rank in enumerate(ranks)}
        self.gpus_per_node = gpus_per_node
        self.overlap = overlap
        self.pending: dict[tuple[object, ...], _Pending] = {}
        self._local = itertools.count()

    def join(
        self, key: tuple[object, ...], expected: tuple[int, ...], label: str, inter_node: bool, rank: int,
        item: int, ms: float, event: int, kind: str,
    ) -> None:  # fmt: skip
        """`rank` brings `item` to the transfer `key`; alone there if fewer than two `expected` ranks are
        simulated.
        """
        if len(expected) < 2:
            key, expected = ("local", next(self._local)), (rank,)
        transfer = self.pending.setdefault(key, _Pending(expected, label, {}, inter_node, []))
        legs = self.program.legs.setdefault(item, [])
        transfer.members[rank] = (item, ms, kind)
        transfer.slots.append((item, len(legs)))
        legs.append(Leg(event, -1))
        self._check(transfer, rank, kind)

    def _check(self, transfer: _Pending, rank: int, kind: str) -> None:
        other, (_, _, first) = next(iter(transfer.members.items()))
        if kind != first and {kind, first} != {"send", "recv"}:
            ranks = self.program.ranks
            raise SimulationError(
                f"{transfer.label}: rank {ranks[rank]} issues {kind} where rank {ranks[other]} issues {first}"
            )

    def finish(self) -> None:
        """Turn what was collected into the program's transfers."""
        for pending in self.pending.values():
            number = len(self.program.transfers)
            for item, slot in pending.slots:
                legs = self.program.legs[item]
                legs[slot] = legs[slot]._replace(transfer=number)
            self.program.transfers.append(self._transfer(pending))

    def _transfer(self, pending: _Pending) -> Transfer:
        lanes = []
        for rank, (_, _, kind) in pending.members.items():
            base = rank * LANES + (2 if pending.inter_node else 0)
            lanes += [base] * (kind != "recv") + [base + 1] * (kind != "send")
        kinds = [kind for _, _, kind in pending.members.values()]
        return Transfer(
            members=tuple(item for item, _, _ in pending.members.values()),
            ms=max(ms for _, ms, _ in pending.members.values()),
            lanes=tuple(lanes),
            ranks=tuple(pending.members),
            slowdown=max(self.overlap.communication_slowdown(kind, pending.inter_node) for kind in kinds),
            inter_node=pending.inter_node,
            label=pending.label,
            missing=tuple(rank for rank in pending.expected if rank not in pending.members),
        )


class _Communicator(NamedTuple):
    """A process group as the simulation sees it: its simulated ranks (positions) and whether it leaves the
    node.
    """

    key: tuple[object, ...]
    simulated: tuple[int, ...]
    inter_node: bool


class _Rank:
    """Links one rank's trace, step after step. See the module's docstring for the rules."""

    def __init__(self, linker: _Linker, position: int, trace: Trace, event_ms: NDArray[np.float64]) -> None:
        self.linker = linker
        self.program = linker.program
        self.position = position
        self.trace = trace
        self.ms: list[float] = event_ms.tolist()
        self.engines = [Engine.HOST if s.is_view else _classify(s) for s in trace.signatures]
        model = linker.overlap
        self.slowdowns = [(model.compute_slowdown(s, False), model.compute_slowdown(s, True)) for s in trace.signatures]
        self.relevant = [(i, event) for i, event in enumerate(trace.events) if type(event) in _RELEVANT]
        used = 1 + max((max(_streams(event)) for _, event in self.relevant), default=0)
        self.streams = [*trace.streams, *(f"stream {i}" for i in range(len(trace.streams), used))]
        self.own: dict[tuple[int, int], int] = {}  # (group, peer or -1) -> stream
        self.frontiers: dict[int, Frontier] = {}
        self.events: dict[int, Frontier] = {}
        self.works: dict[int, Frontier] = {}
        self.sequence: dict[tuple[object, ...], int] = {}
        self.communicators: dict[int, _Communicator] = {}
        self.batch: tuple[int, int, int] | None = None  # (batch id, item, stream) of the batch being collected
        self.points: list[Point] = []
        before = [(-1, event) for event in trace.prologue]
        self.known = {e.event for _, e in (*before, *self.relevant) if type(e) is EventRecord}
        self.known_works = {e.work for _, e in (*before, *self.relevant) if type(e) is Collective}

    def frontier(self, stream: int) -> Frontier:
        """What the next item on `stream` waits for."""
        return self.frontiers.setdefault(stream, {})

    def link_step(self, step: int, costs_ms: NDArray[np.float64]) -> None:
        """Append the whole trace once more."""
        elapsed = [0.0, *np.cumsum(costs_ms).tolist()]
        before = 0.0
        views = [signature.is_view for signature in self.trace.signatures]
        for index, event in self.relevant:
            kind = type(event)
            if kind is Op:
                if views[event.signature]:  # type: ignore[union-attr]
                    continue
                item = self._op(index, event, step)  # type: ignore[arg-type]
                if item < 0:
                    continue
                now = elapsed[index + 1]
                self.points.append(Point(now - before, item, (), 0.0, index))
                before = now
            elif kind is Collective:
                item, joined = self._collective(index, event, step)  # type: ignore[arg-type]
                now = elapsed[index + 1]
                if joined:  # the batch is launched when its last transfer has been issued
                    last = self.points[-1]
                    self.points[-1] = last._replace(cost_ms=last.cost_ms + now - before, event=index)
                else:
                    self.points.append(Point(now - before, item, (), 0.0, index))
                before = now
            elif kind is HostWait:
                waits = self._host_wait(index, event)  # type: ignore[arg-type]
                self.points.append(Point(elapsed[index] - before, -1, waits, float(costs_ms[index]), index))
                before = elapsed[index + 1]
            else:
                self._synchronise(index, event)
        self.batch = None
        self.points.append(Point(elapsed[-1] - before, -1, (), 0.0, len(self.trace.events)))
        self.program.step_ends[self.position].append(len(self.points) - 1)

    def _add(self, index: int, step: int, stream: int, engine: int, ms: float, after: Frontier,
             slowdowns: tuple[float, float]) -> int:  # fmt: skip
        program = self.program
        item = len(program.ms)
        program.rank.append(self.position)
        program.stream.append(stream)
        program.event.append(index)
        program.step.append(step)
        program.engine.append(engine)
        program.ms.append(ms)
        program.dependencies.append(tuple(after.values()))
        program.slowdowns.append(slowdowns)
        self.frontiers[stream] = {stream: item}
        return item

    def _op(self, index: int, op: Op, step: int) -> int:
        engine = self.engines[op.signature]
        if engine == Engine.HOST:
            if self.ms[index] == 0:
                return -1
            engine = Engine.COMPUTE
        self.batch = None
        after = self.frontier(op.stream)
        return self._add(index, step, op.stream, engine, self.ms[index], after, self.slowdowns[op.signature])

    def _collective(self, index: int, event: Collective, step: int) -> tuple[int, bool]:
        after = self.frontier(event.stream)
        if self.batch is not None and event.batch >= 0 and self.batch[0] == event.batch:
            _, item, stream = self.batch
            extra = {s: i for s, i in after.items() if i != item}
            self.program.dependencies[item] = tuple({*self.program.dependencies[item], *extra.values()})
            joined = True
        else:
            stream, joined = event.stream, False
            if event.asynchronous:
                stream = self._own_stream(event)
                after = dict(after)
                _merge(after, self.frontier(stream))
            item = self._add(index, step, stream, Engine.COMMUNICATION, 0.0, after, (1.0, 1.0))
            self.batch = (event.batch, item, stream) if event.batch >= 0 else None
        self.works[event.work] = {stream: item}
        self._join(index, event, item)
        return item, joined

    def _own_stream(self, event: Collective) -> int:
        alone = event.peer >= 0 and event.batch < 0
        key = (event.group, event.peer if alone else -1)
        if key not in self.own:
            name = self.trace.groups[event.group].name + (f" with {event.peer}" if alone else "")
            self.own[key] = len(self.streams)
            self.streams.append(f"group {name}")
        return self.own[key]

    def _communicator(self, group: int) -> _Communicator:
        if group not in self.communicators:
            self.communicators[group] = _communicator(
                self.trace.groups[group], self.linker.position, self.linker.gpus_per_node
            )
        return self.communicators[group]

    def _join(self, index: int, event: Collective, item: int) -> None:
        communicator = self._communicator(event.group)
        name = self.trace.groups[event.group].name
        inter_node, expected = communicator.inter_node, communicator.simulated
        key: tuple[object, ...] = communicator.key
        label = f"group {name!r}"
        if event.peer >= 0:
            me, peer = self.program.ranks[self.position], event.peer
            pair = (me, peer) if event.kind == "send" else (peer, me)
            there = self.linker.position.get(peer)
            expected = (self.position,) if there in (None, self.position) else (self.position, there)
            gpus = self.linker.gpus_per_node
            inter_node = me // gpus != peer // gpus
            key = (*key, *pair)
            label += f", rank {pair[0]} to rank {pair[1]}"
        number = self.sequence[key] = self.sequence.get(key, -1) + 1
        self.linker.join(
            (*key, number), expected, f"{event.kind} number {number} of {label}", inter_node, self.position,
            item, self.ms[index], index, event.kind,
        )  # fmt: skip

    def _synchronise(self, index: int, event: Event) -> None:
        kind = type(event)
        if kind is EventRecord:
            self.events[event.event] = dict(self.frontier(event.stream))  # type: ignore[union-attr]
        elif kind is EventWait:
            other = self._event(index, event.event, event.stream)  # type: ignore[union-attr]
            _merge(self.frontier(event.stream), other)  # type: ignore[union-attr]
        elif kind is StreamWait:
            _merge(self.frontier(event.stream), self.frontier(event.other))  # type: ignore[union-attr]
        elif kind is WorkWait:
            work = event.work  # type: ignore[union-attr]
            if work not in self.known_works:
                raise self._never(index, event.stream, f"work {work}", "collective starts it")  # type: ignore[union-attr]
            _merge(self.frontier(event.stream), self.works.get(work, {}))  # type: ignore[union-attr]

    def _event(self, index: int, event: int, stream: int) -> Frontier:
        if event not in self.known:
            raise self._never(index, stream, f"event {event}", "operator's end is recorded in it")
        return self.events.get(event, {})

    def _host_wait(self, index: int, event: HostWait) -> tuple[int, ...]:
        if event.event >= 0:
            return tuple(self._event(index, event.event, -1).values())
        if event.stream >= 0:
            return tuple(self.frontier(event.stream).values())
        everything: Frontier = {}
        for other in self.frontiers.values():
            _merge(everything, other)
        return tuple(everything.values())

    def _never(self, index: int, stream: int, what: str, why: str) -> SimulationError:
        who = "the host" if stream < 0 else f"stream {self.streams[stream]!r}"
        behind = next(
            (describe(self.trace, i) for i in range(index, len(self.trace.events))
             if type(self.trace.events[i]) is Op and (stream < 0 or self.trace.events[i].stream == stream)),  # type: ignore[union-attr]
            "nothing",
        )  # fmt: skip
        return SimulationError(
            f"deadlock on rank {self.program.ranks[self.position]}: {who} waits for {what} at event {index} "
            f"of the trace, but no {why}, in this step or before it; {behind} would come next"
        )


def _communicator(group: Group, position: dict[int, int], gpus_per_node: int) -> _Communicator:
    if group.explicit:
        first, last = min(group.explicit), max(group.explicit)
    else:
        spans = [(size - 1) * stride for size, stride in group.dims]
        first = group.offset + sum(span for span in spans if span < 0)
        last = group.offset + sum(span for span in spans if span > 0)
    members = frozenset(group.ranks()) if len(position) > 1 else frozenset[int]()
    simulated = tuple(i for rank, i in position.items() if rank in members)
    return _Communicator((group.name, members), simulated, first // gpus_per_node != last // gpus_per_node)


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


def link(
    traces: Sequence[Trace],
    event_ms: Sequence[NDArray[np.float64]],
    host_ms: Sequence[NDArray[np.float64]],
    *,
    steps: int,
    gpus_per_node: int,
    overlap: OverlapModel,
) -> Program:
    """Link the ranks' traces, each repeated `steps` times. SimulationError for an event that never comes."""
    program = Program()
    program.ranks = [int(trace.info.get("rank", i)) for i, trace in enumerate(traces)]
    if len(set(program.ranks)) < len(program.ranks):
        raise SimulationError(f"two of the traces are of the same rank: {program.ranks}")
    linker = _Linker(program, program.ranks, gpus_per_node, overlap)
    for position, trace in enumerate(traces):
        program.step_ends.append([])
        rank = _Rank(linker, position, trace, event_ms[position])
        for step in range(steps):
            rank.link_step(step, host_ms[position])
        program.points.append(rank.points)
        program.stream_names.append(rank.streams)
    linker.finish()
    return program

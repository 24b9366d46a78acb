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

Index into the code: `link` drives one `_Rank` per trace, `Rendezvous` collects the transfers, `_classify` derives
an operator's engine from its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.runtime_sim.buffers import Buffers
from autosac.runtime_sim.overlap import OverlapModel
from autosac.runtime_sim.program import Engine, HostPoint, LinkUse, Program, describe
from autosac.runtime_sim.rendezvous import Rendezvous
from autosac.trace import (
    ALONE,
    Collective,
    Event,
    EventRecord,
    EventWait,
    HostWait,
    Op,
    Signature,
    StreamWait,
    Trace,
    WorkWait,
)

Frontier = dict[int, int]
_point: Callable[[tuple[object, ...]], HostPoint] = partial(tuple.__new__, HostPoint)  # twice as fast as the class
_RELEVANT = {Op, Collective, EventRecord, EventWait, StreamWait, WorkWait, HostWait}


def link(
    traces: Sequence[Trace],
    event_ms: Sequence[NDArray[np.float64]],
    host_ms: Sequence[NDArray[np.float64]],
    link_use: Sequence[Mapping[int, LinkUse]],
    *,
    steps: int,
    gpus_per_node: int,
    overlap: OverlapModel,
    buffers: Buffers | None = None,
) -> Program:
    """Link the ranks' traces, each repeated `steps` times. SimulationError for an event that never comes.

    `buffers`: see `Rendezvous`.
    """
    program = Program(ranks=[trace.info.rank for trace in traces])
    if len(set(program.ranks)) < len(program.ranks):
        raise SimulationError(f"two of the traces are of the same rank: {program.ranks}")
    rendezvous = Rendezvous(program, gpus_per_node, overlap, buffers)
    for position, trace in enumerate(traces):
        rank = _Rank(program, rendezvous, position, trace, event_ms[position], link_use[position], overlap)
        for step in range(steps):
            rank.link_step(step, host_ms[position])
        program.points.append(rank.points)
        program.step_ends.append(rank.step_ends)
        program.stream_names.append(rank.streams)
    rendezvous.finish()
    return program


class _Rank:
    """Links one rank's trace, step after step. See the module's docstring for the rules."""

    def __init__(
        self,
        program: Program,
        rendezvous: Rendezvous,
        position: int,
        trace: Trace,
        event_ms: NDArray[np.float64],
        link_use: Mapping[int, LinkUse],
        overlap: OverlapModel,
    ) -> None:
        self.program, self.rendezvous, self.position, self.trace = program, rendezvous, position, trace
        self.ms: list[float] = event_ms.tolist()
        self.link_use = link_use
        self.engines = [_classify(signature) for signature in trace.signatures]
        self.slowdowns = [
            (overlap.compute_slowdown(s, False), overlap.compute_slowdown(s, True)) for s in trace.signatures
        ]
        self.relevant = [(i, event) for i, event in enumerate(trace.events) if type(event) in _RELEVANT]
        self.linked = self._launching()
        others = {event.other for _, event in self.relevant if type(event) is StreamWait}
        used = 1 + max({getattr(event, "stream", -1) for _, event in self.relevant} | others, default=0)
        self.streams = [*trace.streams, *(f"stream {i}" for i in range(len(trace.streams), used))]
        self.own: dict[tuple[int, int], int] = {}  # (group, peer or -1) -> stream
        self.frontiers: dict[int, Frontier] = {}
        self.events: dict[int, Frontier] = {}
        self.works: dict[int, Frontier] = {}
        self.batch: tuple[int, int] | None = None  # (batch id, item) of the batch that is being collected
        self.points: list[HostPoint] = []
        self.step_ends: list[int] = []
        everything = (*trace.prologue, *(event for _, event in self.relevant))
        self.recorded = {event.event for event in everything if type(event) is EventRecord}
        self.started = {event.work for event in everything if type(event) is Collective}

    def _launching(self) -> list[tuple[int, Event]]:
        """What of the relevant events is something: no view, and no operator of the host that takes no time."""
        ms, views = self.ms, [signature.is_view for signature in self.trace.signatures]
        on_host = [engine == Engine.HOST for engine in self.engines]
        return [
            (i, event)
            for i, event in self.relevant
            if type(event) is not Op or not (views[k := event.signature] or (on_host[k] and ms[i] == 0))
        ]

    def link_step(self, step: int, costs_ms: NDArray[np.float64]) -> None:
        """Append the whole trace once more. Operators, which are most of it, are added right here, which is faster."""
        issued = [0.0, *np.cumsum(costs_ms).tolist()]
        before = 0.0
        program, ms, slowdowns, frontiers = self.program, self.ms, self.slowdowns, self.frontiers
        engines = [Engine.COMPUTE if engine == Engine.HOST else engine for engine in self.engines]
        first, points = len(program.ms), self.points
        on, of, using = program.stream.append, program.event.append, program.engine.append
        taking, after_these, slowed = program.ms.append, program.dependencies.append, program.slowdowns.append
        issuing, item = points.append, first
        for index, event in self.linked:
            if type(event) is Op:
                stream, signature, item = event.stream, event.signature, len(program.ms)
                on(stream)
                of(index)
                using(engines[signature])
                taking(ms[index])
                after = frontiers.get(stream)
                after_these(tuple(after.values()) if after else ())
                slowed(slowdowns[signature])
                frontiers[stream] = {stream: item}
                self.batch = None
                issuing(_point((issued[index + 1] - before, item, (), 0.0, index)))
            elif type(event) is Collective:
                joined = self._collective(index, event)
                cost_ms = issued[index + 1] - before
                if joined:  # the batch is launched when its last transfer has been issued
                    last = points[-1]
                    points[-1] = last._replace(cost_ms=last.cost_ms + cost_ms, event=index)
                else:
                    points.append(HostPoint(cost_ms, len(program.ms) - 1, (), 0.0, index))
            elif type(event) is HostWait:
                waits = tuple(self._host_wait(index, event).values())
                points.append(HostPoint(issued[index] - before, -1, waits, float(costs_ms[index]), index))
            else:
                self._synchronise(index, event)
                continue
            before = issued[index + 1]
        self.batch = None
        count = len(program.ms) - first
        program.rank += [self.position] * count
        program.step += [step] * count
        self.step_ends.append(len(points))
        points.append(HostPoint(issued[-1] - before, -1, (), 0.0, len(self.trace.events)))

    def _frontier(self, stream: int) -> Frontier:
        return self.frontiers.setdefault(stream, {})

    def _add(self, index: int, stream: int, after: Frontier) -> int:
        """A transfer as a new item on `stream`, which is from now on what the stream's next one waits for."""
        program = self.program
        item = len(program.ms)
        program.stream.append(stream)
        program.event.append(index)
        program.engine.append(Engine.COMMUNICATION)
        program.ms.append(0.0)
        program.dependencies.append(tuple(after.values()))
        program.slowdowns.append((1.0, 1.0))
        self.frontiers[stream] = {stream: item}
        return item

    def _collective(self, index: int, event: Collective) -> bool:
        """Whether it joined the newest item, whose batch it belongs to; else it is a new item."""
        after = self._frontier(event.stream)
        joined = self.batch is not None and event.batch >= 0 and self.batch[0] == event.batch
        if joined:
            assert self.batch is not None
            item = self.batch[1]
            dependencies = {*self.program.dependencies[item], *after.values()} - {item}
            self.program.dependencies[item] = tuple(sorted(dependencies))
        else:
            stream = event.stream
            if event.asynchronous:
                stream = self._own_stream(event)
                after = dict(after)
                _merge(after, self._frontier(stream))
            item = self._add(index, stream, after)
            self.batch = (event.batch, item) if event.batch >= 0 else None
        self.works[event.work] = {self.program.stream[item]: item}
        self.rendezvous.join(self.position, self.trace, index, item, self.ms[index], self.link_use.get(index))
        return joined

    def _own_stream(self, event: Collective) -> int:
        """The stream of the collective's group, or of the pair of ranks for a single send or recv."""
        peer = event.peer if event.batch == ALONE else -1
        if (event.group, peer) not in self.own:
            self.own[event.group, peer] = len(self.streams)
            name = f"group {self.trace.groups[event.group].name}"
            self.streams.append(name if peer < 0 else f"{name} with {peer}")
        return self.own[event.group, peer]

    def _synchronise(self, index: int, event: Event) -> None:
        if type(event) is EventRecord:
            self.events[event.event] = dict(self._frontier(event.stream))
        elif type(event) is EventWait:
            _merge(self._frontier(event.stream), self._event(index, event.event, event.stream))
        elif type(event) is StreamWait:
            _merge(self._frontier(event.stream), self._frontier(event.other))
        elif type(event) is WorkWait:
            if event.work not in self.started:
                raise self._never(index, event.stream, f"work {event.work}", "collective starts it")
            _merge(self._frontier(event.stream), self.works.get(event.work, {}))

    def _event(self, index: int, event: int, stream: int) -> Frontier:
        if event not in self.recorded:
            raise self._never(index, stream, f"event {event}", "operator's end is recorded in it")
        return self.events.get(event, {})

    def _host_wait(self, index: int, event: HostWait) -> Frontier:
        if event.event >= 0:
            return self._event(index, event.event, -1)
        if event.stream >= 0:
            return self._frontier(event.stream)
        everything: Frontier = {}
        for other in self.frontiers.values():
            _merge(everything, other)
        return everything

    def _never(self, index: int, stream: int, what: str, why: str) -> SimulationError:
        """The error for a wait (of the host if `stream` is -1) that nothing ever ends."""
        who = "the host" if stream < 0 else f"stream {self.streams[stream]!r}"
        behind = next(
            (i for i, event in self.relevant if i > index and type(event) is Op and stream in (-1, event.stream)), None
        )
        coming = "nothing" if behind is None else describe(self.trace, behind)
        return SimulationError(
            f"deadlock on rank {self.program.ranks[self.position]}: {who} waits for {what} at event {index} of the "
            f"trace, but no {why}, in this step or before it; {coming} would come next"
        )


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


def _merge(into: Frontier, other: Frontier) -> None:
    for stream, item in other.items():
        if into.get(stream, -1) < item:
            into[stream] = item

"""Executes Chakra traces with the engine of `runtime_sim`: what AutoSAC wrote takes the step time that it had.

Nodes of the CPU are the host's work, in the order of the file; a node of the device is launched by the last of those that it
waits for. Collectives meet by group (``pg_name``, else all ranks) and how many the rank has issued on it before, a send meets
the receive of the same ``comm_src``, ``comm_dst`` and ``comm_tag``; a transfer takes as long as its slowest member says.
Traces of other programs lack what AutoSAC notes besides: then kernels do not slow each other down, launches take no time,
and all transfers stay inside a node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autosac.chakra.read import ChakraTrace, Graph, GraphNode
from autosac.chakra.schema import COMPUTE, MEMORY_LOAD, MEMORY_STORE, NODE_TYPES, RECV, SEND
from autosac.errors import TraceError
from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.program import (
    WHOLE_ADAPTER,
    WHOLE_PORT,
    Engine,
    HostPoint,
    Leg,
    LinkUse,
    Program,
    Transfer,
)
from autosac.runtime_sim.rendezvous import uses_of

_ENGINES = {MEMORY_LOAD: Engine.HOST_TO_DEVICE, MEMORY_STORE: Engine.DEVICE_TO_HOST}
_COPIES = {engine.name.lower(): engine for engine in _ENGINES.values()}
_DEPTH = 1 << 60
_MOST_STREAMS = 4096
Key = tuple[object, ...]


class Replayed(NamedTuple):
    """`step_ms`: from the first launch to the end of everything. Sums of durations for each rank (ms): `compute_ms`,
    `communication_ms`, `host_ms`. `nodes`: how many of each type.
    """

    step_ms: float
    ranks: tuple[int, ...]
    compute_ms: tuple[float, ...]
    communication_ms: tuple[float, ...]
    host_ms: tuple[float, ...]
    nodes: dict[str, int]


@dataclass
class _Meeting:
    """A transfer under construction. `expected`: the ranks that take part; `members`: rank's position, item, node."""

    expected: tuple[int, ...] = ()
    members: list[tuple[int, int, GraphNode]] = field(default_factory=list)


def replay(trace: ChakraTrace) -> Replayed:
    """Execute all ranks together. TraceError if they wait for each other for ever, or a send's receive is missing."""
    program = Program(ranks=[graph.rank for graph in trace.graphs])
    meetings: dict[Key, _Meeting] = {}
    for position, graph in enumerate(trace.graphs):
        _Linker(program, meetings, position, graph, trace).link()
    for meeting in meetings.values():
        _join(program, meeting)
    about = trace.graphs[0].about
    depth = max(1, int(_number(about, "queue_depth", _DEPTH)))
    execution = Execution(program, _number(about, "launch_latency_us", 0.0) / 1e3, depth)
    if not execution.run():
        stuck = next((i for i, end in enumerate(execution.end) if end < 0), None)
        what = (
            "a host" if stuck is None else f"node {program.event[stuck]} of rank {program.ranks[program.rank[stuck]]}"
        )
        raise TraceError(f"the traces do not fit together: {what} waits for something that never comes")
    ends = [*execution.end, *(times[-1] for times in execution.resume if times)]
    graphs = trace.graphs
    return Replayed(
        step_ms=max(ends, default=0.0),
        ranks=tuple(program.ranks),
        compute_ms=tuple(_sum(graph, lambda n: n.type == COMPUTE and not n.on_host) for graph in graphs),
        communication_ms=tuple(_sum(graph, lambda n: n.communicates) for graph in graphs),
        host_ms=tuple(_sum(graph, lambda n: n.on_host) for graph in graphs),
        nodes=dict(Counter(_type_name(node) for graph in graphs for node in graph.nodes)),
    )


def _sum(graph: Graph, chosen: Any) -> float:
    return sum(node.ms for node in graph.nodes if chosen(node))


def _type_name(node: GraphNode) -> str:
    return "host" if node.on_host else NODE_TYPES[node.type]


def _number(attributes: Any, name: str, default: float) -> float:
    value = attributes.get(name, default)
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else default


class _Linker:
    """Makes items and the host's points of one rank's nodes."""

    def __init__(
        self, program: Program, meetings: dict[Key, _Meeting], position: int, graph: Graph, trace: ChakraTrace
    ) -> None:
        self.program, self.meetings, self.position, self.graph, self.trace = program, meetings, position, graph, trace
        self.items: dict[int, int] = {}  # of device nodes
        self.place: dict[int, int] = {}  # of host nodes, in the host's order
        self.issued: Counter[Key] = Counter()
        self.streams = 1

    def link(self) -> None:
        launched: dict[int, list[int]] = {}
        hosts: list[GraphNode] = []
        for node in self.graph.nodes:
            if node.on_host:
                self.place[node.id] = len(hosts)
                hosts.append(node)
                continue
            item = self._item(node)
            launched.setdefault(max((self.place[d] for d in node.deps if d in self.place), default=-1), []).append(item)
        points = [HostPoint(0.0, item, (), 0.0, 0) for item in launched.get(-1, ())]
        for place, node in enumerate(hosts):
            waits = tuple(self.items[dep] for dep in node.deps if dep in self.items)
            points.append(HostPoint(0.0 if waits else node.ms, -1, waits, node.ms if waits else 0.0, node.id))
            points += [HostPoint(0.0, item, (), 0.0, node.id) for item in launched.get(place, ())]
        self.program.points.append(points)
        self.program.step_ends.append([len(points)])
        self.program.stream_names.append([str(stream) for stream in range(self.streams)])

    def _item(self, node: GraphNode) -> int:
        program, item = self.program, len(self.program.ms)
        stream = min(int(_number(node.attributes, "stream", float(node.communicates))), _MOST_STREAMS)
        self.streams = max(self.streams, stream + 1)
        self.items[node.id] = item
        program.rank.append(self.position)
        program.stream.append(stream)
        program.event.append(node.id)
        program.step.append(0)
        program.engine.append(_engine(node))
        program.ms.append(0.0 if node.communicates else node.ms)
        program.dependencies.append(tuple(self.items[dep] for dep in node.deps if dep in self.items))
        slowdowns = (_slowdown(node, "slowdown_intra"), _slowdown(node, "slowdown_inter"))
        program.slowdowns.append(slowdowns)
        if node.communicates:
            program.legs[item] = [Leg(node.id, -1)]
            key, ranks = self._meeting(node)
            self.meetings.setdefault(key, _Meeting(ranks)).members.append((self.position, item, node))
        return item

    def _meeting(self, node: GraphNode) -> tuple[Key, tuple[int, ...]]:
        """The identity of the transfer, and the ranks that take part in it."""
        if node.type in (SEND, RECV):
            source, target, tag = (node.attributes.get(f"comm_{name}") for name in ("src", "dst", "tag"))
            key: Key = ("pair", node.attributes.get("pg_name"), source, target, tag)
            own = (*key, node.type)
            self.issued[own] += 1
            ranks = tuple(rank for rank in (source, target) if isinstance(rank, int))
            return (*key, self.issued[own]), ranks
        name = node.attributes.get("pg_name", "")
        key, ranks = ("group", name), self.trace.groups.get(name, tuple(self.program.ranks))
        if self.graph.rank not in ranks:
            raise TraceError(f"rank {self.graph.rank} takes part in group {name!r}, of which it is not a member")
        self.issued[key] += 1
        return (*key, self.issued[key]), ranks


def _engine(node: GraphNode) -> Engine:
    if node.communicates:
        return Engine.COMMUNICATION
    return _ENGINES.get(node.type) or _COPIES.get(str(node.attributes.get("engine")), Engine.COMPUTE)


def _slowdown(node: GraphNode, name: str) -> float:
    return max(1.0, _number(node.attributes, name, 1.0))


def _links(node: GraphNode, between: bool) -> LinkUse:
    """What the transfer takes of the rank's links."""
    if "link_rate" not in node.attributes:
        return WHOLE_ADAPTER if between else WHOLE_PORT
    port, adapter, uplink = (
        min(1.0, _number(node.attributes, f"link_{name}", 0.0)) for name in ("port", "adapter", "uplink")
    )
    return LinkUse(
        port=port, adapter=adapter, uplink=uplink, rate=max(1e-9, _number(node.attributes, "link_rate", 1.0))
    )


def _join(program: Program, meeting: _Meeting) -> None:
    number = len(program.transfers)
    between = any(bool(node.attributes.get("between_nodes", False)) for _, _, node in meeting.members)
    position_of = {rank: i for i, rank in enumerate(program.ranks)}
    present = {position for position, _, _ in meeting.members}
    expected = dict.fromkeys(position_of[rank] for rank in meeting.expected if rank in position_of)
    uses, limit = uses_of(
        (position, {SEND: "send", RECV: "recv"}.get(node.type, ""), _links(node, between))
        for position, _, node in meeting.members
    )
    for _, item, node in meeting.members:
        program.legs[item] = [Leg(node.id, number)]
    program.transfers.append(
        Transfer(
            members=tuple(item for _, item, _ in meeting.members),
            ms=max(node.ms for _, _, node in meeting.members),
            uses=uses,
            limit=limit,
            ranks=tuple(position for position, _, _ in meeting.members),
            slowdown=max(_slowdown(node, "slowdown") for _, _, node in meeting.members),
            inter_node=between,
            label=meeting.members[0][2].name,
            missing=tuple(position for position in expected if position not in present),
        )
    )

"""A simulated step as Chakra execution traces, one for each rank of the job, as ASTRA-sim takes them.

One step is written, from an idle GPU on. Per rank, in the order in which its host issues:

    host        a compute node with ``is_cpu_op`` for what the host pays before a launch, and one for what it pays after a
                wait; each depends on the one before
    operator    a compute node: duration, ``num_ops`` (FLOPs), ``tensor_size`` (bytes moved)
    copy        from a MiB on a memory load (to the device) or store (to the host) of ``tensor_size`` bytes, for which
                ASTRA-sim wants a remote memory; smaller ones are compute nodes
    collective  ``comm_type``, ``comm_size`` (bytes that this rank brings), ``pg_name``; its duration is the transfer's price
    send, recv  ``comm_src``, ``comm_dst``, ``comm_size``, ``comm_tag``; those of a batch are nodes of their own

``data_deps`` are all that a node waits for: what is before it on its stream, the events and streams that its stream waits for
(`runtime_sim.linking`), and its launch, which ``ctrl_deps`` name as well. Durations are whole microseconds; what rounding
takes from one node of a rank is given to the next of its kind, so that sums are right. The exact duration, the stream, the
shares of links and the slowdowns beside other kernels are attributes of our own, from which `replay` gets the same step time.

Beside the traces ``comm_group.json`` lists the ranks of the groups. Ranks that were not simulated get the trace of their
pipeline stage with their own groups and peers (`groups`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autosac.chakra import schema
from autosac.chakra.groups import GroupNumbers, group_of
from autosac.errors import UsageError
from autosac.estimator.work import Work, work_of
from autosac.files.writing import check_folder, write_bytes_atomically, write_text_atomically
from autosac.runtime_sim import Timeline
from autosac.runtime_sim.program import LANES, Engine, HostPoint, Program
from autosac.runtime_sim.timeline import timeline_of
from autosac.trace import Collective, Group, Op, Signature, TensorMeta, Trace

GROUPS_FILE = "comm_group.json"
_MOST_BYTES = 8 * 2**30
_LEAST_COPY_BYTES = 2**20
_COPIES = {Engine.HOST_TO_DEVICE: schema.MEMORY_LOAD, Engine.DEVICE_TO_HOST: schema.MEMORY_STORE}


class Exported(NamedTuple):
    """What was written: the folder, how many ranks, nodes of all of them, and what the step takes by itself (ms)."""

    folder: Path
    ranks: int
    nodes: int
    step_ms: float


class _Leg(NamedTuple):
    """A node whose group and peers depend on the rank."""

    node: Any
    event: Collective
    group: Group


def write_chakra(
    timeline: Timeline, folder: Path, *, only_simulated: bool = False, prefix: str = "autosac"
) -> Exported:
    """Write ``<prefix>.<rank>.et`` for every rank of the job (or those alone that were simulated) and the groups' file.

    UsageError if the folder cannot be written, protobuf is not there, the groups of a rank are not known, or the traces of all
    ranks would take more than 8 GiB. OSError if writing fails.
    """
    schema.messages()
    check_folder(folder)
    alone = timeline_of(replace(timeline.problem, steps=1))
    stages = [_Stage(alone, position) for position in range(len(alone.ranks))]
    simulated = {stage.rank: stage for stage in stages}
    standing_in = simulated if only_simulated else dict(_stand_ins(simulated))
    total = sum(stage.size_bytes for stage in standing_in.values())
    if total > _MOST_BYTES:
        raise UsageError(
            f"the traces of {len(standing_in)} ranks would take {total / 2**30:.0f} GiB, at most {_MOST_BYTES >> 30} GiB are "
            "written: give --rank to write the trace of one rank"
        )
    groups = GroupNumbers()
    for rank, stage in standing_in.items():
        write_bytes_atomically(folder / f"{prefix}.{rank}.et", stage.content(rank, groups))
    write_text_atomically(folder / GROUPS_FILE, json.dumps(groups.document()))
    nodes = sum(len(stage.nodes) for stage in standing_in.values())
    return Exported(folder, len(standing_in), nodes, alone.makespan_ms)


def _stand_ins(simulated: dict[int, _Stage]) -> Iterator[tuple[int, _Stage]]:
    """For every rank of the job the stage that stands for it; ranks of stages that were not simulated are left out."""
    info = next(iter(simulated.values())).trace.info
    width = max(1, info.world_size // info.parallelism.pp)
    by_stage = {rank // width: stage for rank, stage in simulated.items()}
    for rank in range(info.world_size):
        stage = simulated.get(rank) or by_stage.get(rank // width)
        if stage is not None:
            yield rank, stage


@dataclass
class _Durations:
    """Whole microseconds whose sum is that of the exact ones, within half of one."""

    carried_us: float = 0.0

    def rounded(self, ms: float) -> int:
        exact = self.carried_us + ms * 1e3
        whole = max(0, round(exact))
        self.carried_us = exact - whole
        return whole


class _Stage:
    """The nodes of one simulated rank, by its position in a timeline."""

    def __init__(self, alone: Timeline, position: int) -> None:
        self.alone = alone
        self.position = position
        self.nodes: list[bytes | _Leg] = []
        self.durations: dict[int, _Durations] = {}
        self.trace: Trace = alone.problem.traces[position]
        self.rank = self.trace.info.rank
        self.program: Program = alone.program
        self.work: dict[int, Work] = {}
        self.of_item: dict[int, list[int]] = {}
        self.host = 0  # the newest node of the host; 0: none
        for point in self.program.points[self.position]:
            self._point(point)

    @property
    def size_bytes(self) -> int:
        """Roughly, of one rank's file."""
        return sum(each.node.ByteSize() if isinstance(each, _Leg) else len(each) for each in self.nodes)

    # ---- nodes -------------------------------------------------------------------------------------------------

    def _point(self, point: HostPoint) -> None:
        name = "end of the step"
        if point.event < len(self.trace.events):
            event = self.trace.events[point.event]
            name = f"launch {self._name(event)}" if type(event) in (Op, Collective) else type(event).__name__
        if point.cost_ms > 0:
            self._host(name, point.cost_ms, ())
        if point.waits or point.sync_ms > 0:
            self._host("wait", point.sync_ms, point.waits)
        if point.item >= 0:
            self._item(point.item)

    def _host(self, name: str, ms: float, waits: tuple[int, ...]) -> None:
        before = [self.host] if self.host else []
        deps = [*before, *(node for item in waits for node in self.of_item[item])]
        node = self._node(name, schema.COMPUTE, ms, deps, before)
        node.attr.append(schema.attribute("is_cpu_op", True))
        self.host = node.id
        self.nodes.append(schema.packed(node))

    def _item(self, item: int) -> None:
        program = self.program
        launch = [self.host] if self.host else []
        deps = [*launch, *sorted(node for other in program.dependencies[item] for node in self.of_item[other])]
        begin_ms = self.alone.execution.start[item]
        ids = self.of_item[item] = []
        if program.engine[item] != Engine.COMMUNICATION:
            node = self._operator(item, deps, launch)
            ids.append(node.id)
            self._finish(node, item, begin_ms)
            self.nodes.append(schema.packed(node))
            return
        for event, number in program.legs[item]:
            leg = self._leg(event, number, deps, launch)
            ids.append(leg.node.id)
            self._finish(leg.node, item, begin_ms)
            self.nodes.append(leg)

    def _finish(self, node: Any, item: int, begin_ms: float) -> None:
        node.start_time_micros = max(0, round(begin_ms * 1e3))
        node.attr.append(schema.attribute("is_cpu_op", False))
        node.attr.append(schema.attribute("stream", self.program.stream[item]))

    def _operator(self, item: int, deps: list[int], launch: list[int]) -> Any:
        program, event = self.program, self.trace.events[self.program.event[item]]
        assert type(event) is Op
        signature = self.trace.signatures[event.signature]
        work, engine = self._work(event.signature, signature), Engine(program.engine[item])
        large = work.nbytes >= _LEAST_COPY_BYTES
        kind = _COPIES.get(engine, schema.COMPUTE) if large else schema.COMPUTE
        node = self._node(signature.name, kind, program.ms[item], deps, launch)
        if engine in _COPIES:
            node.attr.append(schema.attribute("engine", engine.name.lower()))
        node.attr.append(schema.attribute("num_ops", int(work.flops)))
        node.attr.append(schema.attribute("tensor_size", int(work.nbytes), "uint64"))
        if program.slowdowns[item] != (1.0, 1.0):
            for name, factor in zip(("slowdown_intra", "slowdown_inter"), program.slowdowns[item], strict=True):
                node.attr.append(schema.attribute(name, factor))
        node.attr.append(schema.attribute("phase", event.phase.name.lower()))
        if event.module >= 0 and self.trace.modules[event.module]:
            node.attr.append(schema.attribute("module", self.trace.modules[event.module]))
        _tensors(node.inputs, signature.inputs)
        _tensors(node.outputs, signature.outputs)
        return node

    def _work(self, number: int, signature: Signature) -> Work:
        if number not in self.work:
            self.work[number] = work_of(signature)
        return self.work[number]

    def _leg(self, index: int, number: int, deps: list[int], launch: list[int]) -> _Leg:
        event, transfer = self.trace.events[index], self.program.transfers[number]
        assert type(event) is Collective
        group = self.trace.groups[event.group]
        kind = {"send": schema.SEND, "recv": schema.RECV}.get(event.kind, schema.COLLECTIVE)
        node = self._node(self._name(event), kind, transfer.ms, deps, launch)
        gathered = event.kind == "all_gather"
        node.attr.append(schema.attribute("comm_size", event.nbytes // group.size if gathered else event.nbytes))
        if kind == schema.COLLECTIVE:
            node.attr.append(schema.attribute("comm_type", schema.COLLECTIVES[event.kind]))
        node.attr.append(schema.attribute("between_nodes", transfer.inter_node))
        for i, name in enumerate(("port", "adapter", "uplink")):
            ways = (self.position * LANES + 2 * i + way for way in (0, 1))
            if share := max(transfer.uses.get(lane, 0.0) for lane in ways) * transfer.limit:
                node.attr.append(schema.attribute(f"link_{name}", share))
        node.attr.append(schema.attribute("link_rate", transfer.limit))
        if transfer.slowdown != 1:
            node.attr.append(schema.attribute("slowdown", transfer.slowdown))
        return _Leg(node, event, group)

    def _node(self, name: str, kind: int, ms: float, data_deps: list[int], ctrl_deps: list[int]) -> Any:
        node = schema.messages().Node(id=len(self.nodes) + 1, name=name, type=kind)
        node.data_deps.extend(dict.fromkeys(data_deps))
        node.ctrl_deps.extend(ctrl_deps)
        node.duration_micros = self.durations.setdefault(kind, _Durations()).rounded(ms)
        node.attr.append(schema.attribute("duration_us", ms * 1e3))
        return node

    def _name(self, event: Any) -> str:
        return event.kind if type(event) is Collective else self.trace.signatures[event.signature].name

    # ---- a rank's file -----------------------------------------------------------------------------------------

    def content(self, rank: int, groups: GroupNumbers) -> bytes:
        """The file of `rank`, which this stage stands for."""
        sent: Counter[tuple[int, int, int]] = Counter()
        parts = [schema.packed(self._metadata(rank))]
        for each in self.nodes:
            parts.append(each if isinstance(each, bytes) else schema.packed(self._placed(each, rank, groups, sent)))
        return b"".join(parts)

    def _metadata(self, rank: int) -> Any:
        problem, info = self.alone.problem, self.trace.info
        metadata = schema.messages().GlobalMetadata(version=schema.VERSION)
        settings: dict[str, Any] = {
            "written_by": "AutoSAC",
            "rank": rank,
            "world_size": info.world_size,
            "model": info.model,
            "gpus_per_node": problem.gpus_per_node,
            "launch_latency_us": problem.host.launch_latency_us,
            "queue_depth": problem.host.queue_depth,
            "step_us": self.alone.makespan_ms * 1e3,
        }
        for name, value in settings.items():
            metadata.attr.append(schema.attribute(name, float(value) if name.endswith("_us") else value))
        return metadata

    def _placed(self, leg: _Leg, rank: int, groups: GroupNumbers, sent: Counter[tuple[int, int, int]]) -> Any:
        node = schema.messages().Node()
        node.CopyFrom(leg.node)
        group = group_of(leg.group, rank)
        number = groups.number(group)
        if leg.event.peer < 0:
            node.attr.append(schema.attribute("pg_name", str(number)))
            return node
        peer = group.ranks()[leg.group.ranks().index(leg.event.peer)]
        source, target = (rank, peer) if leg.event.kind == "send" else (peer, rank)
        key = (number, source, target)
        sent[key] += 1
        for name, value in (("comm_src", source), ("comm_dst", target), ("comm_tag", sent[key])):
            node.attr.append(schema.attribute(name, value, "int32"))
        node.attr.append(schema.attribute("pg_name", str(number)))
        return node


def _tensors(info: Any, metas: tuple[TensorMeta, ...]) -> None:
    info.shapes = json.dumps([list(meta.shape) for meta in metas], separators=(",", ":"))
    info.types = json.dumps([f"Tensor({meta.dtype})" for meta in metas], separators=(",", ":"))

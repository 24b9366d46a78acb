"""Reads Chakra execution traces, whoever wrote them, as plain data: a graph of nodes for each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import MinLen

from autosac.chakra import schema
from autosac.chakra.export import GROUPS_FILE
from autosac.errors import TraceError, UsageError
from autosac.files.documents import DATA_BYTES, DocumentError, parse_json, read_bounded
from autosac.files.schema import Fault, Within, fitted
from autosac.limits import MOST_GPUS

_NAME = re.compile(r"(.*)\.(\d{1,9})\.et")
_MOST_US = 1e13
_Groups = dict[str, Annotated[tuple[Annotated[int, Within(0, MOST_GPUS)], ...], MinLen(1)]]
_COMMUNICATION = (schema.SEND, schema.RECV, schema.COLLECTIVE)


class GraphNode(NamedTuple):
    """One node. `ms`: its exact duration where the file has it; `deps`: all nodes that it waits for."""

    id: int
    name: str
    type: int
    ms: float
    deps: tuple[int, ...]
    attributes: Mapping[str, Any]

    @property
    def on_host(self) -> bool:
        """Whether the CPU does it."""
        return self.type == schema.COMPUTE and bool(self.attributes.get("is_cpu_op", False))

    @property
    def communicates(self) -> bool:
        """Whether it is a collective, a send or a receive."""
        return self.type in _COMMUNICATION


class Graph(NamedTuple):
    """A rank's nodes, each after all that it waits for, and what the file says of itself."""

    rank: int
    nodes: tuple[GraphNode, ...]
    about: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChakraTrace:
    """The graphs of all ranks, by rank, and the groups' ranks by name."""

    graphs: tuple[Graph, ...]
    groups: Mapping[str, tuple[int, ...]]


def read_chakra(folder: str | Path) -> ChakraTrace:
    """The traces ``<any>.<rank>.et`` of a folder, with its ``comm_group.json`` if there is one.

    UsageError if the folder has none, two of one rank, or protobuf is not there; TraceError for a file that is damaged, or
    whose nodes wait for each other or for none of the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of Chakra traces")
    files: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        rank = int(match[2])
        if rank in files:
            raise UsageError(f"{folder} has two traces of rank {rank}: {files[rank].name} and {path.name}")
        files[rank] = path
    if not files:
        raise UsageError(f"{folder} has no Chakra traces (NAME.RANK.et)")
    graphs = tuple(_graph(rank, files[rank]) for rank in sorted(files))
    return ChakraTrace(graphs=graphs, groups=_groups(folder / GROUPS_FILE))


def _groups(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.exists():
        return {}
    try:
        document = parse_json(read_bounded(path, DATA_BYTES))
    except (DocumentError, OSError) as e:
        raise TraceError(f"{path} is damaged: {e}") from e
    found = fitted(document, _Groups)
    if isinstance(found, Fault):
        raise TraceError(f"{path} is damaged: {found.text}")
    return found


def _graph(rank: int, path: Path) -> Graph:
    try:
        content = read_bounded(path, DATA_BYTES)
        found = schema.unpacked(content)
        first = next(found, None)
        if first is None:
            raise ValueError("it is empty")
        nodes = _ordered([_node(message) for message in found])
        return Graph(rank, nodes, schema.attributes(first))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as e:
        raise TraceError(f"{path} is not a Chakra trace, or it is damaged: {e}") from e


def _node(message: Any) -> GraphNode:
    attributes = schema.attributes(message)
    exact = attributes.get("duration_us", message.duration_micros)
    if not isinstance(exact, int | float) or not 0 <= exact <= _MOST_US or math.isnan(exact):
        raise ValueError(f"node {message.id} takes {exact!r} us")
    if message.type not in schema.NODE_TYPES:
        raise ValueError(f"node {message.id} has the unknown type {message.type}")
    deps = tuple(dict.fromkeys((*message.data_deps, *message.ctrl_deps)))
    return GraphNode(message.id, message.name, message.type, exact / 1e3, deps, attributes)


def _ordered(nodes: list[GraphNode]) -> tuple[GraphNode, ...]:
    """Each after what it waits for, else by their numbers (Kahn's algorithm). ValueError if that is not possible."""
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        raise ValueError("two nodes have the same number")
    followers: dict[int, list[int]] = {}
    left = {}
    for node in nodes:
        left[node.id] = len(node.deps)
        for other in node.deps:
            if other not in by_id:
                raise ValueError(f"node {node.id} waits for node {other}, which is not there")
            followers.setdefault(other, []).append(node.id)
    ready = [number for number, count in left.items() if not count]
    heapify(ready)
    found = []
    while ready:
        number = heappop(ready)
        found.append(by_id[number])
        for follower in followers.get(number, ()):
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, follower)
    if len(found) < len(nodes):
        raise ValueError("some of its nodes wait for each other")
    return tuple(found)

"""The Trace: everything one rank asked of its device during one training step, as plain immutable data.

It is the narrow waist of the project. Capture writes it and knows nothing of costs; the simulators, the estimator and
the solvers read it and know nothing of PyTorch, TorchTitan or the simulated device.

A trace has three parts:

- **tables**, referred to by index: `signatures` (what an operator was called with), `storages` (one per allocation of
  device memory), `modules` (qualified names), `sources` (``file.py:line``), `groups` (process groups);
- **`prologue`**: the allocations and frees from the start of the job to the start of the recorded step, enough to
  replay an allocator from its empty state;
- **`events`**: the recorded step in the order in which the host issued it.

`regions` say, for every forward execution of every module that could be checkpointed, which operators a selective
checkpointing policy sees there; each of them covers a range of `events`.

Units: bytes; element strides; times never occur in a trace. Storage sizes are what the operator asked for; rounding is
the allocator's business.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast, get_args

from autosac.errors import TraceError
from autosac.files.documents import DocumentError, is_gzipped, read_packed_json
from autosac.files.writing import write_bytes_atomically
from autosac.trace.checks import check_document
from autosac.trace.columns import as_columns, as_rows, as_tuples
from autosac.trace.info import TraceInfo
from autosac.trace.structure import structure

SCHEMA_VERSION = 2

Scalar: TypeAlias = "bool | int | float | str | tuple[Scalar, ...] | None"


class Phase(IntEnum):
    """What the training step was doing. RECOMPUTE is the forward work that checkpointing repeats in the backward."""

    SETUP = 0
    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    OPTIMIZER = 4
    OTHER = 5


class Label(IntEnum):
    """What only capture can know of a storage; memory_sim derives finer categories from it, the phase and lifetime."""

    NONE = 0
    PARAMETER = 1
    BUFFER = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    INPUT = 5
    UNSHARDED_PARAMETER = 6
    COMMUNICATION = 7


class TensorMeta(NamedTuple):
    """Shape (elements), stride (elements), dtype (``"bfloat16"``) and place (``"device"`` or ``"cpu"``) of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    place: str = "device"


class Signature(NamedTuple):
    """One distinct way of calling an operator; everything that its cost can depend on.

    `name` is the overload (``"aten.mm.default"``, ``"triton.<kernel>"``), `inputs` and `outputs` its tensors in order
    (lists flattened), `arguments` its non-tensor arguments by schema name. `is_view`: no device work is launched (views,
    metadata, allocations of uninitialised memory). `is_random`: draws from the device's generator. `mutates`: positions
    in `inputs` that the operator writes to.
    """

    name: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    arguments: tuple[tuple[str, Scalar], ...] = ()
    is_view: bool = False
    is_random: bool = False
    mutates: tuple[int, ...] = ()


class Storage(NamedTuple):
    """One allocation of device memory: `nbytes` asked for on `stream`, by `module` (index) in `phase` at `source`."""

    nbytes: int
    stream: int
    label: Label
    phase: Phase
    module: int
    source: int
    op: str


class Group(NamedTuple):
    """A process group by its structure: ranks are ``offset + sum(i_d * stride_d)``, ``0 <= i_d < size_d``, or `explicit`.

    `dims` is a tuple of (size, stride), slowest first. A group of one rank has no dims.
    """

    name: str
    offset: int
    dims: tuple[tuple[int, int], ...]
    explicit: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        if self.explicit:
            return len(self.explicit)
        size = 1
        for count, _ in self.dims:
            size *= count
        return size

    def ranks(self) -> tuple[int, ...]:
        """All global ranks of the group, in group order."""
        if self.explicit:
            return self.explicit
        steps = [[i * stride for i in range(count)] for count, stride in self.dims]
        return tuple(self.offset + sum(combination) for combination in itertools.product(*steps))

    @staticmethod
    def of(name: str, ranks: Iterable[int]) -> Group:
        """The group of these ranks, by its structure wherever it has one."""
        members = tuple(ranks)
        dims = structure(members)
        if dims is None:
            return Group(name, members[0], (), members)
        return Group(name, members[0], dims)


# ---- events ---------------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """An operator issued to `stream`. `inputs`/`outputs` are storage ids per signature tensor (-1: not on the device)."""

    signature: int
    stream: int
    module: int
    phase: Phase
    source: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Collective(NamedTuple):
    """A collective or point-to-point transfer.

    `kind`: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, barrier. `nbytes`: what nccl-tests
    calls "size": the gathered output for all_gather, the whole input for reduce_scatter and all_reduce, this rank's send
    buffer for all_to_all, the message otherwise. `stream` is where it was issued: if `asynchronous` it runs on the
    group's own stream after what `stream` holds, and `work` identifies it to a later WorkWait; otherwise it runs on
    `stream`. `peer` is the global rank for send and recv, else -1. `batch` groups transfers that were issued as one
    (batch_isend_irecv), -1 if alone.
    """

    kind: str
    nbytes: int
    group: int
    stream: int
    asynchronous: bool
    work: int
    peer: int
    batch: int
    signature: int
    module: int
    phase: Phase
    source: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Alloc(NamedTuple):
    """The storage comes to life."""

    storage: int


class Free(NamedTuple):
    """The last reference to the storage goes (in host order)."""

    storage: int


class RecordStream(NamedTuple):
    """`Tensor.record_stream`: the storage may not be reused before `stream` has passed this point."""

    storage: int
    stream: int


class EventRecord(NamedTuple):
    """The event is complete when `stream` has done what it holds now."""

    event: int
    stream: int


class EventWait(NamedTuple):
    """`stream` waits for the event's last record."""

    event: int
    stream: int


class StreamWait(NamedTuple):
    """`stream` waits for all that `other` holds now."""

    stream: int
    other: int


class WorkWait(NamedTuple):
    """`stream` waits for the collective with this `work` id (Work.wait, wait_tensor); the host goes on."""

    work: int
    stream: int


class HostWait(NamedTuple):
    """The host waits: for a stream (`stream` >= 0), an event (`event` >= 0), or the whole device (both -1).

    `reason`: "item" (a device-to-host read), "stream", "event", "device".
    """

    stream: int
    event: int
    reason: str


class ModuleEnter(NamedTuple):
    """The module's forward (or backward, or recomputation) begins on the host."""

    module: int
    phase: Phase


class ModuleExit(NamedTuple):
    """It ends."""

    module: int
    phase: Phase


class StepBegin(NamedTuple):
    """A training step begins (only in the prologue; the recorded step is `events` itself)."""

    step: int


class GraphLaunch(NamedTuple):
    """The next `events` events are the nodes of a CUDA graph, which the host launches at once."""

    events: int


class EmptyCache(NamedTuple):
    """The caching allocator returns to the device what is cached, but for the pools of CUDA graphs."""


Event: TypeAlias = (
    Op
    | Collective
    | Alloc
    | Free
    | RecordStream
    | EventRecord
    | EventWait
    | StreamWait
    | WorkWait
    | HostWait
    | ModuleEnter
    | ModuleExit
    | StepBegin
    | GraphLaunch
    | EmptyCache
)
_EVENT_TYPES: tuple[type, ...] = get_args(Event)


UNSHARD = "fsdp.unshard"
GRAPH_POOL = "graph pool"  # how the names of streams begin that stand for the memory of CUDA graphs

# ---- regions --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One operator as a selective-checkpoint policy sees it (above tensor subclasses, autograd already passed).

    It covers `events[first:last]`. `op` with `occurrence` (how many calls of the same overload came before in this
    region; negative for views and Triton kernels, about which nothing is decided) is the key of a decision; `outputs` is
    its fingerprint. `created` are the storages that it allocated and that outlived it; `reads` and `writes` are existing
    storages (device) that it read or mutated; `results` hold its `outputs`, one for each (-1: not on the device).
    """

    op: str
    occurrence: int
    outputs: tuple[TensorMeta, ...]
    first: int
    last: int
    is_view: bool
    is_random: bool
    must_save: bool
    created: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]


class Region(NamedTuple):
    """One forward execution of a module that may be checkpointed: `events[first:last]`, its `calls` in order.

    `inputs` and `outputs` are the storages that enter and leave it as arguments and results. A recomputation is one, too; a
    call UNSHARD of it is FSDP's work to gather again what a module inside has let go of (its index is the `occurrence`).
    """

    module: int
    first: int
    last: int
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# ---- the trace ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's recorded training step. See the module's docstring. `info` says what was captured."""

    info: TraceInfo
    signatures: tuple[Signature, ...]
    storages: tuple[Storage, ...]
    modules: tuple[str, ...]
    module_parents: tuple[int, ...]
    module_classes: tuple[str, ...]
    sources: tuple[str, ...]
    groups: tuple[Group, ...]
    prologue: tuple[Event, ...]
    events: tuple[Event, ...]
    regions: tuple[Region, ...] = ()
    streams: tuple[str, ...] = field(default=("compute",))

    def __str__(self) -> str:
        """What was recorded, in a line."""
        return f"trace of {self.info.model or 'a step'} on {self.info.gpu}: {len(self.events)} events"

    def residents(self) -> tuple[int, ...]:
        """Storages alive when the recorded step begins, in order of allocation."""
        alive: dict[int, None] = {}
        for event in self.prologue:
            if type(event) is Alloc:
                alive[event.storage] = None
            elif type(event) is Free:
                alive.pop(event.storage, None)
        return tuple(alive)

    def operators(self) -> Iterator[tuple[int, Op]]:
        """All operators with their index in `events`."""
        return ((i, event) for i, event in enumerate(self.events) if type(event) is Op)

    def save(self, path: str | Path) -> None:
        """Write the trace as gzipped JSON, completely or not at all. Raises OSError if the file cannot be written."""
        payload = json.dumps(_encode(self), separators=(",", ":")).encode()
        write_bytes_atomically(Path(path), gzip.compress(payload, compresslevel=3, mtime=0))

    @staticmethod
    def load(path: str | Path, *, trusted: bool = False) -> Trace:
        """Read a saved trace. Raises TraceError if the file is not a trace, is truncated or damaged, or has another schema.

        `trusted`: do not check the content, because a capture of this process has just written it.
        """
        try:
            document = read_packed_json(path)
        except DocumentError as e:
            raise TraceError(f"{path} is not an AutoSAC trace, or it is truncated: {e}") from e
        if not isinstance(document, dict) or document.get("format") != "autosac-trace":
            raise TraceError(f"{path} is not an AutoSAC trace")
        if document.get("schema") != SCHEMA_VERSION:
            raise TraceError(
                f"{path} has trace schema {document.get('schema')}; this version of AutoSAC reads {SCHEMA_VERSION}: "
                "capture the job again"
            )
        try:
            if not trusted:
                check_document(document, _FIELDS, len(Phase), len(Label))
            return _decode(document)
        except KeyError as e:
            raise TraceError(f"{path} is damaged: {e} is missing") from e
        except (TypeError, IndexError, ValueError, RecursionError) as e:
            raise TraceError(f"{path} is damaged: {e}") from e


_FIELDS: dict[str, tuple[str, ...]] = {
    kind.__name__: cast(Any, kind)._fields for kind in (Signature, Storage, Group, Call, Region, *_EVENT_TYPES)
}


def is_capture(path: str | Path) -> bool:
    """Whether a file looks like a saved trace (it is gzipped); False if it cannot be read."""
    return is_gzipped(path)


# Fields whose values are written as numbers.
_ENUMERATED: dict[str, tuple[Any, ...]] = {"phase": tuple(Phase), "label": tuple(Label)}


def _rows(columns: list[list[Any]], kind: Any) -> list[Any]:
    return as_rows(columns, kind, _ENUMERATED)


def _encode_events(events: tuple[Event, ...]) -> dict[str, Any]:
    position = {kind: i for i, kind in enumerate(_EVENT_TYPES)}
    order = [position[type(event)] for event in events]
    columns = {kind.__name__: as_columns(event for event in events if type(event) is kind) for kind in _EVENT_TYPES}
    return {"order": order, "columns": columns}


def _decode_events(document: dict[str, Any]) -> tuple[Event, ...]:
    order = document["order"]
    kinds = list(enumerate(cast(Any, _EVENT_TYPES)))  # one without fields has nothing in columns
    queues = [
        _rows(document["columns"].get(kind.__name__, []), kind) if kind._fields else [kind()] * order.count(position)
        for position, kind in kinds
    ]
    if Counter(order) != Counter({i: len(rows) for i, rows in enumerate(queues) if rows}):
        raise ValueError("events are missing")
    iterators = [iter(rows) for rows in queues]
    return tuple(next(iterators[i]) for i in order)


def _encode(trace: Trace) -> dict[str, Any]:
    return {
        "format": "autosac-trace",
        "schema": SCHEMA_VERSION,
        "info": trace.info.document(),
        "signatures": as_columns(trace.signatures),
        "storages": as_columns(trace.storages),
        "modules": [trace.modules, trace.module_parents, trace.module_classes],
        "sources": trace.sources,
        "groups": as_columns(trace.groups),
        "streams": trace.streams,
        "prologue": _encode_events(trace.prologue),
        "events": _encode_events(trace.events),
        "regions": [[*region._replace(calls=()), as_columns(region.calls)] for region in trace.regions],
    }


def _metas(rows: tuple[Any, ...]) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(*row) for row in rows)


def _decode(document: dict[str, Any]) -> Trace:
    signatures = [
        s._replace(inputs=_metas(s.inputs), outputs=_metas(s.outputs)) for s in _rows(document["signatures"], Signature)
    ]
    storages = _rows(document["storages"], Storage)
    regions = []
    for *head, columns in document["regions"]:
        calls = tuple(c._replace(outputs=_metas(c.outputs)) for c in _rows(columns, Call))
        regions.append(Region(*map(as_tuples, head))._replace(calls=calls))
    modules, parents, classes = document["modules"]
    return Trace(
        info=TraceInfo.of(document["info"]),
        signatures=tuple(signatures),
        storages=tuple(storages),
        modules=tuple(modules),
        module_parents=tuple(parents),
        module_classes=tuple(classes),
        sources=tuple(document["sources"]),
        groups=tuple(_rows(document["groups"], Group)),
        streams=tuple(document["streams"]),
        prologue=_decode_events(document["prologue"]),
        events=_decode_events(document["events"]),
        regions=tuple(regions),
    )

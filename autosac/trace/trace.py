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
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from autosac.errors import TraceError
from autosac.files.documents import DocumentError, is_gzipped, read_packed_json
from autosac.files.writing import write_bytes_atomically
from autosac.trace.checks import check_document
from autosac.trace.columns import as_columns, as_rows, as_tuples
from autosac.trace.info import TraceInfo
from autosac.trace.rows import (
    EVENT_TYPES,
    Alloc,
    Call,
    Event,
    Free,
    Group,
    Label,
    Op,
    Phase,
    Region,
    Signature,
    Storage,
    TensorMeta,
)

SCHEMA_VERSION = 3


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
        if document.get("schema") == _WITHOUT_WRAPPERS:
            _add_wrappers(document)
        elif document.get("schema") != SCHEMA_VERSION:
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


_WITHOUT_WRAPPERS = 2
"""The schema of traces that do not say which calls DTensor took apart: they are read as if it took none."""


def _add_wrappers(document: dict[str, Any]) -> None:
    columns = document.get("signatures")
    if isinstance(columns, list) and columns and isinstance(columns[0], list):
        columns.append([0] * len(columns[0]))


_FIELDS: dict[str, tuple[str, ...]] = {
    kind.__name__: cast(Any, kind)._fields for kind in (Signature, Storage, Group, Call, Region, *EVENT_TYPES)
}


def is_capture(path: str | Path) -> bool:
    """Whether a file looks like a saved trace (it is gzipped); False if it cannot be read."""
    return is_gzipped(path)


# Fields whose values are written as numbers.
_ENUMERATED: dict[str, tuple[Any, ...]] = {"phase": tuple(Phase), "label": tuple(Label)}


def _rows(columns: list[list[Any]], kind: Any) -> list[Any]:
    return as_rows(columns, kind, _ENUMERATED)


def _encode_events(events: tuple[Event, ...]) -> dict[str, Any]:
    position = {kind: i for i, kind in enumerate(EVENT_TYPES)}
    order = [position[type(event)] for event in events]
    columns = {kind.__name__: as_columns(event for event in events if type(event) is kind) for kind in EVENT_TYPES}
    return {"order": order, "columns": columns}


def _decode_events(document: dict[str, Any]) -> tuple[Event, ...]:
    order = document["order"]
    kinds = list(enumerate(cast(Any, EVENT_TYPES)))  # one without fields has nothing in columns
    queues = [
        _rows(document["columns"].get(kind.__name__, []), kind) if kind._fields else [kind()] * order.count(position)
        for position, kind in kinds
    ]
    if Counter(order) != Counter({i: len(rows) for i, rows in enumerate(queues) if rows}):
        raise ValueError("events are missing")
    iterators = [iter(rows) for rows in queues]
    return tuple(map(next, map(iterators.__getitem__, order)))


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

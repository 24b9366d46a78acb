"""When each allocation of a step is alive, as columns.

A storage that is freed and allocated again (FSDP resizes the storages of its unsharded parameters) has one
row per life. Workspaces that stay are appended as storages of their own, so that everything downstream treats
them as memory like any other; temporaries inside one operator are a column over events
(`Lifetimes.transient_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from autosac.errors import SimulationError
from autosac.memory_sim.workspaces import (
    WorkspaceModel,
    is_matmul,
    matmul_signatures,
    on_autograd_thread,
    replayed,
)
from autosac.trace import Alloc, Event, Free, Label, Op, StepBegin, Storage, Trace

IntArray: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Rows: allocation `storage[k]` of `nbytes[k]` bytes (rounded) lives from `begin[k]` to `end[k]`, event
    indices.

    It is alive after event i if ``begin <= i < end``. `begin` is -1 for what the step finds, `end` is the
    number of events for what it leaves. `storages` are the trace's, then, from `first_workspace` on, the
    workspaces that stay.
    `transient_bytes[i]`: what the operator at event i takes only while it runs; `transient_op[i]`: that
    operator's event.
    """

    events: int
    storage: IntArray
    begin: IntArray
    end: IntArray
    nbytes: IntArray
    storages: tuple[Storage, ...]
    first_workspace: int
    transient_bytes: IntArray
    transient_op: dict[int, int]

    def alive_after(self, event: int) -> IntArray:
        """Rows alive after this event; -1 is the state that the step finds."""
        return np.flatnonzero((self.begin <= event) & (self.end > event))

    def series(self, rows: Any = slice(None)) -> IntArray:
        """Bytes alive after each event, of these rows."""
        delta = np.zeros(self.events + 2, dtype=np.int64)
        np.add.at(delta, self.begin[rows] + 1, self.nbytes[rows])
        np.subtract.at(delta, self.end[rows] + 1, self.nbytes[rows])
        return np.cumsum(delta)[1 : self.events + 1]


def trace_lifetimes(trace: Trace, workspaces: WorkspaceModel | None, round_to_bytes: int) -> Lifetimes:
    """Lifetimes of all allocations of the recorded step. SimulationError if it frees what is not alive."""
    rows = _Rows(len(trace.events))
    for storage in trace.residents():
        rows.allocate(storage, -1)
    rows.run(trace.events)
    storages = trace.storages
    transient, transient_op = np.zeros(len(trace.events), dtype=np.int64), dict[int, int]()
    if workspaces is not None:
        storages = storages + tuple(rows.stay(trace, workspaces))
        transient, transient_op = _transients(trace, workspaces)
    sizes = np.fromiter((s.nbytes for s in storages), dtype=np.int64, count=len(storages))
    rows_storage = np.array(rows.storage, dtype=np.int64)
    return Lifetimes(
        events=len(trace.events),
        storage=rows_storage,
        begin=np.array(rows.begin, dtype=np.int64),
        end=np.array(rows.end, dtype=np.int64),
        nbytes=-(-sizes[rows_storage] // round_to_bytes) * round_to_bytes,
        storages=storages,
        first_workspace=len(trace.storages),
        transient_bytes=transient,
        transient_op=transient_op,
    )


class _Rows:
    """Columns under construction."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.storage: list[int] = []
        self.begin: list[int] = []
        self.end: list[int] = []
        self.row_of: dict[int, int] = {}

    def allocate(self, storage: int, event: int) -> None:
        self.row_of[storage] = len(self.storage)
        self.storage.append(storage)
        self.begin.append(event)
        self.end.append(self.events)

    def run(self, events: tuple[Event, ...]) -> None:
        for i, event in enumerate(events):
            if type(event) is Alloc:
                if event.storage in self.row_of:
                    raise SimulationError(f"event {i} of the trace allocates storage {event.storage}, which is alive")
                self.allocate(event.storage, i)
            elif type(event) is Free:
                row = self.row_of.pop(event.storage, None)
                if row is None:
                    raise SimulationError(f"event {i} of the trace frees storage {event.storage}, which is not alive")
                self.end[row] = i

    def stay(self, trace: Trace, workspaces: WorkspaceModel) -> list[Storage]:
        """The cuBLAS workspaces: from the first use on, or from the beginning if a step before made them."""
        found = any(type(event) is StepBegin for event in trace.prologue)
        matmul = matmul_signatures(trace)
        seen: dict[tuple[bool, int], Storage] = {}

        def add(place: Op | Storage, begin: int) -> None:
            key = (on_autograd_thread(place.phase), place.stream)
            if key not in seen:
                self.allocate(len(trace.storages) + len(seen), begin)
                seen[key] = Storage(
                    workspaces.cublas_bytes, place.stream, Label.NONE, place.phase, place.module, place.source, CUBLAS
                )

        for event in trace.prologue:
            if (
                type(event) is Alloc
                and trace.storages[event.storage].stream
                and is_matmul(trace.storages[event.storage].op)
            ):
                add(trace.storages[event.storage], -1)  # of other streams: the warm-up and the capture of CUDA graphs
        repeated = replayed(trace.events)
        for i, event in enumerate(trace.events):
            if type(event) is Op and matmul[event.signature] and i not in repeated:
                add(event, -1 if found else i)
        return list(seen.values())


CUBLAS = "cuBLAS workspace"


def _transients(trace: Trace, workspaces: WorkspaceModel) -> tuple[IntArray, dict[int, int]]:
    """Bytes that operators hold only while they run, at the event where all their outputs exist as well."""
    per_signature = [workspaces.op_workspace_bytes(signature) for signature in trace.signatures]
    transient, transient_op = np.zeros(len(trace.events), dtype=np.int64), dict[int, int]()
    if not any(per_signature):
        return transient, transient_op
    events, repeated = trace.events, replayed(trace.events)
    for i, event in enumerate(events):
        if type(event) is Op and per_signature[event.signature] and i not in repeated:
            at = i + outputs_after(events, i)
            transient[at] = per_signature[event.signature]
            transient_op[at] = i
    return transient, transient_op


def outputs_after(events: tuple[Event, ...], op: int) -> int:
    """How many of the operator's own outputs are allocated directly after its event."""
    event = events[op]
    assert type(event) is Op
    count = 0
    while op + count + 1 < len(events):
        following = events[op + count + 1]
        if type(following) is not Alloc or following.storage not in event.outputs:
            break
        count += 1
    return count

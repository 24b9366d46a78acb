"""What two captures of one job have in common: the rows of their steps, and which storage is which.

A capture is looked at as one list of events, its prologue and its recorded step. Its *recomputations* are the stretches from a
module's entry in the phase RECOMPUTE to the matching exit (`recomputations`). Its *skeleton* (`Skeleton`) is what is left
without them, without the ends of storages and without `detach`: autograd's bookkeeping, see the package's docstring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from autosac.trace import (
    Alloc,
    Collective,
    EventRecord,
    EventWait,
    Free,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Region,
    StepBegin,
    Storage,
    Trace,
    WorkWait,
)

DETACH = "aten.detach.default"
# Views that autograd takes of what it saves, and that a unit takes of what it returns and what has been saved otherwise.
_BOOKKEEPING = (DETACH, "aten.as_strided.default")
COPY = "aten.clone.default"
_HALVE = "aten.floor_divide.default"
NEVER = 1 << 60

_T = TypeVar("_T")


class NotDerivableError(Exception):
    """The rules do not cover this trace or plan: it has to be captured."""


class Recomputation(NamedTuple):
    """One recomputation: the module whose forward runs again, and its `rows[first:last]`, entry and exit included."""

    module: int
    first: int
    last: int


@dataclass(frozen=True)
class CapturedSteps:
    """A capture as one list of events."""

    trace: Trace

    @cached_property
    def rows(self) -> tuple[Any, ...]:
        """The prologue, then the recorded step (events; Any, for comparing `type(row)` narrows no variable)."""
        return self.trace.prologue + self.trace.events

    @property
    def split(self) -> int:
        """Where the recorded step begins in `rows`."""
        return len(self.trace.prologue)

    @cached_property
    def recomputations(self) -> tuple[Recomputation, ...]:
        """The recorded step's recomputations in order. NotDerivableError if one is not of a module."""
        found: list[Recomputation] = []
        depth = first = 0
        for i in range(self.split, len(self.rows)):
            row = self.rows[i]
            kind = type(row)
            if kind is ModuleEnter and row.phase is Phase.RECOMPUTE:
                if not depth:
                    first = i
                depth += 1
            elif kind is ModuleExit and row.phase is Phase.RECOMPUTE:
                depth -= 1
                if not depth:
                    found.append(Recomputation(row.module, first, i + 1))
            elif not depth and (kind is Op or kind is Collective) and row.phase is Phase.RECOMPUTE:
                raise NotDerivableError("something else than a module is recomputed")
        return tuple(found)

    @property
    def is_own(self) -> bool:
        """Whether the job checkpoints by itself: of units that a plan recomputes there are regions."""
        return bool(self.recomputations) and not self.trace.regions

    @cached_property
    def bookkeeping(self) -> frozenset[int]:
        """The signatures of views that no model asks for."""
        return frozenset(i for i, signature in enumerate(self.trace.signatures) if signature.name in _BOOKKEEPING)

    @cached_property
    def snapshots(self) -> frozenset[int]:
        """The rows of copies in a forward that no more than a recomputation reads: units copy what comes from outside before
        they change it (the statistics of a batch norm), in case that has to run again.
        """
        copies: dict[int, int] = {}
        read: set[int] = set()
        names = [signature.name for signature in self.trace.signatures]
        for i, row in enumerate(self.rows):
            kind = type(row)
            if kind is Op or kind is Collective:
                if row.phase is not Phase.RECOMPUTE:
                    read.update(row.inputs)
                is_copy = kind is Op and row.phase is Phase.FORWARD and names[row.signature] == COPY
                if is_copy and self.trace.storages[row.inputs[0]].phase is not Phase.FORWARD:
                    copies[row.outputs[0]] = i
        unread = copies.keys() - read
        made = [same for s in unread for same in (s, *self.earlier.get(s, ()))]
        return frozenset([*(copies[s] for s in unread), *(self.begins[s] for s in made)])

    @cached_property
    def ends(self) -> dict[int, int]:
        """Where each storage ends, in `rows`."""
        return {row.storage: i for i, row in enumerate(self.rows) if type(row) is Free}

    @cached_property
    def begins(self) -> dict[int, int]:
        """Where each storage begins, in `rows`."""
        return {row.storage: i for i, row in enumerate(self.rows) if type(row) is Alloc}

    @cached_property
    def changes(self) -> dict[int, list[int]]:
        """The rows that change each storage in place."""
        mutates = [signature.mutates for signature in self.trace.signatures]
        found: dict[int, list[int]] = {}
        for i in range(self.split, len(self.rows)):
            row = self.rows[i]
            if type(row) is Op and mutates[row.signature]:
                for position in mutates[row.signature]:
                    found.setdefault(row.inputs[position], []).append(i)
        return found

    def description(self, storage: int) -> tuple[object, ...]:
        """What tells a storage from others of its step, whatever the trace."""
        found: Storage = self.trace.storages[storage]
        source = self.trace.sources[found.source]
        return (found.phase, found.module, found.op, found.nbytes, source, found.stream)

    @cached_property
    def earlier(self) -> dict[int, tuple[int, ...]]:
        """For the recorded step's storages: the same storages of the steps before it, if they have the same ones.

        Storages of one description are the same in their order; a step that has fewer of them has them not. One that has more
        may have made the others before all these: pipelining runs one more microbatch, to learn shapes, before the first step.
        It is as the first one of the step, whose storages have the same ones of it as well, after those of the steps.
        """
        steps: list[dict[tuple[object, ...], list[int]]] = []
        for i, row in enumerate(self.rows):
            if type(row) is StepBegin or i == self.split:
                steps.append({})
            if type(row) is Alloc and steps:
                steps[-1].setdefault(self.description(row.storage), []).append(row.storage)
        if not steps:
            return {}
        last = steps[-1]
        before, extra = [], []
        for step in steps[:-1]:
            surplus = self._surplus(step, last)
            before.append({d: storages[len(surplus.get(d, ())) :] for d, storages in step.items()})
            extra.append(surplus)
        found: dict[int, tuple[int, ...]] = {}
        for description, storages in last.items():
            others = [step.get(description, []) for step in before]
            if others and all(len(same) == len(storages) for same in others):
                found.update(zip(storages, zip(*others, strict=True), strict=True))
                for surplus in extra:
                    for storage, same in zip(storages, surplus.get(description, ()), strict=False):
                        found[storage] += (same,)
        return found

    def _surplus(
        self, step: dict[tuple[object, ...], list[int]], last: dict[tuple[object, ...], list[int]]
    ) -> dict[tuple[object, ...], list[int]]:
        """What a step makes more often than the last one, if it makes all that before what it makes as often; else nothing."""
        counts = {d: len(storages) - len(last.get(d, storages)) for d, storages in step.items()}
        surplus = {d: step[d][:count] for d, count in counts.items() if count > 0}
        early = [self.begins[s] for storages in surplus.values() for s in storages]
        late = [self.begins[s] for d, storages in surplus.items() for s in step[d][len(storages) :]]
        return surplus if early and max(early) < min(late, default=NEVER) else {}

    def forward_rows(self) -> list[int]:
        """Operators, collectives, waits and allocations of the recorded step's forward, as positions in `rows`."""
        storages, bookkeeping, snapshots = self.trace.storages, self.bookkeeping, self.snapshots
        found: list[int] = []
        forward = False
        for i in range(self.split, len(self.rows)):
            if i in snapshots:
                continue
            row = self.rows[i]
            kind = type(row)
            if kind is Op or kind is Collective:
                forward = row.phase is Phase.FORWARD
                if forward and row.signature not in bookkeeping:
                    found.append(i)
            elif kind is Alloc:
                if storages[row.storage].phase is Phase.FORWARD:
                    found.append(i)
            elif kind is ModuleEnter or kind is ModuleExit:
                forward = row.phase is Phase.FORWARD
            elif kind is WorkWait and forward:
                found.append(i)
        return found

    def key(self, i: int, signatures: Sequence[int]) -> tuple[object, ...]:
        """What makes an operator, collective, wait or allocation the same as one in another trace.

        `signatures` translates this trace's signatures to numbers that both traces share.
        """
        row = self.rows[i]
        kind = type(row)
        if kind is Op:
            return (signatures[row.signature], row.module, row.stream)
        if kind is Alloc:
            storage = self.trace.storages[row.storage]
            return (storage.op, storage.nbytes, storage.module, storage.stream)
        if kind is Collective:
            return (row.kind, row.nbytes, row.module, row.stream)
        return (kind,)


class Tables:
    """Signatures, sources and groups of several traces of one job in one numbering, which begins with the first's."""

    def __init__(self, traces: Iterable[Trace]) -> None:
        self.traces = tuple(traces)
        first = self.traces[0]
        for trace in self.traces:
            if trace.modules != first.modules or trace.streams != first.streams:
                raise NotDerivableError("the captures have different modules or streams")
        self.signatures, self.signature_maps = _merged([trace.signatures for trace in self.traces])
        self.sources, self.source_maps = _merged([trace.sources for trace in self.traces])
        self.groups, self.group_maps = _merged([trace.groups for trace in self.traces])


def _merged(tables: list[tuple[_T, ...]]) -> tuple[tuple[_T, ...], list[list[int]]]:
    index: dict[_T, int] = {}
    maps = [[index.setdefault(value, len(index)) for value in table] for table in tables]
    return tuple(index), maps


def executions(trace: Trace, module: int) -> list[Region]:
    """The observed forwards of a module, in order."""
    return [region for region in trace.regions if region.module == module]


# ---- skeletons ------------------------------------------------------------------------------------------------------


class Skeleton:
    """The rows that a capture has under every way of checkpointing, and what lies between them.

    `rows` are positions in `steps.rows`; `keys` are what has to agree with another capture's skeleton; `inside` is for every
    row of the capture the module whose recomputation it lies in, or -1. `hooks`: rows that are left out as well, because
    another capture has them in a recomputation, each with its module (`gathers`).
    """

    def __init__(
        self, steps: CapturedSteps, tables: Tables, position: int, hooks: Mapping[int, int] | None = None
    ) -> None:
        self.steps = steps
        self.hooks = hooks or {}
        self._tables, self._position = tables, position
        self._signatures = tables.signature_maps[position]
        self.inside = [-1] * len(steps.rows)
        for block in steps.recomputations:
            self.inside[block.first : block.last] = [block.module] * (block.last - block.first)
        self.rows = [
            i
            for i, (row, module) in enumerate(zip(steps.rows, self.inside, strict=True))
            if module < 0 and i not in self.hooks and i not in steps.snapshots and not self._varies(row)
        ]
        self.keys = list(map(self.key, self.rows))

    @cached_property
    def gaps(self) -> list[range]:
        """The positions between row j - 1 and row j, for every j; there is one more gap than rows."""
        return [range(a + 1, b) for a, b in itertools.pairwise((-1, *self.rows, len(self.steps.rows)))]

    def without(self, hooks: Mapping[int, int]) -> Skeleton:
        """The skeleton without these rows."""
        return Skeleton(self.steps, self._tables, self._position, hooks) if hooks else self

    def _varies(self, row: Any) -> bool:
        kind = type(row)
        if kind is Free:
            return True
        if kind is Op:
            return row.signature in self.steps.bookkeeping or (
                row.phase is Phase.OPTIMIZER and self._corrects(self.steps.trace.signatures[row.signature].name)
            )
        if kind is Alloc or kind is RecordStream:
            storage = self.steps.trace.storages[row.storage]
            return storage.phase is Phase.RECOMPUTE or (storage.phase is Phase.OPTIMIZER and self._corrects(storage.op))
        return False

    def _corrects(self, operator: str) -> bool:
        """Whether an operator of the optimizer's phase halves how many tokens TorchTitan's experts got, as it does under the
        job's own checkpointing: the recomputation has counted them once more.
        """
        return operator == _HALVE and self.steps.is_own

    def key(self, i: int) -> tuple[object, ...]:
        """What has to agree in a row."""
        row = self.steps.rows[i]
        kind = type(row)
        if kind is Op or kind is Alloc or kind is Collective or kind is WorkWait:
            return self.steps.key(i, self._signatures)
        if kind is EventRecord or kind is EventWait:
            return (kind, row[1])
        if kind is RecordStream:
            return (kind, row.stream)
        return (kind, *row)

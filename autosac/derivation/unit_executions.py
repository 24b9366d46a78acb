"""Where the operators of a unit ran in a template: in one forward, and in the recomputation of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosac.derivation.gathers import Gather
from autosac.derivation.steps import CapturedSteps, Recomputation
from autosac.trace import Call, Op, TensorMeta


class CallRows(NamedTuple):
    """An operator's rows in the template: `forward` and `recomputed` (empty if its recomputation is not needed).

    Both are whole ranges, with what the operator allocated and freed inside. `made`: for each storage that it created (as
    observed), the template's storages in the forward and in the recomputation.
    """

    call: Call
    forward: range
    recomputed: range
    made: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class UnitExecution:
    """One forward of a unit and its recomputation. `completed` is the row in whose place what is not needed is let go.

    `empty`: for calls that read what has no memory (a cache without keys), the calls that made it.
    """

    calls: tuple[CallRows, ...]
    block: Recomputation
    completed: int
    gathers: tuple[Gather, ...] = ()
    empty: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Need:
    """Which calls of an execution have to run again, and which kept storages serve (all as observed).

    The rule of `autosac.integrations.recompute.recomputation`: what is asked for (`roots`) needs all that wrote it so far,
    and these need all that they read; what is kept is there.
    """

    def __init__(
        self,
        execution: UnitExecution,
        roots: Iterable[int],
        kept: frozenset[int],
        kept_calls: frozenset[int] = frozenset(),
    ) -> None:
        self.calls: set[int] = set()
        self.kept: set[int] = set()
        makers: dict[int, list[int]] = {}
        calls = [rows.call for rows in execution.calls]
        for c, call in enumerate(calls):
            for s in (*call.created, *(w for w in call.writes if w in makers)):
                makers.setdefault(s, []).append(c)
            if "wait_tensor" in call.op:
                for s in call.reads:
                    if s in makers:
                        makers[s].append(c)
        waiting = [(s, len(calls)) for s in roots]
        while waiting:
            storage, before = waiting.pop()
            if storage in kept:
                self.kept.add(storage)
                continue
            for maker in makers.get(storage, ()):
                empty = (c for c in execution.empty.get(maker, ()) if c not in kept_calls)
                for c in (maker, *empty):
                    if c < before and c not in self.calls:
                        self.calls.add(c)
                        waiting += [(s, c) for s in calls[c].reads]


def empty_inputs(calls: Sequence[CallRows], template: CapturedSteps) -> dict[int, tuple[int, ...]]:
    """`UnitExecution.empty`. What has no memory has no storage: of what looks like it, it is read in the order in which it was
    made.
    """
    found: dict[int, tuple[int, ...]] = {}
    made: list[tuple[TensorMeta, int]] = []
    rows, signatures = template.rows, template.trace.signatures
    for c, (call, forward, _, _) in enumerate(calls):
        if call.is_view or call.occurrence < 0:
            continue
        if call.outputs and not call.writes and all(result < 0 for result in call.results):
            made += [(meta, c) for meta in call.outputs]
            continue
        read: list[int] = []
        for row in (rows[i] for i in forward if type(rows[i]) is Op) if made else ():
            for storage, meta in zip(row.inputs, signatures[row.signature].inputs, strict=True):
                position = next((k for k, (other, _) in enumerate(made) if storage < 0 and other == meta), -1)
                if position >= 0:
                    read.append(made.pop(position)[1])
        if read:
            found[c] = tuple(read)
    return found

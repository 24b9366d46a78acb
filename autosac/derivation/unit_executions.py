"""Where the operators of a unit ran in a template: in one forward, and in the recomputation of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autosac.derivation.gathers import Gather
from autosac.derivation.steps import Recomputation
from autosac.trace import Call


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
    """One forward of a unit and its recomputation. `completed` is the row in whose place what is not needed is let go."""

    calls: tuple[CallRows, ...]
    block: Recomputation
    completed: int
    gathers: tuple[Gather, ...] = ()


class Need:
    """Which calls of an execution have to run again, and which kept storages serve (all as observed).

    The rule of `autosac.integrations.recompute.recomputation`: what is asked for (`roots`) needs all that wrote it so far,
    and these need all that they read; what is kept is there.
    """

    def __init__(self, execution: UnitExecution, roots: Iterable[int], kept: frozenset[int]) -> None:
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
            for c in makers.get(storage, ()):
                if c < before and c not in self.calls:
                    self.calls.add(c)
                    waiting += [(s, c) for s in calls[c].reads]

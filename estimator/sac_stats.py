"""Statistics of one module (AUTO-SAC section 5.3.2): SACModStats, SACModGreedyOrder, SACModTradeoffStats.

`SACModStats` lists what a policy sees in the module's forward, operator by operator, with the groups of
`sac_rules.py`. `SACModGreedyOrder` ranks the groups by MSPS = memory / recomputation time.
`SACModTradeoffStats` accumulates them in this order: what is discarded against what it costs. Memory is in
bytes rounded to the allocator's blocks, time in milliseconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from autosac.estimator.sac_rules import OperatorGroup
from autosac.solvers import Closure, LocalItem, LocalProblem, LocalSolution
from autosac.trace import TensorMeta


class SACOperator(NamedTuple):
    """One operator of a module's forward.

    `memory_bytes`: what keeping its results holds between forward and backward. `runtime_ms`: what running it
    again takes. `outputs` is the fingerprint of its key (`name`, `occurrence`); `inplace_parent` the index of
    the operator that made what this one writes to (its own, if others write to its result).
    """

    name: str
    occurrence: int
    runtime_ms: float
    memory_bytes: int
    view_like: bool
    random: bool
    inplace_parent: int | None
    must_save: bool
    outputs: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SACModStats:
    """What a policy can decide in one module; positions in `operators` are those of the region's calls.

    `implicit_bytes`: what autograd alone would hold between forward and backward. `boundary_bytes`: inputs
    that would have been freed before the backward and that checkpointing holds. `refusal`: why the module
    cannot be checkpointed, if so. `closure`: what runs again when some of the groups are kept; without one, all others do.
    `closed`: the positions of the closure's operators.
    """

    module: str
    region: int
    operators: tuple[SACOperator, ...]
    groups: tuple[OperatorGroup, ...]
    implicit_bytes: int
    boundary_bytes: int
    refusal: str | None = None
    closure: Closure | None = None
    closed: tuple[int, ...] = ()

    @property
    def runtime_ms(self) -> float:
        """Time to recompute everything."""
        return math.fsum(operator.runtime_ms for operator in self.operators)

    @property
    def memory_bytes(self) -> int:
        """Memory of all results that a policy could keep."""
        return sum(operator.memory_bytes for operator in self.operators)

    def local_problem(self) -> LocalProblem:
        """The groups as items for the local solvers."""
        return LocalProblem(items=tuple(self._item(group) for group in self.groups), closure=self.closure)

    def _item(self, group: OperatorGroup) -> LocalItem:
        operators = self.operators
        if len(group.members) == 1:
            alone = operators[group.members[0]]
            return LocalItem(alone.memory_bytes, alone.runtime_ms, group.forced)
        return LocalItem(
            sum(operators[i].memory_bytes for i in group.members),
            math.fsum(operators[i].runtime_ms for i in group.members),
            group.forced,
        )

    def operators_again(self, kept_groups: Collection[int]) -> frozenset[int]:
        """The operators that launch something and run again if these groups are kept."""
        if self.closure is not None:
            return frozenset(self.closed[c] for c in self.closure.needed(kept_groups)[0])
        members = [i for g, group in enumerate(self.groups) if g not in kept_groups for i in group.members]
        return frozenset(i for i in members if not self.operators[i].view_like)

    def kept_operators(self, solution: LocalSolution) -> frozenset[int]:
        """Indices of the operators that a local solution keeps."""
        return frozenset(i for item in solution.kept for i in self.groups[item].members)


@dataclass(frozen=True, slots=True, kw_only=True)
class SACModGreedyOrder:
    """Positions of the groups: always stored, always recomputed, and the others by descending MSPS (bytes/s).

    Groups without time come first (infinite MSPS: discarding them costs nothing), those without memory last.
    """

    stored: tuple[int, ...]
    recomputed: tuple[int, ...]
    ranked: tuple[int, ...]
    msps: tuple[float, ...]

    @staticmethod
    def of(problem: LocalProblem) -> SACModGreedyOrder:
        """The order in which `autosac.solvers.greedy` discards."""
        items = problem.items
        free = [i for i, item in enumerate(items) if item.forced is None]
        msps = {i: _msps(items[i]) for i in free}
        ranked = tuple(sorted(free, key=lambda i: (-msps[i], i)))
        return SACModGreedyOrder(
            stored=tuple(i for i, item in enumerate(items) if item.forced is True),
            recomputed=tuple(i for i, item in enumerate(items) if item.forced is False),
            ranked=ranked,
            msps=tuple(msps[i] for i in ranked),
        )


def _msps(item: LocalItem) -> float:
    """Memory saved per second of recomputation."""
    if item.recompute_ms == 0:
        return math.inf if item.memory_bytes else 0.0
    return item.memory_bytes / item.recompute_ms * 1e3


class TradeoffPoint(NamedTuple):
    """After discarding `group` (-1: only what is always recomputed): sums of bytes and recomputation."""

    group: int
    discarded_bytes: int
    recompute_ms: float
    msps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SACModTradeoffStats:
    """The trade-off curve in MSPS order.

    `points` starts with what is recomputed at any budget and ends with everything discarded that may be.
    Fractions are of `memory_bytes` and `runtime_ms`, those of all operators of the module.
    """

    points: tuple[TradeoffPoint, ...]
    order: SACModGreedyOrder
    stored_bytes: int
    discardable_bytes: int
    memory_bytes: int
    runtime_ms: float

    def curve(self) -> tuple[tuple[float, float], ...]:
        """(discarded fraction of `discardable_bytes`, recomputed fraction of `runtime_ms`), convex.

        Only what a budget decides counts: groups that cost no time are gone from the start, those that take
        no memory stay. From x = 0 to 1; one point (0, y) if nothing is left to decide.
        """
        free_bytes = self.memory_bytes - self.stored_bytes - self.discardable_bytes
        scale = 1 / self.runtime_ms if self.runtime_ms > 0 else 0.0
        points: dict[float, float] = {}
        for point in self.points:
            discarded = point.discarded_bytes - free_bytes
            if discarded >= 0:
                x = discarded / self.discardable_bytes if self.discardable_bytes else 0.0
                points.setdefault(x, point.recompute_ms * scale)
        return tuple(points.items())


@functools.lru_cache(maxsize=4096)
def tradeoff(problem: LocalProblem) -> SACModTradeoffStats:
    """Accumulate the groups in MSPS order (5.3.3, steps 1 to 3). Equal problems share one curve."""
    order = SACModGreedyOrder.of(problem)
    items = problem.items
    discarded = sum(items[i].memory_bytes for i in order.recomputed)
    spent = [items[i].recompute_ms for i in order.recomputed]
    points = [TradeoffPoint(-1, discarded, math.fsum(spent), math.nan)]
    for i, msps in zip(order.ranked, order.msps, strict=True):
        discarded += items[i].memory_bytes
        spent.append(items[i].recompute_ms)
        points.append(TradeoffPoint(i, discarded, math.fsum(spent), msps))
    return SACModTradeoffStats(
        points=tuple(points),
        order=order,
        stored_bytes=problem.stored_bytes,
        discardable_bytes=sum(items[i].memory_bytes for i in problem.free()),
        memory_bytes=sum(item.memory_bytes for item in items),
        runtime_ms=math.fsum(item.recompute_ms for item in items),
    )

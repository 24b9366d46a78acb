"""What runs again when some results of a unit are kept: the needed operators' closure, as plain numbers.

A backward asks for some results of the unit's forward. One that is kept is there; another one needs all operators that wrote
it, and these need all that they read, as it was before them. With k_i = 1 if item i (operators decided as one) is kept,
d_s = 1 if result s is asked for, r_c = 1 if operator c runs again, and i(s) the item of the operator that made s:

    minimise    sum_c t_c r_c
    subject to  d_s >= 1                      every result s that the backward asks for
                d_s >= r_c                    every operator c, every s that it reads
                r_m >= d_s - k_i(s)           every m that made or wrote s (before c, where c asks)
                sum_s a_s d_s k_i(s) <= B     what is kept and not needed is let go after the forward
                k_i = 1 / k_i = 0             for forced items

This is what `autosac.integrations.recompute` does while it runs, and `Need` in `autosac.derivation` on a trace. A problem
whose operators all have to run unless they are kept (the additive one of AUTO-SAC) is the case in which the backward asks for
every result and no operator reads any (`additive`).

Solvers: the whole curve by a Pareto sweep (`frontier.py`), its convex hull by minimum cuts (`min_cut.py`), one budget by a
MILP (`local_ilp.py`), all units together (`joint.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from autosac.errors import UsageError


class Operator(NamedTuple):
    """An operator of a unit's forward: what running it again takes, and the results of the unit that it reads."""

    recompute_ms: float
    reads: tuple[int, ...] = ()


class UnitResult(NamedTuple):
    """Memory that a unit's forward makes: its bytes, the item with which it is kept, and who made or wrote it, ascending."""

    memory_bytes: int
    item: int
    makers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Closure:
    """A unit's operators in the order of its forward, their results, and those that the backward asks for.

    UsageError if operators or results are referred to that are not there, or an operator reads what nobody made before it.
    """

    operators: tuple[Operator, ...]
    results: tuple[UnitResult, ...]
    asked: tuple[int, ...]

    def __post_init__(self) -> None:
        for s, result in enumerate(self.results):
            ordered = sorted(set(result.makers))
            if (
                not ordered
                or list(result.makers) != ordered
                or not 0 <= ordered[0] <= ordered[-1] < len(self.operators)
            ):
                raise UsageError(f"result {s} needs makers among the operators, in ascending order: {result}")
            if result.memory_bytes < 0:
                raise UsageError(f"result {s} has a negative memory: {result}")
        for c, operator in enumerate(self.operators):
            if not (operator.recompute_ms >= 0 and math.isfinite(operator.recompute_ms)):
                raise UsageError(f"operator {c} has an impossible time: {operator}")
            for s in operator.reads:
                if not 0 <= s < len(self.results) or self.results[s].makers[0] >= c:
                    raise UsageError(f"operator {c} reads result {s}, which is not made before it")
        if any(not 0 <= s < len(self.results) for s in self.asked):
            raise UsageError("the backward asks for a result that is not there")

    def needed(self, kept_items: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The operators that run again if these items are kept, and the kept results that serve for that."""
        run: set[int] = set()
        serving: set[int] = set()
        waiting = [(s, len(self.operators)) for s in self.asked]
        while waiting:
            s, before = waiting.pop()
            result = self.results[s]
            if result.item in kept_items:
                serving.add(s)
                continue
            for c in result.makers:
                if c < before and c not in run:
                    run.add(c)
                    waiting += [(read, c) for read in self.operators[c].reads]
        return frozenset(run), frozenset(serving)

    def measured(self, kept_items: Collection[int]) -> tuple[int, float]:
        """Bytes held and milliseconds spent if these items are kept."""
        run, serving = self.needed(kept_items)
        held = sum(self.results[s].memory_bytes for s in serving)
        return held, math.fsum(self.operators[c].recompute_ms for c in sorted(run))


@functools.lru_cache(maxsize=4096)
def additive(items: tuple[tuple[int, float, bool | None], ...]) -> Closure:
    """The closure of a problem in which every item runs again unless it is kept."""
    return Closure(
        operators=tuple(Operator(ms) for _, ms, _ in items),
        results=tuple(UnitResult(memory, i, (i,)) for i, (memory, _, _) in enumerate(items)),
        asked=tuple(range(len(items))),
    )

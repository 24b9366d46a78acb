"""The closure of what runs again in a unit (`autosac.solvers.closure`), from the calls that a policy sees in its forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autosac.estimator.sac_rules import OperatorGroup
from autosac.solvers import Closure, Operator, UnitResult
from autosac.trace import Call


def makers_of(calls: Sequence[Call]) -> dict[int, tuple[int, ...]]:
    """The calls that each storage of a region needs: who made it, wrote to it, or waited for it. Those of others are left out.

    The rule of `autosac.integrations.recompute.recomputation`.
    """
    makers: dict[int, list[int]] = {}
    for c, call in enumerate(calls):
        for s in (*call.created, *(s for s in call.writes if s in makers)):
            makers.setdefault(s, []).append(c)
        if "wait_tensor" in call.op:
            for s in call.reads:
                if s in makers:
                    makers[s].append(c)
    return {s: tuple(dict.fromkeys(found)) for s, found in makers.items()}


def ever_needed(calls: Sequence[Call], asked: Collection[int]) -> dict[int, None]:
    """The calls that run again if nothing is kept and the backward asks for these storages, ascending."""
    makers = makers_of(calls)
    waiting = [(s, len(calls)) for s in asked]
    found: set[int] = set()
    while waiting:
        storage, before = waiting.pop()
        for c in makers.get(storage, ()):
            if c < before and c not in found:
                found.add(c)
                waiting += [(s, c) for s in calls[c].reads]
    return dict.fromkeys(sorted(found))


def closure_of(
    calls: Sequence[Call],
    groups: Sequence[OperatorGroup],
    asked: Collection[int],
    runtime_ms: Sequence[float],
    bytes_of: Callable[[int], int],
) -> Closure:
    """The closure of a region whose backward asks for these storages; items are the groups' positions.

    `runtime_ms` by call; `bytes_of` a storage, what keeping it holds. Calls that nothing ever needs are left out.
    """
    makers = makers_of(calls)
    needed = ever_needed(calls, asked)
    operator = {c: position for position, c in enumerate(needed)}
    wanted = {s for s in asked if s in makers} | {s for c in needed for s in calls[c].reads if s in makers}
    item = {c: i for i, group in enumerate(groups) for c in group.members}
    found: dict[int, int] = {}
    results: list[UnitResult] = []
    for s in sorted(wanted, key=lambda s: (makers[s], s)):
        own = tuple(operator[c] for c in makers[s] if c in operator)
        if own and makers[s][0] in operator:
            found[s] = len(results)
            results.append(UnitResult(bytes_of(s), item[makers[s][0]], own))
    operators = []
    for c, position in operator.items():
        reads = {found[s] for s in calls[c].reads if s in found and results[found[s]].makers[0] < position}
        operators.append(Operator(runtime_ms[c], tuple(sorted(reads))))
    return Closure(tuple(operators), tuple(results), tuple(sorted(found[s] for s in asked if s in found)))

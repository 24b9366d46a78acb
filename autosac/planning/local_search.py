"""The last steps of the search: a few units of the best plan keep something else, and every such change is verified.

The solvers know of active memory, and take equal units for equal. What the allocator reserves beyond that depends on which
result is freed where. So a plan may leave some of the budget, or leave holes that another plan of the same length fills. With
x_u the policy of unit u (None: not checkpointed), a *move* gives some units other policies:

    saved = sum_u cost_u(x_u) - cost_u(x'_u)                     `GlobalUnit.cost_ms`, what the step pays
    added = max_p peak_p(x') - max_p peak_p(x)                   `GlobalProblem`, active memory

Moves are of one unit, of as many equal units as what is left allows, of all of them, or of two units of which one keeps more
and the other less (`Moves`). Those that save time by this are verified one after the other (`climb`): first those that fit
what is left of the budget, the ones that save most first; then those that only fit if the allocator finds room for them in its
holes, which are at most what it reserves beyond the active peak, the ones that save most for what they lack first. Of moves
with equal figures, which differ in the place of the unit, one comes early and the others late. The first that fits the
budget and shortens the simulated step is taken, and moves begin again from there.

What the step pays is an estimate. Where it says that nothing is gained by keeping a part of a unit (the host would pay for
that), it may be wrong for a single unit. So when no move is left, moves are priced again, by recomputation's own time.

The search ends when no move is left, or after `WORK` units of work: events that were simulated. That bounds it to about two
seconds of one core, and makes it the same on every machine.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from autosac.planning.candidates import Candidate, Verifier
from autosac.planning.planner import Costs, Goal, Planner
from autosac.plans import Plan
from autosac.simulation import Simulation
from autosac.solvers import LocalProblem, LocalSolution, frontier

WORK = 250_000
_WORK_OF_A_TRY = 500  # beside its events
_ALL_SETS = 6  # free items of which all sets are tried
_NEAR = 12  # policies on each side of the present one, on the unit's curve
_NEAR_IN_PAIRS = 6
_LOOKED_AT = 100_000  # items, in the sets of a unit's that differ little from the present one
_SHORTER = 1e-6  # of the step: less is rounding
_ADDED = ", then changed in single modules"  # to what a plan says of its method

Policy: TypeAlias = "LocalSolution | None"


class Move(NamedTuple):
    """Other policies for some units; what the step saves by that (ms), and what memory it takes (bytes)."""

    saved_ms: float
    added_bytes: int
    policies: tuple[tuple[int, Policy], ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal units that follow one policy, in order."""

    units: tuple[int, ...]
    policy: Policy
    options: tuple[Policy, ...]


class Moves:
    """The moves from one choice of policies to others, by the global problem with `costs`."""

    def __init__(self, planner: Planner, costs: Costs | None) -> None:
        self._problem, self._items = planner.reference(costs)
        units, points = self._problem.units, self._problem.points
        self._counts = self._problem.counts_at(range(len(points)))
        self._extras = np.zeros_like(self._counts)
        for p, point in enumerate(points):
            for u, nbytes in point.extras:
                self._extras[p, u] += nbytes
        self._related = [self._relatives(u) for u in range(len(units))]

    def _relatives(self, unit: int) -> frozenset[int]:
        """The units around this one and within it."""
        units = self._problem.units

        def around(u: int) -> Iterator[int]:
            while (u := units[u].parent) >= 0:
                yield u

        return frozenset(around(unit)) | {u for u in range(len(units)) if unit in around(u)}

    def of(self, chosen: Sequence[Policy], left_bytes: int) -> list[Move]:
        """All moves that save time. `left_bytes`: what is left of the budget."""
        peaks = self._peaks(chosen)
        groups = self._groups(chosen)
        found: dict[tuple[tuple[int, Policy], ...], Move] = {}
        for changes in itertools.chain(self._of_one_kind(groups, left_bytes), self._of_two(groups)):
            saved_ms = sum(self._cost_ms(u, chosen[u]) - self._cost_ms(u, policy) for u, policy in changes)
            if saved_ms > 0 and changes not in found:
                found[changes] = Move(saved_ms, self._added(peaks, chosen, changes), changes)
        return list(found.values())

    def _cost_ms(self, unit: int, policy: Policy) -> float:
        return 0.0 if policy is None else self._problem.units[unit].cost_ms(policy.recompute_ms)

    def _change(self, unit: int, policy: Policy) -> int:
        return 0 if policy is None else self._problem.units[unit].change_bytes(policy.kept_bytes)

    def _peaks(self, chosen: Sequence[Policy]) -> np.ndarray:
        kept = [None if policy is None else policy.kept_bytes for policy in chosen]
        return self._problem.peaks_bytes(kept)

    def _added(self, peaks: np.ndarray, chosen: Sequence[Policy], changes: Sequence[tuple[int, Policy]]) -> int:
        after = peaks.copy()
        for u, policy in changes:
            after += self._counts[:, u] * (self._change(u, policy) - self._change(u, chosen[u]))
            after += self._extras[:, u] * ((policy is not None) - (chosen[u] is not None))
        return int(after.max() - peaks.max())

    # ---- which ------------------------------------------------------------------------------------------------------

    def _groups(self, chosen: Sequence[Policy]) -> list[_Group]:
        members: dict[Hashable, list[int]] = defaultdict(list)
        for u, unit in enumerate(self._problem.units):
            allowed = unit.allowed and unit.lowest_change_bytes < 0
            if allowed and not any(chosen[other] for other in self._related[u]):
                members[replace(unit, name="", parent=-1), self._items[u], chosen[u]].append(u)
        return [
            _Group(tuple(units), chosen[units[0]], self._options(units[0], chosen[units[0]]))
            for units in members.values()
        ]

    def _options(self, unit: int, present: Policy) -> tuple[Policy, ...]:
        """Other policies for a unit: none, all sets of what may be kept if these are few, else the nearest on its curve and
        those that differ from the present one in one item, or exchange two.
        """
        problem, limits = self._items[unit], self._problem.units[unit]
        free = problem.free()
        found: dict[tuple[int, ...], LocalSolution] = {}
        sets: Sequence[tuple[int, ...]] = ((),)
        if len(free) <= _ALL_SETS:
            sets = [chosen for n in range(len(free) + 1) for chosen in itertools.combinations(free, n)]
        elif present is not None:
            sets = altered(problem, present)
        policies = [*(problem.solution(tuple(chosen)) for chosen in sets), *_near(problem, present)]
        for policy in policies:
            if limits.change_bytes(policy.kept_bytes) < 0 and _serves(problem, policy):
                found.setdefault(policy.kept, policy)
        if present is not None:
            found.pop(present.kept, None)
            return (None, *found.values())
        return tuple(found.values())

    def _of_one_kind(self, groups: Sequence[_Group], left_bytes: int) -> Iterator[tuple[tuple[int, Policy], ...]]:
        """The first or the last unit of a group, as many as what is left allows from either end, or all."""
        for group in groups:
            units = group.units
            for policy in group.options:
                each = self._change(units[0], policy) - self._change(units[0], group.policy)
                counts = {1, len(units)}
                if each > 0:
                    counts.add(min(len(units), max(1, left_bytes // each)))
                for count in sorted(counts):
                    for some in {units[:count], units[-count:]}:
                        yield tuple((u, policy) for u in some)

    def _of_two(self, groups: Sequence[_Group]) -> Iterator[tuple[tuple[int, Policy], ...]]:
        """One unit that recomputes less with one that recomputes more."""
        for more, less in itertools.product(groups, repeat=2):
            faster = self._nearest(more, less=True)
            slower = self._nearest(less, less=False)
            for u, v in ((more.units[0], less.units[-1]), (more.units[-1], less.units[0])):
                if u == v or v in self._related[u]:
                    continue
                for a, b in itertools.product(faster, slower):
                    yield tuple(sorted(((u, a), (v, b)), key=lambda change: change[0]))

    def _nearest(self, group: _Group, *, less: bool) -> list[Policy]:
        """The options nearest to a group's policy of those that cost less, or more."""
        unit = group.units[0]
        now = self._cost_ms(unit, group.policy)
        costs = [(self._cost_ms(unit, policy) - now, policy) for policy in group.options]
        chosen = [(abs(ms), policy) for ms, policy in costs if (ms < 0 if less else ms > 0)]
        return [policy for _, policy in sorted(chosen, key=lambda pair: pair[0])[:_NEAR_IN_PAIRS]]


def altered(problem: LocalProblem, present: LocalSolution) -> list[tuple[int, ...]]:
    """The sets that differ from the present one in one item, and those that have one for another; of large units those with
    the kept items that save least time for their memory, and the others that save most.
    """
    free, items = problem.free(), problem.items
    now = set(present.kept) & set(free)
    most = max(_NEAR, _LOOKED_AT // len(items))

    def ms_per_byte(i: int) -> float:
        return items[i].recompute_ms / items[i].memory_bytes

    kept, others = sorted(now), [i for i in free if i not in now]
    if len(free) + len(kept) * len(others) > most:
        kept = sorted(kept, key=ms_per_byte)[: math.isqrt(most)]
        others = sorted(others, key=ms_per_byte, reverse=True)[: math.isqrt(most)]
        free = (*kept, *others)
    sets = [tuple(sorted(now ^ {i})) for i in free]
    return sets + [tuple(sorted((now - {i}) | {j})) for i, j in itertools.product(kept, others)]


def _near(problem: LocalProblem, present: Policy) -> Sequence[LocalSolution]:
    """The policies of a unit's curve that are nearest to the present one."""
    policies = frontier(problem).policies
    if present is None:
        return policies[-2 * _NEAR :]
    at = sum(policy.kept_bytes <= present.kept_bytes for policy in policies)
    return policies[max(0, at - 1 - _NEAR) : at + _NEAR]


def _serves(problem: LocalProblem, policy: LocalSolution) -> bool:
    """Whether all that it keeps, and need not keep, serves the recomputation or the backward."""
    closure = problem.demand
    serving = {closure.results[s].item for s in closure.needed(policy.kept)[1]}
    return all(i in serving for i in policy.kept if problem.items[i].forced is None and problem.items[i].memory_bytes)


def in_order(moves: Sequence[Move], left_bytes: int, holes_bytes: int) -> list[Move]:
    """The moves that are worth trying, as the module's docstring says: `holes_bytes` is reserved and not active."""
    fitting = sorted((m for m in moves if m.added_bytes <= left_bytes), key=lambda m: (-m.saved_ms, m.policies[0][0]))
    lacking = sorted(
        (m for m in moves if left_bytes < m.added_bytes <= left_bytes + holes_bytes),
        key=lambda m: (-m.saved_ms / (m.added_bytes - left_bytes), m.policies[0][0]),
    )
    return [*_mixed(fitting), *_mixed(lacking)]


def _mixed(moves: Sequence[Move]) -> list[Move]:
    """In this order, but the second of moves with equal figures after the first of all others, and so on."""
    seen: dict[tuple[float, int], int] = defaultdict(int)
    turns: list[tuple[int, int]] = []
    for position, move in enumerate(moves):
        key = (round(move.saved_ms, 9), move.added_bytes)
        turns.append((seen[key], position))
        seen[key] += 1
    return [moves[position] for _, position in sorted(turns)]


class LocalSearch:
    """See the module's docstring."""

    def __init__(self, planner: Planner, verifier: Verifier) -> None:
        self._planner = planner
        self._verifier = verifier

    def climb(self, goal: Goal, best: Candidate, work: int = WORK) -> tuple[Candidate, int]:
        """The best plan found from this one on, itself if none is better; and how many were simulated."""
        tried: set[Hashable] = {best.plan.units}
        sets = {frozenset(unit.fqn for unit in best.plan.units)}
        tries = 0
        for costs in dict.fromkeys((best.costs, None)):
            best, more, work = self._climb(goal, best, costs, tried, sets, work)
            tries += more
        return best, tries

    def _climb(
        self,
        goal: Goal,
        best: Candidate,
        costs: Costs | None,
        tried: set[Hashable],
        sets: set[frozenset[str]],
        work: int,
    ) -> tuple[Candidate, int, int]:
        """By moves at these prices; also what is left of the work. `tried`: what was simulated, `sets`: their units' names."""
        chosen = self._planner.policies_of(best.plan, costs)
        if chosen is None:
            return best, 0, work
        moves = Moves(self._planner, costs)
        tries = 0
        while work > 0:
            better = None
            left_bytes = goal.budget_bytes - best.simulation.peak_bytes(goal.budget_kind)
            holes_bytes = 0
            if goal.budget_kind == "reserved":
                holes_bytes = best.simulation.peak_reserved_bytes - best.simulation.peak_active_bytes
            for move in in_order(moves.of(chosen, left_bytes), left_bytes, holes_bytes):
                after = _changed(chosen, dict(move.policies))
                plan = self._plan(best.plan, after)
                if plan.units in tried or not plan.units:
                    continue
                tried.add(plan.units)
                simulation = self._verifier.derived(plan)
                if simulation is None:
                    continue
                tries += 1
                names = frozenset(unit.fqn for unit in plan.units)
                cost = len(simulation.trace.events) + len(simulation.trace.prologue) + _WORK_OF_A_TRY
                work -= cost if names in sets else 3 * cost
                sets.add(names)
                if self._is_better(goal, simulation, best.simulation):
                    better = replace(best, plan=plan, simulation=simulation), after
                if better is not None or work <= 0:
                    break
            if better is None:
                break
            best, chosen = better
        return best, tries, work

    def _plan(self, plan: Plan, chosen: Sequence[Policy]) -> Plan:
        reasons = tuple(
            reason if reason.method.endswith(_ADDED) else replace(reason, method=reason.method + _ADDED)
            for reason in plan.reasons
        )
        kept = [None if policy is None else policy.kept for policy in chosen]
        return replace(self._planner.plan(kept), reasons=reasons, settings=plan.settings)

    @staticmethod
    def _is_better(goal: Goal, simulation: Simulation, than: Simulation) -> bool:
        if simulation.peak_bytes(goal.budget_kind) > goal.budget_bytes:
            return False
        return simulation.step_ms < (1 - _SHORTER) * than.step_ms


def _changed(chosen: Sequence[Policy], changes: Mapping[int, Policy]) -> tuple[Policy, ...]:
    return tuple(changes.get(u, policy) for u, policy in enumerate(chosen))

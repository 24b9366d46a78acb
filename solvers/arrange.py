"""Which of several equal units keeps what: no difference for the highest peak, but one for the allocator.

The caching allocator reserves more than is active, and how much more depends on which sizes are freed and taken in which
order. Two rules for that, measured by `python -m benchmarks.fragmentation`:

- `in_order`: the first of equal units keep the most. On Llama-3 8B, 70B and Qwen3 that reserves 0.0 to 0.6 GiB less than the
  reverse, and in two of 21 cases 0.1 GiB more. A plan of few runs of equal layers is also one that people can read.
- `levelled`: equal units keep nearly the same. The plan with the least recomputation mixes two policies that lie next to
  each other on the convex hull of the unit's trade-off curve and may differ by much. Two that lie next to each other on the
  curve itself differ by an operator or two. That reserves up to 3 GiB less, at the cost of how far the curve is from its hull,
  which may be more than the memory is worth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from autosac.solvers.local import LocalProblem, LocalSolution, LocalSolver
from autosac.solvers.problem import GlobalProblem


def in_order(
    problem: GlobalProblem, items: Sequence[LocalProblem], budget_bytes: int, policies: Mapping[int, LocalSolution]
) -> Mapping[int, LocalSolution]:
    """The same policies, those of equal units in the order of what they keep.

    The most first; the least first where a peak would exceed the budget so; and as they are if it still would.
    """
    for most_first in (True, False):
        ordered: dict[int, LocalSolution] = {}
        for units in _equal(problem, items, policies):
            swapped = sorted((policies[u] for u in units), key=lambda p: (p.kept_bytes, p.kept), reverse=most_first)
            ordered |= zip(units, swapped, strict=True)
        if _peak_bytes(problem, ordered) <= budget_bytes:
            return ordered
    return policies


def levelled(
    problem: GlobalProblem,
    items: Sequence[LocalProblem],
    budget_bytes: int,
    solve: LocalSolver,
    policies: dict[int, LocalSolution],
) -> dict[int, LocalSolution]:
    """Policies that share out evenly among equal units what these keep in all; as they are if a peak would exceed the budget.

    All units may keep their average; what that leaves lets as many of them as possible keep the next larger set.
    """
    level: dict[int, LocalSolution] = {}
    for units in _equal(problem, items, policies):
        local = items[units[0]]
        total_bytes = sum(policies[u].kept_bytes for u in units)
        low = solve(local, total_bytes // len(units))
        high = _next(local, solve, low)
        rest_bytes = total_bytes - low.kept_bytes * len(units)
        more = 0 if high is None else min(len(units), rest_bytes // (high.kept_bytes - low.kept_bytes))
        level |= {u: high if high is not None and k < more else low for k, u in enumerate(units)}
    return level if _peak_bytes(problem, level) <= budget_bytes else policies


def _next(local: LocalProblem, solve: LocalSolver, low: LocalSolution) -> LocalSolution | None:
    """The solution for the least budget at which more is kept than in `low`, None if there is none."""
    found = None
    for size in sorted({item.memory_bytes for item in local.items}):
        high = solve(local, low.kept_bytes + size)
        while high.kept_bytes > low.kept_bytes:
            found, high = high, solve(local, high.kept_bytes - 1)
        if found is not None:
            break
    return found


def _equal(problem: GlobalProblem, items: Sequence[LocalProblem], policies: Iterable[int]) -> Iterable[list[int]]:
    """The units with a policy, those that are equal together, each group in order."""
    equal: dict[Hashable, list[int]] = defaultdict(list)
    for u in sorted(policies):
        equal[replace(problem.units[u], name=""), items[u].items].append(u)
    return equal.values()


def kept_by_units(problem: GlobalProblem, policies: Mapping[int, LocalSolution]) -> list[int | None]:
    """What each unit keeps under these policies, None for units without one."""
    return [policies[u].kept_bytes if u in policies else None for u in range(len(problem.units))]


def _peak_bytes(problem: GlobalProblem, policies: Mapping[int, LocalSolution]) -> int:
    return int(problem.peaks_bytes(kept_by_units(problem, policies)).max())

"""Best-first search with lower bounds: the least of many values, most of which are never worked out.

Every candidate has a lower bound of its value. The candidate with the smallest bound, or another priority, is taken; its
`step` says what is known of it now: a tighter bound (it goes back), its value, or work to do, which runs beside other work.
When no candidate's bound is below (1 - gap) times the best value found, the search ends:

    for every candidate c that was not worked out   value(c) >= bound(c) >= (1 - gap) best

so no value is below (1 - gap) best: with gap 0 the best is the least. It holds for every order in which candidates are taken
and work is finished.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
Asked = TypeVar("Asked", bound=Hashable, contravariant=True)


@dataclass(frozen=True, slots=True)
class Bound:
    """The candidate's value is no less."""

    value: float


@dataclass(frozen=True, slots=True)
class Value:
    """The candidate's value; infinite if it is no solution."""

    value: float


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Work that has to be done to know more; equal keys are the same work, which may serve several candidates."""

    key: Hashable
    content: Any


class CandidateSteps(Protocol[Asked]):
    """What a search asks of its candidates."""

    def step(self, candidate: Asked, bound: float, best: float) -> Bound | Value | PendingWork:
        """What is known of a candidate now. A Bound is larger than the one given, or everything is known of it."""

    def finished(self, work: PendingWork, future: Future[Any]) -> None:
        """Work has been done, or has failed: take note."""


@dataclass(kw_only=True)
class SearchState(Generic[K]):
    """What a search has found so far. `pruned`: candidates whose bound was reason enough."""

    best: float = math.inf
    best_candidate: K | None = None
    values: dict[K, float] = field(default_factory=dict)
    pruned: dict[K, float] = field(default_factory=dict)
    proven: bool = False

    def is_open(self, bound: float, gap: float) -> bool:
        """Whether a candidate with this bound may be better than the best by more than the gap. As the best only falls, what
        is not open never will be.
        """
        return bound < self.best * (1 - gap) if math.isfinite(self.best) else math.isfinite(bound)

    @property
    def closest(self) -> tuple[K, float] | None:
        """The pruned candidate with the least bound, and the bound; None if none has a finite one."""
        finite = [(candidate, bound) for candidate, bound in self.pruned.items() if math.isfinite(bound)]
        return min(finite, key=lambda item: item[1], default=None)


def best_first(
    candidates: Iterable[tuple[K, float]],
    steps: CandidateSteps[K],
    submit: Callable[[Any], Future[Any]],
    *,
    at_once: int = 1,
    gap: float = 0.0,
    outcome: SearchState[K] | None = None,
    on_change: Callable[[SearchState[K], float], None] = lambda _, __: None,
    priority: Callable[[K, float], float] = lambda _, bound: bound,
) -> SearchState[K]:
    """Search. `candidates` come with their bounds; of equal ones the first is preferred. `submit` starts work. `priority`: of
    a candidate with a bound, the least first; others than the bounds themselves put off what takes long to work out.

    `outcome` is filled as the search goes on: who is interrupted has what was found. `on_change` gets it, and the least
    bound of what is open.
    """
    found: SearchState[K] = outcome if outcome is not None else SearchState()
    numbers = itertools.count()
    heap = [(priority(candidate, bound), next(numbers), candidate, bound) for candidate, bound in candidates]
    heapq.heapify(heap)
    running: dict[Future[Any], PendingWork] = {}
    waiting: dict[Hashable, list[tuple[float, int, K, float]]] = {}

    try:
        while True:
            while heap and len(running) < at_once:
                _, number, candidate, bound = entry = heapq.heappop(heap)
                if not found.is_open(bound, gap):
                    found.pruned[candidate] = bound
                    continue
                known = steps.step(candidate, bound, found.best)
                if isinstance(known, Value):
                    found.values[candidate] = known.value
                    if known.value < found.best:
                        found.best, found.best_candidate = known.value, candidate
                elif isinstance(known, Bound):
                    bound = max(bound, known.value)
                    heapq.heappush(heap, (priority(candidate, bound), number, candidate, bound))
                elif known.key in waiting:
                    waiting[known.key].append(entry)
                else:
                    waiting[known.key] = [entry]
                    running[submit(known.content)] = known
            least = min((entry[3] for entries in (heap, *waiting.values()) for entry in entries), default=math.inf)
            on_change(found, least)
            if not running or not found.is_open(least, gap):
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                work = running.pop(future)
                steps.finished(work, future)
                for entry in waiting.pop(work.key):
                    heapq.heappush(heap, entry)
    finally:  # who is interrupted is told, too, what bounds have ruled out
        for _, _, candidate, bound in itertools.chain(heap, *waiting.values()):
            if not found.is_open(bound, gap):
                found.pruned[candidate] = bound
    found.proven = True
    return found

"""How fast a search is, and random sampling of the same space beside it.

Sampling takes layouts in random order, without bounds, for as long as the search took, with the same workers.
"""

from __future__ import annotations

import math
import random
import resource
import time
from concurrent.futures import Future
from typing import Any

from autosac.configurations.evaluating.workers import Workers
from autosac.configurations.running.engine import PendingWork, SearchState, Value, best_first
from autosac.configurations.running.search import TitanSearch
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.request import SearchRequest


class Watch:
    """When the best became what it was."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.bests: list[tuple[float, float]] = []

    def note(self, best: float) -> None:
        """After a change."""
        if math.isfinite(best) and (not self.bests or best < self.bests[-1][1]):
            self.bests.append((time.monotonic() - self.begin, best))

    def within(self, best: float, share: float = 0.01) -> float | None:
        """Seconds until the best was within a share of `best`."""
        return next((seconds for seconds, found in self.bests if found <= best * (1 + share)), None)


class Sampling:
    """Layouts without bounds, until time is over (`autosac.configurations.running.engine.CandidateSteps`)."""

    def __init__(self, search: TitanSearch, watch: Watch, seconds: float) -> None:
        self._search, self._watch, self._end = search, watch, time.monotonic() + seconds
        self._values: dict[Layout, float] = {}

    def step(self, candidate: Layout, bound: float, best: float) -> Value | PendingWork:
        """Work while there is time."""
        self._watch.note(best)
        if candidate in self._values or time.monotonic() > self._end:
            return Value(self._values.get(candidate, math.inf))
        return PendingWork(candidate, self._search.task(candidate, math.inf))

    @property
    def tried(self) -> int:
        """How many layouts were worked out."""
        return len(self._values)

    def finished(self, work: PendingWork, future: Future[Any]) -> None:
        """Take the best that fits."""
        rows = future.result().get("rows", ()) if future.exception() is None else ()
        assert isinstance(work.key, Layout)
        self._values[work.key] = min((r["step_ms"] for r in rows if r["fits"]), default=math.inf)


def measure(request: SearchRequest, sample_seconds: float | None) -> None:
    """Search, then sample; print both. Processor time is that of all processes: it hardly depends on what else runs."""
    spent = _processor_s()
    with searching(request) as search:
        watch = Watch()
        result = search.run(on_change=lambda outcome: watch.note(outcome.best))
        seconds = time.monotonic() - watch.begin
        counts = result.counts
        best = result.best
        print(f"search: {seconds:.0f} s, proven: {result.proven}, {counts.legal} layouts")
        print(
            f"  evaluations a minute {60 * counts.captured / seconds:.1f}, "
            f"ruled out {counts.bounded / counts.legal:.1%}"
        )
        if best is not None:
            print(
                f"  best {best.measured.step_ms:,.1f} ms: {best.name}; within 1 % after {watch.within(best.score):.0f} s"
            )
    print(f"  processor time {_processor_s() - spent:.0f} s")
    if best is None:
        return
    with searching(request) as search:
        search.first_bounds()  # processes have begun
        _sample(search, search.workers, best.score, seconds if sample_seconds is None else sample_seconds)


def _processor_s() -> float:
    """Of this process and of those that it waited for."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _sample(search: TitanSearch, workers: Workers, best: float, seconds: float) -> None:
    watch = Watch()
    sampling = Sampling(search, watch, seconds)
    order = list(search.layouts)
    random.Random(0).shuffle(order)
    outcome: SearchState[Layout] = SearchState()
    best_first([(layout, 0.0) for layout in order], sampling, workers.submit, at_once=workers.count, outcome=outcome)
    watch.note(outcome.best)
    tried = sampling.tried
    reached = watch.within(best)
    found = f"{outcome.best:,.1f} ms" if math.isfinite(outcome.best) else "nothing that fits"
    print(f"random sampling: {seconds:.0f} s, {tried} layouts, best {found}; within 1 % ", end="")
    print("not reached" if reached is None else f"after {reached:.0f} s")

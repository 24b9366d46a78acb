"""The fastest settings of an eager training step: a search over all combinations of the values that the caller names.

What is maximised is work in a second: `work(settings)` over the step time, where work is the batch, or whatever the settings
make a step do. No checkpointing makes a step shorter, so the step without any bounds the rate of every plan for it, and
settings whose bound is not above the best are not planned for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from autosac.configurations.engine import Bound, PendingWork, Value, best_first
from autosac.errors import AutosacError, InfeasibleError, UsageError
from autosac.planning.closed_loop import Goal, PlanningCaptures, make_plan
from autosac.plans import Plan
from autosac.simulation import Simulation

Settings = Mapping[str, Any]
_MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class EagerRow:
    """Settings that were tried. `rate`: work in a second. Without a plan the step fits as it is; without a rate it does not
    fit or could not run (`reason`).
    """

    settings: Settings
    simulation: Simulation | None = None
    plan: Plan | None = None
    rate: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class EagerResult:
    """All settings that were worked out, best first. `ruled_out`: how many a bound was reason enough to leave out."""

    rows: tuple[EagerRow, ...]
    ruled_out: int

    @property
    def best(self) -> EagerRow:
        """The fastest that fits. InfeasibleError if none does."""
        if not self.rows or self.rows[0].rate == 0.0:
            reasons = "; ".join(dict.fromkeys(row.reason for row in self.rows))
            raise InfeasibleError(f"no settings fit: {reasons}")
        return self.rows[0]


def combinations(space: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    """Every choice of one value for each name. UsageError for an empty list, and for more than can be tried."""
    for name, values in space.items():
        if not values:
            raise UsageError(f"space: {name} has no values")
    if math.prod(map(len, space.values())) > _MOST:
        raise UsageError(f"space: more than {_MOST:,} combinations of settings; name fewer values")
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


class EagerSearch:
    """The steps of a search (`autosac.configurations.engine.CandidateSteps`); a candidate is the position of its settings."""

    def __init__(
        self,
        settings: Sequence[Settings],
        captures: Callable[[Settings], PlanningCaptures],
        work: Callable[[Settings], float],
        goal: Goal,
        progress: Callable[[str], None],
    ) -> None:
        self._settings, self._captures, self._work, self._goal = settings, captures, work, goal
        self._progress = progress
        self._plain: dict[int, tuple[PlanningCaptures, Simulation]] = {}
        self._rows: dict[int, EagerRow] = {}

    def run(self) -> EagerResult:
        """Search to the end, one after the other."""
        found = best_first([(i, 0.0) for i in range(len(self._settings))], self, _at_once)
        rows = sorted(self._rows.values(), key=lambda row: -row.rate)
        return EagerResult(rows=tuple(rows), ruled_out=len(found.pruned))

    def step(self, candidate: int, bound: float, best: float) -> Bound | Value | PendingWork:
        """Values are seconds for each unit of work."""
        if candidate in self._rows:
            rate = self._rows[candidate].rate
            return Value(1 / rate if rate else math.inf)
        if candidate not in self._plain:
            return PendingWork(("plain", candidate), lambda: self._capture(candidate))
        least = 1 / self._rate(candidate, self._plain[candidate][1])
        return Bound(least) if least > bound else PendingWork(("plan", candidate), lambda: self._plan(candidate))

    def finished(self, work: PendingWork, future: Future[Any]) -> None:
        """Nothing: the work has taken note itself."""
        future.result()

    def _rate(self, candidate: int, simulation: Simulation) -> float:
        amount = self._work(self._settings[candidate])
        if not amount > 0:
            raise UsageError(f"work of {dict(self._settings[candidate])} is {amount}: it must be above 0")
        return amount / simulation.step_ms * 1e3

    def _capture(self, candidate: int) -> None:
        settings = self._settings[candidate]
        self._progress(f"simulating {dict(settings)}")
        try:
            captures = self._captures(settings)
            self._plain[candidate] = (captures, captures.observed())
        except AutosacError as e:
            self._rows[candidate] = EagerRow(settings=settings, reason=str(e))

    def _plan(self, candidate: int) -> None:
        settings, (captures, plain) = self._settings[candidate], self._plain.pop(candidate)
        if plain.peak_bytes(self._goal.budget_kind) <= self._goal.budget_bytes:
            self._rows[candidate] = EagerRow(settings=settings, simulation=plain, rate=self._rate(candidate, plain))
            return
        try:
            planned = make_plan(captures, self._goal, self._progress)
        except AutosacError as e:
            self._rows[candidate] = EagerRow(settings=settings, reason=str(e))
            return
        rate = self._rate(candidate, planned.simulation)
        self._rows[candidate] = EagerRow(settings=settings, simulation=planned.simulation, plan=planned.plan, rate=rate)


def _at_once(content: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    content()
    future.set_result(None)
    return future

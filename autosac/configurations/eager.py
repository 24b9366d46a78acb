"""The fastest settings of an eager training step: a search over all combinations of the values that the caller names.

What is maximised is work in a second: `work(settings)` over the step time, where work is the batch, or whatever the settings
make a step do; or work for the price of the GPU. No checkpointing makes a step shorter, so the step without any bounds the
rate of every plan for it, and settings whose bound is not above the best are not planned for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any

from autosac.capture.failures import one_line
from autosac.configurations.running.engine import Bound, PendingWork, Value, best_first
from autosac.configurations.space.offers import Objective, Offer
from autosac.errors import AutosacError, InfeasibleError, UsageError
from autosac.planning.closed_loop import Goal
from autosac.planning.optimizer_slices import Captures, plan_also_in_slices
from autosac.plans import Plan
from autosac.quantities import format_bytes, format_ms
from autosac.simulation import Simulation

Settings = Mapping[str, Any]
_MOST = 10_000
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings of a step, and the GPU that it runs on."""

    settings: Settings
    offer: Offer

    @property
    def name(self) -> str:
        """Short."""
        return f"{dict(self.settings)} on {self.offer.gpu}"


@dataclass(frozen=True, kw_only=True)
class EagerRow(Choice):
    """Settings that were tried on a GPU. `rate`: work in a second. Without a plan the step fits as it is; without a rate it
    does not fit or could not run (`reason`).
    """

    simulation: Simulation | None = None
    plan: Plan | None = None
    rate: float = 0.0
    reason: str = ""

    @property
    def cost(self) -> float:
        """The price of one unit of work; 0 if the GPU has none, infinite if there is no rate."""
        return self.offer.price / 3600 / self.rate if self.rate else math.inf

    def __str__(self) -> str:
        """What was found, in a line."""
        if self.simulation is None or not self.rate:
            return f"{self.name}: {self.reason}"
        plan = " with a plan" if self.plan is not None else ""
        peak = format_bytes(self.simulation.peak_reserved_bytes)
        return f"{self.name}: step {format_ms(self.simulation.step_ms)}{plan}, peak {peak} reserved, {self.rate:,.1f}/s"


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

    def __str__(self) -> str:
        """The ten best, a line for each, and how many others there are."""
        lines = [f"{i}. {row}" for i, row in enumerate(self.rows[:_SHOWN], 1)]
        more = len(self.rows) - len(lines)
        lines += [f"{more} more"] if more else []
        return "\n".join(lines + [f"{self.ruled_out} ruled out by their bounds"] * bool(self.ruled_out))


def combinations(space: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    """Every choice of one value for each name. UsageError for what names no values, and for more than can be tried."""
    if not isinstance(space, Mapping):
        raise UsageError(
            f"space: {space!r} is not a mapping from settings to their values, such as {{'batch_size': [1, 2, 4]}}"
        )
    for name, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UsageError(f"space: {name} is {values!r}: give a list of its values")
        if not values:
            raise UsageError(f"space: {name} has no values")
    if math.prod(map(len, space.values())) > _MOST:
        raise UsageError(f"space: more than {_MOST:,} combinations of settings; name fewer values")
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


class EagerSearch:
    """The steps of a search (`running.engine.CandidateSteps`); a candidate is the position of its settings."""

    def __init__(
        self,
        choices: Sequence[Choice],
        captures: Callable[[Choice], Captures],
        work: Callable[[Settings], float],
        goal: Callable[[Offer], Goal],
        progress: Callable[[str], None],
        objective: Objective = "tokens-per-second",
    ) -> None:
        self._choices, self._captures, self._work, self._goal = choices, captures, work, goal
        self._progress, self._objective = progress, objective
        self._plain: dict[int, tuple[Captures, Simulation]] = {}
        self._rows: dict[int, EagerRow] = {}

    def run(self) -> EagerResult:
        """Search to the end, one after the other."""
        found = best_first([(i, 0.0) for i in range(len(self._choices))], self, _at_once)
        rows = sorted(self._rows.values(), key=lambda row: self._score(row, row.rate))
        return EagerResult(rows=tuple(rows), ruled_out=len(found.pruned))

    def step(self, candidate: int, bound: float, best: float) -> Bound | Value | PendingWork:
        """Values are seconds, or the price, of a unit of work."""
        choice = self._choices[candidate]
        if candidate in self._rows:
            return Value(self._score(choice, self._rows[candidate].rate))
        if candidate not in self._plain:
            return PendingWork(("plain", candidate), lambda: self._capture(candidate))
        least = self._score(choice, self._rate(choice, self._plain[candidate][1]))
        return Bound(least) if least > bound else PendingWork(("plan", candidate), lambda: self._plan(candidate))

    def finished(self, work: PendingWork, future: Future[Any]) -> None:
        """Nothing: the work has taken note itself."""
        future.result()

    def _score(self, choice: Choice, rate: float) -> float:
        priced = self._objective == "cost-per-token"
        return (choice.offer.price / 3600 if priced else 1.0) / rate if rate else math.inf

    def _rate(self, choice: Choice, simulation: Simulation) -> float:
        try:
            amount = self._work(choice.settings)
        except Exception as e:
            raise UsageError(f"work of {dict(choice.settings)} failed: {type(e).__name__}: {one_line(e)}") from e
        if not isinstance(amount, Real) or not 0 < amount < math.inf:
            raise UsageError(f"work of {dict(choice.settings)} is {amount!r}: it must be a number above 0")
        return float(amount) / simulation.step_ms * 1e3

    def _capture(self, candidate: int) -> None:
        choice = self._choices[candidate]
        self._progress(f"simulating {choice.name}")
        try:
            captures = self._captures(choice)
            self._plain[candidate] = (captures, captures.observed())
        except AutosacError as e:
            self._note(candidate, reason=str(e))
        except Exception as e:  # of the caller's function, which may not take some settings
            self._note(candidate, reason=f"{type(e).__name__}: {one_line(e)}")

    def _plan(self, candidate: int) -> None:
        choice, (captures, plain) = self._choices[candidate], self._plain.pop(candidate)
        goal = self._goal(choice.offer)
        if plain.peak_bytes(goal.budget_kind) <= goal.budget_bytes:
            self._note(candidate, simulation=plain, rate=self._rate(choice, plain))
            return
        try:
            planned = plan_also_in_slices(captures, goal, self._progress)
        except AutosacError as e:
            self._note(candidate, reason=str(e))
            return
        rate = self._rate(choice, planned.simulation)
        self._note(candidate, simulation=planned.simulation, plan=planned.plan, rate=rate)

    def _note(self, candidate: int, **found: Any) -> None:
        choice = self._choices[candidate]
        self._rows[candidate] = EagerRow(settings=choice.settings, offer=choice.offer, **found)


def _at_once(content: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    content()
    future.set_result(None)
    return future

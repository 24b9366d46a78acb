"""Spaces with too many layouts to list: Optuna's sampler proposes them, the search works out those that can be the best.

Rounds of `_ROUND` proposals (ask). Of each, what is not legal breaks a constraint, and so does what no checkpointing makes
fit: the sampler (multivariate TPE with constraints) learns to avoid both. The rest goes through the same bounds, best first,
with the best of all rounds as the value to beat (`running.engine`). The sampler gets (tell) a layout's
value, or its lower bound where that was reason enough. The search ends when `_PATIENCE` rounds have found nothing better, or
when everything proposed is known. What is found is the best of what was proposed; nothing is proven of the rest.

Proposals are a function of the seed and of the answers: resumed, a search proposes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import optuna

K = TypeVar("K")

_ROUND = 32
_TRIES = 4  # proposals for each that has to be new and legal
_PATIENCE = 4
_SEED = 0


class Sampler(Generic[K]):
    """Proposals from knobs' values. `make` says what a choice of values is: a candidate, or None if it is not legal."""

    def __init__(
        self, knobs: Mapping[str, Sequence[Any]], make: Callable[[Mapping[str, Any]], K | None], seed: int = _SEED
    ) -> None:
        self._values = {name: list(values) for name, values in knobs.items()}
        self._make = make
        self._distributions: dict[str, Any] = {
            name: optuna.distributions.CategoricalDistribution(range(len(values)))
            for name, values in self._values.items()
        }
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=_ROUND)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: dict[K, list[optuna.Trial]] = {}
        self._scores: dict[K, tuple[float, float]] = {}

    def propose(self, count: int = _ROUND) -> list[K]:
        """Up to `count` legal candidates that have not been proposed before, fewer if the sampler repeats itself."""
        found: list[K] = []
        for _ in range(_TRIES * count):
            if len(found) == count:
                break
            trial = self._study.ask(self._distributions)
            candidate = self._make({name: self._values[name][i] for name, i in trial.params.items()})
            if candidate is None:
                self._tell(trial, 0.0, 1.0)
            elif candidate in self._scores:
                self._tell(trial, *self._scores[candidate])
            elif candidate in self._asked:
                self._asked[candidate].append(trial)
            else:
                self._asked[candidate] = [trial]
                found.append(candidate)
        return found

    def learn(self, candidate: K, value: float) -> None:
        """A proposal's value or lower bound; infinite if nothing makes it fit."""
        self._scores[candidate] = (value, 0.0) if math.isfinite(value) else (0.0, 1.0)
        for trial in self._asked.pop(candidate):
            self._tell(trial, *self._scores[candidate])

    def _tell(self, trial: optuna.Trial, value: float, broken: float) -> None:
        trial.set_constraint("possible", broken)
        self._study.tell(trial, value)


def sampled(
    sampler: Sampler[K], work_out: Callable[[Sequence[K]], Mapping[K, float]], patience: int = _PATIENCE
) -> int:
    """Propose and work out until nothing better is found; how many candidates were proposed.

    `work_out` gives each of a round's candidates its value, or its lower bound if that is not below the best of all rounds.
    """
    best, idle, proposed = math.inf, 0, 0
    while idle < patience:
        candidates = sampler.propose()
        if not candidates:
            break
        proposed += len(candidates)
        values = work_out(candidates)
        for candidate in candidates:
            sampler.learn(candidate, values[candidate])
        least = min(values.values())
        idle = 0 if least < best else idle + 1
        best = min(best, least)
    return proposed

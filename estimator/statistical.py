"""Statistical corrections of a collective model: minimum time, stragglers, and learning while a job runs.

TorchSim section F. With t the analytic time, l its latency, P the ranks and S the size, a linear model
predicts the minimum time over the ranks (eq. 11); where it would be negative, the analytic time stands (eq.
12):

    t_min = b0 + b1 t + b2 l + b3 P + b4 S + b5 t S + b6 t P + b7 l S

A second one predicts what the 75th percentile of the ranks takes longer (eq. 13):

    t_75 / t_min = s0 + s1 P log(S)

Observed times move the coefficients (eq. 14), b <- b - eta (b x - y) x / (x x): the step is normalised by the
features' length, so that eta between 0 and 2 converges whatever their units. Features are in ms, 1000 ranks
and GiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import UsageError
from autosac.estimator.cluster import Placement
from autosac.estimator.models import CollectiveModel, Estimate

_IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Observation(NamedTuple):
    """A collective that was timed: the fastest rank, and the 75th percentile over ranks."""

    kind: str
    nbytes: int
    placement: Placement
    min_ms: float
    p75_ms: float


class Corrected:
    """A collective model with the statistical corrections on top. Starts as the analytic model itself."""

    def __init__(self, analytic: CollectiveModel, *, learning_rate: float = 0.3) -> None:
        """Correct `analytic`. UsageError for a learning rate that cannot converge."""
        if not 0 < learning_rate < 2:
            raise UsageError(f"the learning rate must be between 0 and 2, not {learning_rate}")
        self._analytic = analytic
        self._learning_rate = learning_rate
        self._coefficients: dict[str, NDArray[np.float64]] = {}
        self._straggling: dict[str, NDArray[np.float64]] = {}

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The corrected time, stragglers included."""
        plain = self._analytic.estimate(kind, nbytes, placement)
        minimum = float(self._weights(kind) @ self._features(kind, nbytes, placement))
        ms = (minimum if minimum > 0 else plain.ms) * self._straggler(kind, nbytes, placement)
        changed = kind in self._coefficients or kind in self._straggling
        return Estimate(ms, plain.source + "+corrected" if changed else plain.source, plain.rel_std, plain.use)

    def fit(self, observations: Sequence[Observation]) -> None:
        """Least squares of both linear models, for every kind that was observed. UsageError for bad times."""
        for observation in observations:
            _check(observation)
        for kind in {o.kind for o in observations}:
            mine = [o for o in observations if o.kind == kind]
            x = np.array([self._features(kind, o.nbytes, o.placement) for o in mine])
            y = np.array([o.min_ms for o in mine])
            scale = 1 / y  # relative errors count, not the largest message
            start = self._weights(kind)
            change = np.linalg.lstsq(x * scale[:, None], (y - x @ start) * scale, rcond=1e-8)[0]
            self._coefficients[kind] = start + change
            slow = np.array([[1.0, _straggler_feature(o.nbytes, o.placement)] for o in mine])
            ratios = np.array([o.p75_ms / o.min_ms for o in mine])
            self._straggling[kind] = np.linalg.lstsq(slow, ratios, rcond=1e-8)[0]

    def observe(self, kind: str, nbytes: int, placement: Placement, ms: float) -> None:
        """One step of eq. 14 towards an observed time. UsageError if it is not a positive number."""
        _check(Observation(kind, nbytes, placement, ms, ms))
        x = self._features(kind, nbytes, placement)
        weights = self._weights(kind)
        self._coefficients[kind] = weights - self._learning_rate * (float(weights @ x) - ms) / float(x @ x) * x

    def _weights(self, kind: str) -> NDArray[np.float64]:
        return self._coefficients.get(kind, np.array(_IDENTITY))

    def _features(self, kind: str, nbytes: int, placement: Placement) -> NDArray[np.float64]:
        t = self._analytic.estimate(kind, nbytes, placement).ms
        latency = self._analytic.estimate(kind, 1, placement).ms
        ranks, size = placement.ranks / 1e3, nbytes / 2**30
        return np.array([1.0, t, latency, ranks, size, t * size, t * ranks, latency * size])

    def _straggler(self, kind: str, nbytes: int, placement: Placement) -> float:
        weights = self._straggling.get(kind)
        if weights is None:
            return 1.0
        return max(1.0, float(weights @ np.array([1.0, _straggler_feature(nbytes, placement)])))


def _straggler_feature(nbytes: int, placement: Placement) -> float:
    return placement.ranks / 1e3 * math.log(nbytes + 1)


def _check(observation: Observation) -> None:
    for value in (observation.min_ms, observation.p75_ms):
        if not math.isfinite(value) or value <= 0:
            raise UsageError(f"an observed time must be a positive number of milliseconds, not {value}")
    if observation.p75_ms < observation.min_ms:
        raise UsageError("the 75th percentile of the ranks cannot be below the fastest")

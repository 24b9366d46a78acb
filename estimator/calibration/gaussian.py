"""Gaussian-process regression in numpy.

    y(x) = mean + amplitude * sum_i alpha_i k(x, x_i)         k: Matern 5/2 with a length scale for each feature
    k(r) = (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r),       r^2 = sum_f ((x_f - x_if) / scale_f)^2

Few points suffice, a prediction at a point is nearly what was measured there, between points it is smooth, and far from all
points it returns to the mean. (Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 2.25 and 4.17.)

Length scales and noise are chosen by the marginal likelihood (eq. 2.30) in a descent over factors of two, the amplitude is
its optimum in closed form. The same points give the same process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MOST_POINTS = 200
_FEWEST_POINTS = 4
_NOISES = (1e-3, 1e-2, 5e-2, 0.2)
_SCALES = (0.7, 50.0)
_NO_SAY = 1e6
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """A fitted process. `rel_std` is the standard deviation of the leave-one-out errors."""

    points: Array
    alpha: Array
    scales: Array
    amplitude: float
    mean: float
    rel_std: float

    def predict(self, rows: Array) -> Array:
        """The mean of the process at each row."""
        return np.asarray(self.mean + self.amplitude * _matern(rows, self.points, self.scales) @ self.alpha)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "points": np.round(self.points, 5).tolist(),
            "alpha": self.alpha.tolist(),
            "scales": self.scales.tolist(),
            "amplitude": self.amplitude,
            "mean": self.mean,
            "rel_std": self.rel_std,
        }

    @staticmethod
    def from_json(document: dict[str, Any]) -> GaussianProcess:
        """The inverse of `to_json`. KeyError, TypeError or ValueError if it is damaged or holds what is not finite."""
        points = np.array(document["points"], dtype=np.float64)
        alpha, scales = (np.array(document[key], dtype=np.float64) for key in ("alpha", "scales"))
        numbers = [float(document[key]) for key in ("amplitude", "mean", "rel_std")]
        if points.ndim != 2 or alpha.shape != points.shape[:1] or scales.shape != points.shape[1:]:
            raise ValueError("points, alpha and scales do not fit together")
        if not all(np.isfinite(part).all() for part in (points, alpha, scales, numbers)) or (scales <= 0).any():
            raise ValueError("a number is not finite")
        return GaussianProcess(
            points=points, alpha=alpha, scales=scales, amplitude=numbers[0], mean=numbers[1], rel_std=numbers[2]
        )


def _matern(a: Array, b: Array, scales: Array) -> Array:
    """The kernel between the rows of `a` and those of `b`."""
    x, y = a / scales, b / scales
    squared = np.maximum((x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * x @ y.T, 0.0)
    r = np.sqrt(5 * squared)
    return np.asarray((1 + r + r**2 / 3) * np.exp(-r))


def fit_gaussian(rows: Array, values: Array) -> GaussianProcess:
    """Fit by the marginal likelihood; see the module's docstring. A feature that does not vary gets no say."""
    assert len(rows) == len(values) > 0
    step = -(-len(rows) // _MOST_POINTS)
    rows, values = rows[::step], values[::step]
    mean = float(np.median(values))
    varies = [int(f) for f in np.flatnonzero(np.ptp(rows, axis=0) > 0)]
    scales = np.full(rows.shape[1], _NO_SAY)
    if not varies or len(rows) < _FEWEST_POINTS:
        spread = float(values.std()) if len(values) > 1 else 0.3
        return GaussianProcess(
            points=rows[:1], alpha=np.zeros(1), scales=scales, amplitude=1.0, mean=mean, rel_std=spread
        )
    scales[varies] = 3.0
    best = _Fit(rows, values - mean, scales, _NOISES[1])
    for _ in range(_ROUNDS):
        before = best
        for feature in (None, *varies):
            for factor in (0.5, 2.0):
                best = max(best, best.rescaled(varies if feature is None else [feature], factor), key=_likelihood)
        best = max((_Fit(rows, values - mean, best.scales, noise) for noise in _NOISES), key=_likelihood)
        if best.likelihood <= before.likelihood:
            break
    return GaussianProcess(
        points=rows, alpha=best.alpha, scales=best.scales, amplitude=best.amplitude, mean=mean, rel_std=best.spread
    )


class _Fit:
    """The process for given length scales and noise (a share of the amplitude), the amplitude at its optimum."""

    def __init__(self, rows: Array, centred: Array, scales: Array, noise: float) -> None:
        self.rows, self.centred, self.scales, self.noise = rows, centred, scales, noise
        count = len(rows)
        covariance = _matern(rows, rows, scales) + noise * np.eye(count)
        factor = np.linalg.cholesky(covariance)
        inverse = np.linalg.inv(covariance)
        weights = inverse @ centred
        self.amplitude = max(float(centred @ weights) / count, 1e-8)  # where the derivative of the likelihood is 0
        self.alpha = weights / self.amplitude
        self.likelihood = -0.5 * count * np.log(self.amplitude) - float(np.log(np.diag(factor)).sum())
        self.spread = float(np.std(weights / np.diag(inverse)))  # leave-one-out errors, eq. 5.12

    def rescaled(self, features: list[int], factor: float) -> _Fit:
        """The same with these length scales multiplied, within sensible limits."""
        scales = self.scales.copy()
        scales[features] = np.clip(scales[features] * factor, *_SCALES)
        return _Fit(self.rows, self.centred, scales, self.noise)


def _likelihood(fit: _Fit) -> float:
    return fit.likelihood

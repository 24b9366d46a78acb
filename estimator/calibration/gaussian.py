"""Gaussian-process regression: fitted by scikit-learn, kept as plain numbers, evaluated by numpy.

    y(x) = mean + amplitude * sum_i alpha_i k(x, x_i)         k: Matern 5/2 with a length scale for each feature
    k(r) = (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r),       r^2 = sum_f ((x_f - x_if) / scale_f)^2

Few points suffice, a prediction at a point is nearly what was measured there, between points it is smooth, and far from all
points it returns to the mean. (Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 2.25 and 4.17.)

Length scales, amplitude and noise maximise the marginal likelihood (eq. 2.30). The same points give the same process. What
reads a profile needs no scikit-learn, whose import would take longer than planning a small job.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from autosac.files.schema import STRICT, Checked

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

Array = NDArray[np.float64]
_MOST_POINTS = 200
_FEWEST_POINTS = 4
_SCALE, _SCALES = 3.0, (0.7, 50.0)
_NOISE, _NOISES = 1e-2, (1e-5, 10.0)  # variance, of the logarithm of time
_AMPLITUDES = (1e-6, 1e3)
_JITTER = 1e-6
_NO_SAY = 1e6


def _numbers(dimensions: int, rows: Any) -> Array | None:
    """Lists of finite numbers as an array, if they nest so deeply."""
    try:
        found = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim == dimensions and np.isfinite(found).all() else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """A fitted process. `rel_std` is the standard deviation of the leave-one-out errors."""

    __pydantic_config__: ClassVar[Any] = STRICT

    points: Annotated[Array, Checked(partial(_numbers, 2), "a list of lists of numbers, of equal lengths")]
    alpha: Annotated[Array, Checked(partial(_numbers, 1), "a list of numbers")]
    scales: Annotated[Array, Checked(partial(_numbers, 1), "a list of numbers")]
    amplitude: float
    mean: float
    rel_std: float

    def __post_init__(self) -> None:
        if self.alpha.shape != self.points.shape[:1] or self.scales.shape != self.points.shape[1:]:
            raise ValueError("points, alpha and scales do not fit together")
        if (self.scales <= 0).any():
            raise ValueError("a scale is not above 0")

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


def _matern(a: Array, b: Array, scales: Array) -> Array:
    """The kernel between the rows of `a` and those of `b`."""
    x, y = a / scales, b / scales
    squared = np.maximum((x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * x @ y.T, 0.0)
    r = np.sqrt(5 * squared)
    return np.asarray((1 + r + r**2 / 3) * np.exp(-r))


def fit_gaussian(rows: Array, values: Array) -> GaussianProcess:
    """Fit by the marginal likelihood; see the module's docstring. A feature that does not vary gets no say."""
    from scipy.linalg import cho_solve

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
    fit = _fitted(rows[:, varies], values - mean)
    scales[varies] = fit.kernel_.k1.k2.length_scale
    # The leave-one-out error at a point is its weight over its diagonal element of the inverse (eq. 5.12).
    inverse = cho_solve((fit.L_, True), np.eye(len(rows)))
    return GaussianProcess(
        points=rows,
        alpha=fit.alpha_,
        scales=scales,
        amplitude=float(fit.kernel_.k1.k1.constant_value),
        mean=mean,
        rel_std=float(np.std(fit.alpha_ / np.diag(inverse))),
    )


def _fitted(rows: Array, values: Array) -> GaussianProcessRegressor:
    """A Matern kernel with an amplitude, and noise, by the marginal likelihood."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    amplitude = ConstantKernel(float(np.clip(values.var(), *_AMPLITUDES)), _AMPLITUDES)
    shape = Matern(np.full(rows.shape[1], _SCALE), _SCALES, nu=2.5)
    process = GaussianProcessRegressor(amplitude * shape + WhiteKernel(_NOISE, _NOISES), alpha=_JITTER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a scale at its limit is an answer
        return process.fit(rows, values)

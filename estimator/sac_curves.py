"""Few-segment convex models of a trade-off curve, for the global MILP: time fraction >= max over segments.

The curve is a convex chain of points (x_k, y_k): after discarding the first k groups in MSPS order, the fraction x_k of the
memory is gone at the fraction y_k of the time. Discarding x in (x_(k-1), x_k] takes k groups, so the true cost of the greedy
policy is a staircase whose corners are (x_(k-1), y_k). Two models, both with at most `max_segments` lines:

- `tight_chords` ("staircase"): lines through the points themselves. They are convex, exact at the chosen points and never
  below the chain. At all other x they lie under the staircase by less than the one group that is cut. This is the relaxation
  of the local problem, so it gives lower bounds for the whole, and the MILP's optima lie at its corners, where it is exact.
- `upper_bound` ("pwlf"): lines above all corners (5.3.3: "shifted by dropping the initial recomputation point and final
  memory point"). Least squares by `pwlf` over the corners, at given breakpoints, is neither an upper bound nor convex. So its
  slopes are made non-decreasing (isotonic regression) and non-negative, and each line is lifted by the largest violation
  between its breakpoints. The maximum of lines is convex. It is non-decreasing and above every corner, so it is above the
  staircase.

The planner's MILP uses `tight_chords` through all points unless it is asked for "pwlf" (`Goal.curve`): the byte budget that
it gives to the local policy is met whatever the curve says, so an optimistic curve can cost a little time but never memory,
and the plan is verified by simulation anyway; a pessimistic one makes it shy away from units whose first group is expensive.
`benchmarks/curves.py` compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autosac.errors import UsageError
from autosac.solvers import CurveSegment

Points = tuple[tuple[float, float], ...]
FloatArray = npt.NDArray[np.float64]

MAX_SEGMENTS = 5


@functools.lru_cache(maxsize=4096)
def tight_chords(points: Points, max_segments: int = MAX_SEGMENTS) -> tuple[CurveSegment, ...]:
    """Chords of a convex chain through at most `max_segments` + 1 of its points. UsageError if not convex."""
    x, y = _columns(points, max_segments)
    if len(x) == 1:
        return (CurveSegment(0.0, float(y[0])),)
    chosen = _simplified(x, y, max_segments)
    return _lines(x[chosen], y[chosen])


@functools.lru_cache(maxsize=4096)
def upper_bound(points: Points, max_segments: int = MAX_SEGMENTS) -> tuple[CurveSegment, ...]:
    """A convex upper bound of the staircase. UsageError if the chain is not convex."""
    x, y = _columns(points, max_segments)
    if len(x) == 1:
        return (CurveSegment(0.0, float(y[0])),)
    if len(x) == 2:
        return (CurveSegment(0.0, float(y[1])),)
    corner_x, corner_y = x[:-1], y[1:]
    breaks = np.unique(np.minimum(x[_simplified(x, y, max_segments)], corner_x[-1]))
    slopes, start = _least_squares(corner_x, corner_y, breaks)
    slopes = np.maximum(0.0, _non_decreasing(slopes, np.diff(breaks)))
    values = start + np.concatenate([[0.0], np.cumsum(slopes * np.diff(breaks))])
    owner = np.clip(np.searchsorted(breaks, corner_x, side="right") - 1, 0, len(slopes) - 1)
    lift = np.zeros(len(slopes))
    np.maximum.at(lift, owner, corner_y - np.interp(corner_x, breaks, values))
    return _lines(breaks, values, lift)


def evaluate(segments: Sequence[CurveSegment], x: float) -> float:
    """The model's time fraction at a discarded fraction."""
    return max(slope * x + intercept for slope, intercept in segments)


def _columns(points: Points, max_segments: int) -> tuple[FloatArray, FloatArray]:
    if max_segments < 1:
        raise UsageError(f"a trade-off curve needs at least one segment, not {max_segments}")
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    if not len(x) or np.any(np.diff(x) <= 0) or np.any(np.diff(y) < 0):
        raise UsageError("the points of a trade-off curve must ascend")
    slopes = np.diff(y) / np.diff(x)
    # What rounding of x and y (4 ulp of the largest) makes of a slope: much, where a group has little memory.
    rounding = 4 * np.finfo(float).eps * (y[-1] + slopes * x[-1]) / np.diff(x)
    if np.any(np.diff(slopes) < -1e-9 * np.maximum(1.0, slopes[:-1]) - rounding[:-1] - rounding[1:]):
        raise UsageError("the points of a trade-off curve must be in MSPS order")
    return x, y


def _simplified(x: FloatArray, y: FloatArray, max_segments: int) -> list[int]:
    """Indices of the points that stay: drop, one by one, the point whose absence lifts the chain least."""
    kept = list(range(len(x)))

    def lift(i: int) -> float:
        a, b, c = kept[i - 1], kept[i], kept[i + 1]
        return float(y[a] + (y[c] - y[a]) * (x[b] - x[a]) / (x[c] - x[a]) - y[b])

    lifts = [np.inf, *(lift(i) for i in range(1, len(kept) - 1)), np.inf]
    while len(kept) > 2 and (len(kept) > max_segments + 1 or min(lifts) <= 1e-12):
        gone = int(np.argmin(lifts))
        del kept[gone], lifts[gone]
        for i in (gone - 1, gone):
            if 0 < i < len(kept) - 1:
                lifts[i] = lift(i)
    return kept


def _least_squares(x: FloatArray, y: FloatArray, breaks: FloatArray) -> tuple[FloatArray, float]:
    """Slopes and first value of pwlf's continuous fit with these breakpoints."""
    import pwlf

    fit = pwlf.PiecewiseLinFit(x, y)
    fit.fit_with_breaks(breaks)
    values = fit.predict(breaks)
    return np.diff(values) / np.diff(breaks), float(values[0])


def _non_decreasing(slopes: FloatArray, lengths: FloatArray) -> FloatArray:
    """The closest non-decreasing slopes, by weighted least squares."""
    from sklearn.isotonic import isotonic_regression

    return np.asarray(isotonic_regression(slopes, sample_weight=lengths), dtype=float)


def _lines(x: FloatArray, y: FloatArray, lift: float | FloatArray = 0.0) -> tuple[CurveSegment, ...]:
    """The lines through consecutive points, lifted."""
    slopes = np.diff(y) / np.diff(x)
    return tuple(
        CurveSegment(float(slope), float(value - slope * start))
        for slope, start, value in zip(slopes, x[:-1], y[:-1] + lift, strict=True)
    )

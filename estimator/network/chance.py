"""What happens by chance in a large job, as distributions: flows that collide on a path, and the slowest of many GPUs.

**Collisions.** Equal-cost multipath hashes each of F flows onto one of U uplinks of a leaf, independently and evenly. The
flows of a collective move in lockstep, so the fullest uplink sets the pace, over all L leaves that it crosses. With M the most
flows on one uplink::

    P(M <= j) = (F! / U^F  [x^F] (sum over i <= j of x^i / i!)^U)^L            `most_loaded`

(the coefficient of x^F). It is computed with Poisson weights of mean F / U in place of 1 / i!, which keeps the numbers in
range and changes nothing.

**Stragglers.** GPUs of one type differ: the binning of chips, their temperature, their power. A job whose ranks meet in
every layer runs at the pace of its slowest GPU. With times per kernel that are normal with the relative standard deviation s::

    slowdown(n) = 1 + s e(n)                                                       `straggling`
    e(n) = the mean of the largest of n standard normal values, 0 for one

Prices are those of single GPUs, which nobody chose; steps on one of them confirm that (docs/h200.md). `SPREAD` is fitted to
published throughputs of one job on 8 to 128 GPUs: see docs/causes.md.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SPREAD = 0.021


class MostLoaded(NamedTuple):
    """The distribution of the most flows on one path. `most[i]` flows or fewer have the probability `cumulative[i]`."""

    most: NDArray[np.int64]
    cumulative: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Expected value."""
        return float(self.most @ np.diff(self.cumulative, prepend=0.0))

    @property
    def std(self) -> float:
        """Standard deviation."""
        square = float(self.most.astype(np.float64) ** 2 @ np.diff(self.cumulative, prepend=0.0))
        return math.sqrt(max(0.0, square - self.mean**2))

    def quantile(self, probability: float) -> int:
        """The smallest number of flows that is not exceeded with this probability."""
        return int(self.most[min(int(np.searchsorted(self.cumulative, probability)), len(self.most) - 1)])


@lru_cache(maxsize=256)
def most_loaded(flows: int, paths: int, leaves: int = 1) -> MostLoaded:
    """The most flows that share a path, on the worst of `leaves` switches with `paths` paths and `flows` flows each."""
    fewest = -(-flows // paths)
    weights = _poisson(flows / paths, flows)
    norm = float(_poisson(float(flows), flows)[-1])
    most = np.arange(fewest, flows + 1)
    cumulative = np.ones(len(most))
    for i, limit in enumerate(most):
        chance = _power(weights[: limit + 1], paths, flows) / norm
        cumulative[i] = min(max(chance, 0.0), 1.0) ** leaves
        if cumulative[i] > 1 - 1e-12:
            return MostLoaded(most[: i + 1], np.append(cumulative[:i], 1.0))
    return MostLoaded(most, cumulative)


def _poisson(mean: float, most: int) -> NDArray[np.float64]:
    """Probabilities of 0 to `most`."""
    counts = np.arange(1, most + 1)
    logs = np.concatenate(([0.0], np.cumsum(np.log(mean / counts) if most else np.zeros(0))))
    return np.asarray(np.exp(logs - mean))


def _power(polynomial: NDArray[np.float64], exponent: int, degree: int) -> float:
    """The coefficient of x^degree in polynomial^exponent, by repeated squaring."""
    result, base = np.ones(1), polynomial
    while exponent:
        if exponent & 1:
            result = np.convolve(result, base)[: degree + 1]
        exponent >>= 1
        if exponent:
            base = np.convolve(base, base)[: degree + 1]
    return float(result[degree]) if len(result) > degree else 0.0


@lru_cache(maxsize=256)
def largest_normal(count: int) -> float:
    """e(n): the mean of the largest of `count` standard normal values, by integrating its distribution."""
    from scipy.special import ndtr  # not imported before it is needed: it takes a while

    x = np.linspace(-10.0, 10.0, 20_001)
    below = ndtr(x) ** count
    return float(10.0 - (below.sum() - (below[0] + below[-1]) / 2) * (x[1] - x[0]))


def straggling(ranks: int, spread: float = SPREAD) -> float:
    """How much slower a job of so many GPUs computes than its typical GPU: see the module's docstring. At least 1."""
    return 1.0 + spread * largest_normal(ranks) if ranks > 1 else 1.0

"""What an untrained model is off by. Nothing is known of what it returns and of what it should return: numbers around nothing,
with a spread of one. At first a model returns little, so that its squared error is the mean square of the targets.

Rules for numbers only: which tensors they are of is `typical`'s business.
"""

from __future__ import annotations

import math

_NOTHING = 1e-3
_MAGNITUDE = math.sqrt(2 / math.pi)  # of a normal deviate


class Deviation(float):
    """The mean of numbers that spread around it. `rms`: the root of their mean square."""

    __slots__ = ("rms",)
    rms: float

    def __new__(cls, mean: float, rms: float) -> Deviation:
        """Both as they are."""
        made = super().__new__(cls, mean)
        made.rms = rms
        return made

    def times(self, factor: float) -> Deviation:
        """All of the numbers times one."""
        return Deviation(self * factor, self.rms * abs(factor))


def from_target(mean: float, rms: float) -> Deviation:
    """Unknown numbers less others of this mean and root mean square; the others may be next to nothing."""
    return Deviation(-mean, rms if rms > _NOTHING else 1.0)


def moved(deviation: Deviation, by: float) -> Deviation:
    """All of the numbers and one more number."""
    mean = float(deviation) + by
    spread = max(0.0, deviation.rms**2 - float(deviation) ** 2)
    return Deviation(mean, math.sqrt(spread + mean**2))


def product(a: float, b: float) -> float:
    """Of two kinds of numbers that have nothing to do with each other."""
    if isinstance(a, Deviation) and isinstance(b, Deviation):
        return Deviation(float(a) * float(b), a.rms * b.rms)
    if isinstance(a, Deviation):
        return a.times(b)
    return b.times(a) if isinstance(b, Deviation) else a * b


def summed(deviation: Deviation, count: float) -> Deviation:
    """So many of them added up: what they spread by partly cancels out."""
    mean = float(deviation)
    spread = max(0.0, deviation.rms**2 - mean**2)
    return Deviation(mean * count, math.sqrt(spread * count + (mean * count) ** 2))


def magnitude(value: float) -> float:
    """The mean of absolute values."""
    if not isinstance(value, Deviation):
        return abs(value)
    return _MAGNITUDE * value.rms if not value else min(value.rms, abs(value))


def huber(rms: float, delta: float) -> float:
    """Mean Huber loss of a normal deviate with this root mean square."""
    z = delta / rms
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    beyond = math.erfc(z / math.sqrt(2)) / 2
    return rms**2 * (0.5 - beyond - z * density) + 2 * delta * rms * density - delta**2 * beyond


def alignments(frames: float, labels: float) -> float:
    """The logarithm of the number of ways to write so many labels, none beside its like, into so many frames (CTC)."""
    if not 0 <= labels <= frames:
        return 0.0
    return math.lgamma(frames + labels + 1) - math.lgamma(2 * labels + 1) - math.lgamma(frames - labels + 1)

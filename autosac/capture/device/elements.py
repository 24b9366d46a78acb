"""What is known of the elements of a simulated tensor: their values, or what a typical one is like (`typical`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.device.deviations import Deviation
from autosac.capture.device.shadows import known_values, shadow, version, writes

Rule: TypeAlias = "Callable[[Any, Any, Any], float | None]"
"""The typical element of what an operator returns, from its arguments and that."""


class Exponential(float):
    """An exponential of unknown numbers, or a sum of such."""


class LogOfSum(float):
    """The logarithm of a sum of exponentials."""


class Length(float):
    """Of a vector of unknown numbers, of which it is only known that the vector divided by it has a length of 1."""


class Share(float):
    """What a softmax gives to one of C classes: 1 / C. Its logarithm falls as that of ``log_softmax`` does."""


class Seldom(float):
    """Of a mask of labels that equal a number: what it counts. Where it decides between two tensors, it selects nothing, as
    the mask of labels that do not equal the number selects everything.
    """


class Masked(float):
    """The mean of elements of which a mask has set some to nothing. `one`: what the others are like.

    Where ranks add such tensors up element by element (classes or rows that are sharded), one rank has each element, so that
    the sum's elements are like these.
    """

    __slots__ = ("one",)
    one: float

    def __new__(cls, mean: float, one: float) -> Masked:
        """Both as they are."""
        made = super().__new__(cls, mean)
        made.one = one
        return made


_falls: list[Callable[[], float]] = []  # one at most: by what losses have fallen so far
_LITTLE = 0.1
SINGLE = 10.0  # what stands for a single unknown number before the first step


def begin(falls: Callable[[], float]) -> None:
    """From now on tensors have typical elements. `falls`: the part of losses that is left now, of 1."""
    _falls[:] = [falls]


def has_begun() -> bool:
    """Whether they have."""
    return bool(_falls)


def left() -> float:
    """The part of losses that is left now."""
    return _falls[0]()


def typical(tensor: Any) -> float | None:
    """The typical element of a floating-point tensor whose values are unknown; None if nothing is known of it."""
    found = mark(tensor)
    return None if type(found) is Length else found


def mark(tensor: Any) -> float | None:
    """The same; also a length."""
    found = _given(tensor)
    return float(found) if type(found) is Masked else found


def masked(tensor: Any) -> Masked | None:
    """What its elements are like, if a mask has just set some to nothing."""
    found = _given(tensor)
    return found if type(found) is Masked else None


def _given(tensor: Any) -> float | None:
    found = vars(tensor).get("_typical") if isinstance(tensor, FakeTensor) else None
    if found is None:
        return None
    value, seen, comes = found
    return value if 0 <= version(tensor) - seen <= comes else None


def printed(tensor: Any) -> float | None:
    """What `.item()` of such an element answers; None if nothing is known of it."""
    found = typical(tensor)
    if isinstance(found, Deviation) and abs(found) < _LITTLE * found.rms:
        return found.rms
    return _LITTLE**2 * left() if found == 0 else found


def take(tensor: Any, value: float | None) -> None:
    """A tensor that nothing has computed has this typical element."""
    if value is not None and isinstance(tensor, FakeTensor):
        give(tensor, value, version(tensor))


def forget_typical(tensor: Any) -> None:
    """Nothing is known of what its elements are like."""
    vars(tensor).pop("_typical", None)


def give(tensor: FakeTensor, value: float, seen: int, comes: int = 0) -> None:
    """It has this typical element as long as it has the version `seen`, or so many more that autograd is still to count.
    What is changed below autograd, as in a DTensor's shards, is not counted.
    """
    vars(tensor)["_typical"] = value, seen, comes


def operand(x: Any) -> float | None:
    """A number, the mean of known values, a typical element, or what stands for a single unknown number."""
    if isinstance(x, (bool, int, float)):
        return float(x)
    if not isinstance(x, torch.Tensor):
        return None
    found = typical(x)
    if found is not None:
        return found
    known = known_values(x)
    if known is not None and known.numel():
        return mean_of(known) if known is not x else _mean(known)
    if x.numel() != 1:
        return None
    return SINGLE * left() if x.dtype.is_floating_point else None


def mean_of(known: torch.Tensor) -> float:
    """The mean of known values."""
    return _remembered(known, "_mean", lambda: _mean(known))


def _mean(known: torch.Tensor) -> float:
    with torch._C._DisableTorchDispatch():
        return float(known.mean(dtype=torch.float64))


def root_mean_square_of(known: torch.Tensor) -> float:
    """As it says."""
    return _remembered(known, "_rms", lambda: math.sqrt(_mean_square(known)))


def _mean_square(known: torch.Tensor) -> float:
    with torch._C._DisableTorchDispatch():
        return float(known.double().square().mean())


def _remembered(known: torch.Tensor, name: str, compute: Callable[[], float]) -> float:
    """Shadows are asked for it again and again: an input that many layers read. Until any of them is written into."""
    count: int
    found: float
    count, found = vars(known).get(name, (-1, 0.0))
    if count != writes():
        found = compute()
        vars(known)[name] = writes(), found
    return found


def is_open(x: Any) -> bool:
    """Whether it is numbers of a model or of data that nothing is known of."""
    return isinstance(x, FakeTensor) and x.dtype.is_floating_point and x.numel() > 1 and not is_known(x)


def is_known(x: Any) -> bool:
    """Whether something is known of it: of two numbers that nothing is known of nothing follows."""
    return not isinstance(x, FakeTensor) or typical(x) is not None or shadow(x) is not None

"""What differences of unknown numbers are like: losses of a prediction, written by hand or not (`deviations`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.device import deviations
from autosac.capture.device.deviations import Deviation
from autosac.capture.device.elements import (
    Length,
    LogOfSum,
    Rule,
    is_known,
    is_open,
    left,
    mark,
    mean_of,
    operand,
    root_mean_square_of,
    typical,
)
from autosac.capture.device.shadows import known_lengths, shadow

SUM = 2  # of PyTorch's reductions


def _of_two(compute: Callable[[float, float], float]) -> Rule:
    def rule(args: Any, kwargs: Any, out: Any) -> float | None:
        if not (is_known(args[0]) or is_known(args[1])):
            return None
        a, b = operand(args[0]), operand(args[1])
        return None if a is None or b is None else compute(a, b)

    return rule


def difference(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of logits and the logarithm of their exponentials' sum; of what a model is off by; of numbers."""
    a, b = args[:2]
    factor: float = kwargs.get("alpha", 1)
    if is_open(b):
        found = typical(a)
        if type(found) is LogOfSum:
            return found * left()
        if is_open(a):
            return Deviation(0.0, _fallen())
        number = _moments(a)
        return None if number is None else deviations.from_target(*number).times(-1.0)
    of_a, of_b = typical(a), typical(b)  # logits may have had the largest one subtracted: that is a deviation
    if type(of_b) is LogOfSum and (is_open(a) or isinstance(of_a, Deviation)):  # as `log_softmax` does it
        return -float(of_b) * left()
    if type(of_a) is LogOfSum and isinstance(of_b, Deviation):
        return float(of_a) * left()
    if not is_open(a):
        return _added(a, b, -factor)
    number = _moments(b)
    return None if number is None or factor != 1 else deviations.from_target(*number).times(_fallen())


def _fallen() -> float:
    """Whose square falls as losses do."""
    return math.sqrt(left())


def _moments(x: Any) -> tuple[float, float] | None:
    """The mean and the root mean square of targets; None if neither is known."""
    known = shadow(x) if isinstance(x, FakeTensor) else None
    if known is not None and known.numel() > 1 and not known.is_meta:
        return mean_of(known), root_mean_square_of(known)
    if isinstance(x, torch.Tensor) and not is_known(x):
        return (0.0, 1.0) if x.dtype.is_floating_point else None
    found = operand(x)
    if found is None:
        return None
    return float(found), found.rms if isinstance(found, Deviation) else abs(found)


def _added(a: Any, b: Any, factor: float) -> float | None:
    for one, other in ((a, b), (b, a)):
        if is_open(one) and factor == 1:
            mean = typical(other) if isinstance(other, torch.Tensor) else other
            return Deviation(float(mean), math.hypot(1.0, mean)) if mean else None  # zeros: what sums begin with
    if not (is_known(a) or is_known(b)):
        return None
    x, y = operand(a), operand(b)
    if x is None or y is None:
        return None
    if isinstance(y, Deviation):
        y = y.times(factor)
        return deviations.moved(y, x)  # of two deviations only the second one's spread is left
    return deviations.moved(x, y * factor) if isinstance(x, Deviation) else x + y * factor


def sum_of_two(args: Any, kwargs: Any, out: Any) -> float | None:
    return _added(args[0], args[1], kwargs.get("alpha", 1))


def product(args: Any, kwargs: Any, out: Any) -> float | None:
    if args[0] is args[1]:
        return power((args[0], 2), kwargs, out)
    return _of_two(deviations.product)(args, kwargs, out)


def quotient(args: Any, kwargs: Any, out: Any) -> float | None:
    found = mark(args[1])
    if type(found) is Length:
        return Deviation(0.0, 1 / found) if is_open(args[0]) else None
    if isinstance(found, Deviation):
        return None
    return _of_two(lambda a, b: deviations.product(a, 1 / b))(args, kwargs, out)


def length(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of vectors of unknown numbers; of a single one, as of all gradients, nothing is known."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if order != 2 or out.numel() < 2 or not is_open(args[0]):
        return None
    return Length(math.sqrt(args[0].numel() / out.numel()))


def larger(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of two, element by element; the smaller one is like it."""
    a, b = (operand(x) for x in args[:2])
    return None if a is None or b is None else a if isinstance(a, Deviation) else max(a, b)


def rectified(args: Any, kwargs: Any, out: Any) -> float | None:
    """What is left of numbers where they are more than nothing."""
    found = typical(args[0])
    if found is None:
        return None
    return deviations.magnitude(found) / 2 if isinstance(found, Deviation) and not found else max(found, 0.0)


def spread(args: Any, kwargs: Any, out: Any) -> float | None:
    """The standard deviation of unknown numbers."""
    found = typical(args[0])
    if found is None:
        return 1.0 if is_open(args[0]) else None
    return math.sqrt(max(0.0, found.rms**2 - found**2)) if isinstance(found, Deviation) else None


def missed(mean_loss: Callable[[float, Any], float], reduction: int = 2) -> Rule:
    """Losses of a prediction: the target's root mean square, or the model's where all targets are zeros, gives the loss."""

    def rule(args: Any, kwargs: Any, out: Any) -> float | None:
        wanted, made = _moments(args[1]), typical(args[0])
        if wanted is None:
            return None
        if made is not None and typical(args[1]) is not None:
            rms = abs(made - wanted[0])
        else:
            rms = deviations.from_target(*wanted).rms
        how = args[reduction] if len(args) > reduction else kwargs.get("reduction", 1)
        loss = mean_loss(rms, args[3] if len(args) > 3 else None) * left() if rms else 0.0
        return loss * args[0].numel() if how == SUM else loss

    return rule


def smooth(rms: float, beta: Any) -> float:
    beta = 1.0 if beta is None else beta
    return deviations.huber(rms, beta) / beta if beta else deviations.magnitude(Deviation(0.0, rms))


def ctc(args: Any, kwargs: Any, out: Any) -> float | None:
    """All alignments of a target are equally likely at first."""
    scores, targets, *lengths = args[:4]
    frames = _mean_length(lengths[0], scores.shape[0])
    labels = _mean_length(lengths[1], targets.shape[-1] if targets.dim() > 1 else 0)
    one = frames * math.log(max(2, scores.shape[-1])) - deviations.alignments(frames, labels)
    return max(one, 0.0) * left()


def _mean_length(lengths: Any, longest: int) -> float:
    known = known_lengths(lengths, longest) if isinstance(lengths, torch.Tensor) else lengths
    return sum(known) / len(known) if known else longest


def power(args: Any, kwargs: Any, out: Any) -> float | None:
    found = typical(args[0])
    if found is None or not isinstance(args[1], (int, float)):
        return None
    if isinstance(found, Deviation):
        return found.rms**2 if args[1] == 2 else None
    power = found ** args[1]
    return power if isinstance(power, float) else None

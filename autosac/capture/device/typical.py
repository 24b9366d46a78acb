"""What unknown numbers are like: the losses that a script prints shall look like those of an untrained model.

A tensor without values may have a typical element: of the logarithm of a softmax over C classes -ln C, of a sigmoid one half,
and so a cross entropy is ln C. Of labels that are scattered over C classes it is their mean: of 1 among zeros 1 / C, so that a
cross entropy with soft labels is ln C, too. Of a mask it is the part that it selects: all, of equal tensors one half, and if
they compare the best of C classes 1 / C. Operators on such tensors compute with that number: means and sums, products with
numbers, what ranks add up. What is computed from a loss so begins at its logarithm and falls slowly, as the loss does. All
other numbers are unknown; single ones stand for what `.item()` answers for them, so that ``loss / 8 * 8`` is the loss.

A cross entropy may be written as the logarithm of a sum of exponentials, minus a logit. Exponentials of unknown numbers are
then typically 1, the logarithm of the sum over C classes is ln C, and what it is less an unknown number is the loss. Two
distributions over C classes are alike: of their divergence nothing is left, and it is a single unknown number.

Differences of unknown numbers are what an untrained model is off by (`deviations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.device import deviations, elements
from autosac.capture.device.deviations import Deviation
from autosac.capture.device.elements import (
    SINGLE,
    Exponential,
    Length,
    LogOfSum,
    Masked,
    Rule,
    Seldom,
    Share,
    has_begun,
    is_open,
    left,
    mark,
    masked,
    mean_of,
    operand,
    take,
    typical,
)
from autosac.capture.device.operators import mutates, per_operator
from autosac.capture.device.shadows import shadow, version
from autosac.capture.device.untrained import (
    SUM,
    ctc,
    difference,
    larger,
    length,
    missed,
    power,
    product,
    quotient,
    rectified,
    smooth,
    spread,
    sum_of_two,
)

aten = torch.ops.aten
_LARGEST = 1e30


def estimated(func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
    """The typical element of what an operator returns, or of what it has written to. Asked before its inputs are forgotten."""
    rule = _rule_of(func) if has_begun() else None
    if rule is None:
        return None
    if func.namespace == "aten" and func.overloadpacket in _FINDS and isinstance(out, (tuple, list)):
        take(out[1], _mean_index(args, kwargs, _FINDS[func.overloadpacket]))
    try:
        value = rule(args, kwargs, _first(out))
    except (ValueError, OverflowError, ZeroDivisionError):  # a logarithm of what is not positive
        return None
    return value if value is not None and abs(value) < _LARGEST else None


def has_rule(func: Any) -> bool:
    """Whether what it returns may have a typical element."""
    return _rule_of(func) is not None


def give(func: Any, args: Any, out: Any, value: float) -> None:
    """An operator's first result has this typical element, if its values are not known."""
    first = _first(out)
    if not isinstance(first, FakeTensor):
        return
    if not (first.dtype.is_floating_point or first.dtype is torch.bool or first.numel() > 1):
        return  # a single whole number, which may be read, is none of these
    if shadow(first) is None:
        viewed = args[0] if getattr(func, "is_view", False) else first
        comes = not first.is_inference() and func.namespace == "aten" and mutates(func)
        elements.give(first, value, version(viewed), comes)
        if func.overloadpacket is aten.copy_ and first.dtype.is_floating_point and first._is_view():
            _give_base(first._base, value, version(viewed), comes)


def _give_base(base: Any, value: float, seen: int, comes: int) -> None:
    """What is written to a part of a buffer (``buffer[t] = x``) is what all of it is like: others are written to, too."""
    if isinstance(base, FakeTensor) and shadow(base) is None:
        elements.give(base, value, seen, comes)


def scale(tensor: FakeTensor, by: float) -> None:
    """So many ranks have added it up, in place, without an operator that says so."""
    if has_begun():
        take(tensor, _of_ranks(tensor, by))


def _of_ranks(tensor: Any, ranks: float) -> float | None:
    """The typical element of what so many ranks have added up."""
    found, part = operand(tensor), masked(tensor)
    if found is None or part is not None:
        return found if part is None else part.one
    total = deviations.product(found, ranks)
    return Exponential(total) if type(found) is Exponential else total


def _first(out: Any) -> Any:
    while isinstance(out, (tuple, list)) and out:
        out = out[0]
    return out


@per_operator
def _rule_of(func: Any) -> Rule | None:
    if getattr(func, "namespace", "") == "aten":
        return _RULES.get(func.overloadpacket)
    return _COLLECTIVES.get(func._schema.name) if hasattr(func, "_schema") else None


# ---- where typical elements come from --------------------------------------------------------------------------------


def _classes(args: Any, kwargs: Any, out: Any) -> int:
    return max(2, int(args[0].shape[args[1]])) if args[0].dim() else 2


def _log_softmax(args: Any, kwargs: Any, out: Any) -> float:
    return -math.log(_classes(args, kwargs, out)) * left()


def _negative_likelihood(args: Any, kwargs: Any, out: Any) -> float:
    known = typical(args[0])
    one = -known if known is not None else math.log(max(2, args[0].shape[1 if args[0].dim() > 1 else 0])) * left()
    return one * _counted(args[1], args[4]) if args[3] == SUM else one


def _counted(labels: torch.Tensor, ignored: int) -> int:
    """Labels that are not ignored, as far as they are known."""
    known = shadow(labels)
    if known is None:
        return labels.numel()
    with torch._C._DisableTorchDispatch():
        return int((known != ignored).sum())


def _binary(args: Any, kwargs: Any, out: Any) -> float:
    reduction = args[3] if len(args) > 3 else kwargs.get("reduction", 1)
    return math.log(2) * left() * (args[0].numel() if reduction == SUM else 1)


# ---- what operators make of them -------------------------------------------------------------------------------------


def _sum(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of elements like each other. Those that nothing is known of are like single ones in a sum of all: so their mean is."""
    if not out.numel() or not out.dtype.is_floating_point:
        return None
    found = typical(args[0])
    if found is None and shadow(args[0]) is None and out.numel() == 1:
        found = SINGLE * left()
    if found is None:
        return None
    count = args[0].numel() / out.numel()
    if isinstance(found, Deviation):
        return deviations.summed(found, count)
    total = found * count
    return Exponential(total) if type(found) is Exponential else total


def _of_one(compute: Callable[[float], float]) -> Rule:
    def rule(args: Any, kwargs: Any, out: Any) -> float | None:
        found = typical(args[0])
        return None if found is None or isinstance(found, Deviation) else compute(found)

    return rule


def _same(args: Any, kwargs: Any, out: Any) -> float | None:
    return mark(args[0])


def _like(tensor: Any) -> float | None:
    """The typical element, or the mean of known values."""
    found = typical(tensor)
    known = shadow(tensor) if found is None else None
    return found if known is None or known.is_meta or not known.numel() else mean_of(known)


def _chosen(args: Any, kwargs: Any, out: Any) -> float | None:
    """Elements at unknown places, as those of actions that were drawn, are like all others; so is what is copied."""
    return _like(args[0]) if args[0].dtype.is_floating_point else typical(args[0])


def _first_of(args: Any, kwargs: Any, out: Any) -> float | None:
    found = [typical(x) for x in args[0]]
    return None if any(x is None for x in found) else found[0]


def _exponential(args: Any, kwargs: Any, out: Any) -> float:
    found = typical(args[0])
    return Exponential(1.0) if found is None or isinstance(found, Deviation) else math.exp(found)


def _logarithm(args: Any, kwargs: Any, out: Any) -> float | None:
    found = typical(args[0])
    if found is None or isinstance(found, Deviation):
        return None
    if type(found) is Share:
        return -math.log(round(1 / found)) * left()
    return LogOfSum(math.log(found)) if type(found) is Exponential else math.log(found)


def _times_logarithm(args: Any, kwargs: Any, out: Any) -> float | None:
    """A divergence of equal distributions is then nothing: shares times the difference of their logarithms."""
    factor, logarithm = operand(args[0]), _logarithm(args[1:], kwargs, out)
    return None if factor is None or logarithm is None else factor * logarithm


def _log_of_sum(args: Any, kwargs: Any, out: Any) -> float | None:
    return LogOfSum(math.log(args[0].numel() / out.numel())) if out.numel() else None


def _selected(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of ``where``: what unknown masks select."""
    known = shadow(args[0])
    if known is None:
        mask = typical(args[0])
        return operand(args[2] if mask == 0 or type(mask) is Seldom else args[1])
    part = mean_of(known) if known.numel() else 1.0
    found = [operand(x) if weight else 0.0 for x, weight in ((args[1], part), (args[2], 1 - part))]
    return None if found[0] is None or found[1] is None else part * found[0] + (1 - part) * found[1]


def _equal(args: Any, kwargs: Any, out: Any) -> float:
    """Two tensors of classes: one in so many. The mean of indices below C is (C - 1) / 2. None is infinite or beyond these."""
    if isinstance(args[1], float) and math.isinf(args[1]):
        return 0.0
    means = [typical(x) for x in args[:2] if isinstance(x, FakeTensor) and not x.dtype.is_floating_point]
    mean = next((mean for mean in means if mean is not None), None)
    if mean is None and type(args[1]) is int and not (args[0].dtype.is_floating_point or args[0].dtype is torch.bool):
        return Seldom(0.5)
    if mean is not None and type(args[1]) is int and not 0 <= args[1] <= 2 * mean:
        return 0.0
    return 0.5 if mean is None else 1 / (2 * mean + 1)


def _inverted(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of masks: what the other one does not select."""
    part = typical(args[0]) if args[0].dtype is torch.bool else None
    if part is None:
        return None
    return 1.0 if type(part) is Seldom else 1.0 - part


def _compared(args: Any, kwargs: Any, out: Any) -> float:
    """A mask selects all, but of two kinds of numbers that are alike the one is larger half the time."""
    if all(map(is_open, args[:2])):
        return 0.5
    a, b = (typical(x) if isinstance(x, torch.Tensor) else x for x in args[:2])
    if a is None or b is None or isinstance(a, Deviation) or isinstance(b, Deviation):
        return 1.0
    return 0.5 if a == b else 1.0


def _beyond(sign: float) -> Rule:
    """Comparisons with what lies beyond a number. A difference of which nothing is left is not beyond one of this sign."""

    def rule(args: Any, kwargs: Any, out: Any) -> float:
        bound = args[1] if len(args) > 1 else None
        is_far = isinstance(bound, (int, float)) and bound * sign > 0
        return 0.0 if is_far and typical(args[0]) == 0 else _compared(args, kwargs, out)

    return rule


def _mean_index(args: Any, kwargs: Any, position: int = 1) -> float | None:
    """Of the best one along the dimension that is the argument at this position."""
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    return (args[0].shape[dim] - 1) / 2 if isinstance(dim, int) and args[0].dim() else None


def counted(mask: Any, out: Any) -> int | None:
    """How many elements of a mask, for each one of `out`, are true; None where nothing is known of it."""
    part = typical(mask)
    if part is None or mask.dtype.is_floating_point or not 0 <= part <= 1 or not out.numel():
        return None
    return 0 if part == 0 else max(1, round(part * int(mask.numel()) / int(out.numel())))


def _clamped(args: Any, kwargs: Any, out: Any) -> float | None:
    found = mark(args[0])
    bounds = [*args[1:3], None, None][:2]
    low, high = (operand(kwargs.get(name, bound)) for name, bound in zip(("min", "max"), bounds, strict=True))
    if found is None:
        return None
    within = min(max(found, -math.inf if low is None else low), math.inf if high is None else high)
    return Length(within) if type(found) is Length else within


def _copied(args: Any, kwargs: Any, out: Any) -> float | None:
    return _chosen(args[1:], kwargs, out)


def _cast(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of whole numbers that are known (labels, one of which is 1) their mean."""
    return _like(args[0]) if out.dtype.is_floating_point else typical(args[0])


def _scattered(args: Any, kwargs: Any, out: Any) -> float | None:
    """The mean of what was there and of what is written to some places along a dimension."""
    there, dim, index, value = args[:4]
    before, written = _filled(there), value if isinstance(value, (bool, int, float)) else typical(value)
    if before is None or written is None or not there.dim() or kwargs.get("reduce"):
        return None
    part: float = index.shape[dim] / there.shape[dim]
    return before + part * (written - before)


def _masked(args: Any, kwargs: Any, out: Any) -> float | None:
    """Nothing where a mask holds; an unknown one is taken to hold nowhere."""
    found, known = mark(args[0]), shadow(args[1])
    if type(found) is not float or operand(args[2]) != 0:
        return found
    return Masked(found if known is None or not known.numel() else found * (1 - mean_of(known)), found)


def _put(args: Any, kwargs: Any, out: Any) -> float | None:
    """Into places that a mask of the whole tensor, or indices, say."""
    masks = [index for index in args[1] if index is not None]
    by_mask = len(masks) == 1 and masks[0].dtype is torch.bool and not (len(args) > 3 and args[3])
    return _masked((args[0], masks[0], args[2]), kwargs, out) if by_mask and operand(args[2]) == 0 else None


def _filled(tensor: Any) -> float | None:
    """The typical element, or the one value that all known elements have."""
    known = shadow(tensor)
    if known is None:
        return typical(tensor)
    with torch._C._DisableTorchDispatch():
        first = known.reshape(-1)[0] if known.numel() else None
        return float(first) if first is not None and bool((known == first).all()) else None


def _added_up_functionally(args: Any, kwargs: Any, out: Any) -> float | None:
    if args[1].lower() != "sum":
        return operand(args[0])
    c10d: Any = torch.distributed.distributed_c10d
    return _of_ranks(args[0], float(c10d._resolve_process_group(args[2]).size()))


_SAME = (
    "alias clone contiguous detach expand flip mean permute repeat reshape "
    "roll select slice squeeze t to transpose unbind split chunk unsqueeze view _unsafe_view _reshape_alias nan_to_num "
    "nanmean amax amin max min"
)
_RULES: dict[Any, Rule] = {
    **{getattr(aten, name): _same for name in _SAME.split() if hasattr(aten, name)},
    **dict.fromkeys((aten.gather, aten.index, aten.index_select), _chosen),
    aten._log_softmax: _log_softmax,
    aten._softmax: lambda args, kwargs, out: Share(1.0 / _classes(args, kwargs, out)),
    aten.sigmoid: lambda *_: 0.5,
    aten.ne: lambda *_: 1.0,
    **dict.fromkeys((aten.gt, aten.ge), _beyond(1.0)),
    **dict.fromkeys((aten.lt, aten.le), _beyond(-1.0)),
    aten.eq: _equal,
    **dict.fromkeys((aten.bitwise_not, aten.logical_not), _inverted),
    aten.argmax: lambda args, kwargs, out: _mean_index(args, kwargs),
    aten.where: _selected,
    aten.logsumexp: _log_of_sum,
    aten.log_sigmoid_forward: lambda args, kwargs, out: -math.log(2) * left(),
    aten.softplus: lambda args, kwargs, out: math.log(2) * left(),
    aten.nll_loss_forward: _negative_likelihood,
    aten.nll_loss2d_forward: _negative_likelihood,
    aten.binary_cross_entropy: lambda args, kwargs, out: _binary((args[0], args[1], None, *args[3:]), kwargs, out),
    aten.binary_cross_entropy_with_logits: lambda args, kwargs, out: _binary((*args[:3], *args[4:]), kwargs, out),
    aten._to_copy: _cast,
    aten.full: lambda args, kwargs, out: operand(args[1]),
    aten.full_like: lambda args, kwargs, out: operand(args[1]),
    **dict.fromkeys((aten.ones, aten.new_ones, aten.ones_like), lambda *_: 1.0),
    **dict.fromkeys((aten.zeros, aten.new_zeros, aten.zeros_like), lambda *_: 0.0),
    aten.scatter: _scattered,
    aten.masked_fill: _masked,
    aten.index_put: _put,
    aten.copy_: _copied,
    aten.cat: _first_of,
    aten.stack: _first_of,
    aten.sum: _sum,
    aten.abs: lambda args, *_: None if (found := typical(args[0])) is None else deviations.magnitude(found),
    aten.neg: lambda args, *_: None if (found := typical(args[0])) is None else deviations.product(found, -1.0),
    aten.relu: rectified,
    **dict.fromkeys((aten.maximum, aten.minimum), larger),
    aten.exp: _exponential,
    aten.log: _logarithm,
    aten.log2: _of_one(math.log2),
    aten.log10: _of_one(math.log10),
    aten.log1p: _of_one(math.log1p),
    aten.xlogy: _times_logarithm,
    aten.sqrt: _of_one(math.sqrt),
    aten.pow: power,
    aten.clamp: _clamped,
    aten.clamp_min: _clamped,
    aten.square: lambda args, kwargs, out: power((args[0], 2), kwargs, out),
    aten.add: sum_of_two,
    aten.sub: difference,
    aten.rsub: lambda args, kwargs, out: difference((args[1], args[0]), kwargs, out),
    aten.mul: product,
    aten.div: quotient,
    aten.linalg_vector_norm: length,
    **dict.fromkeys((aten.std, aten.std_mean), spread),
    **dict.fromkeys((aten.var, aten.var_mean), lambda *call: None if (found := spread(*call)) is None else found**2),
    aten.mse_loss: missed(lambda rms, _: rms**2),
    aten.huber_loss: missed(lambda rms, delta: deviations.huber(rms, 1.0 if delta is None else delta)),
    aten.smooth_l1_loss: missed(smooth),
    aten._ctc_loss: ctc,
    aten._cudnn_ctc_loss: ctc,
}
_IN_PLACE = {f"{packet.__name__}_": rule for packet, rule in _RULES.items()}
_RULES = {**{getattr(aten, name): rule for name, rule in _IN_PLACE.items() if hasattr(aten, name)}, **_RULES}
# Their second results are indices; where their arguments have the dimension.
_FINDS = {aten.max: 1, aten.min: 1, aten.topk: 2}
_COLLECTIVES: dict[str, Rule] = {
    "c10d::_allgather_base_": _copied,
    "_c10d_functional::all_reduce": _added_up_functionally,
    "_c10d_functional::all_gather_into_tensor": _same,
    "_c10d_functional::wait_tensor": _same,
}

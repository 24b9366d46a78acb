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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.device.operators import mutates, per_operator
from autosac.capture.device.shadows import known_values, shadow

aten = torch.ops.aten
_SUM = 2  # of PyTorch's reductions
_LARGEST = 1e30

Rule: TypeAlias = "Callable[[Any, Any, Any], float | None]"


class Exponential(float):
    """An exponential of unknown numbers, or a sum of such."""


class LogOfSum(float):
    """The logarithm of a sum of exponentials."""


class Share(float):
    """What a softmax gives to one of C classes: 1 / C. Its logarithm falls as that of ``log_softmax`` does."""


_falls: list[Callable[[], float]] = []  # one at most: by what losses have fallen so far
SINGLE = 10.0  # what stands for a single unknown number before the first step


def begin(falls: Callable[[], float]) -> None:
    """From now on tensors have typical elements. `falls`: the part of losses that is left now, of 1."""
    _falls[:] = [falls]


def typical(tensor: Any) -> float | None:
    """The typical element of a floating-point tensor whose values are unknown; None if nothing is known of it."""
    value, version = vars(tensor).get("_typical", (None, 0)) if isinstance(tensor, FakeTensor) else (None, 0)
    return value if value is not None and tensor._version == version else None


def estimated(func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
    """The typical element of what an operator returns, or of what it has written to. Asked before its inputs are forgotten."""
    rule = _rule_of(func) if _falls else None
    if rule is None:
        return None
    if func.namespace == "aten" and func.overloadpacket in _FINDS and isinstance(out, (tuple, list)):
        take(out[1], _mean_index(args, kwargs, _FINDS[func.overloadpacket]))
    try:
        value = rule(args, kwargs, _first(out))
    except (ValueError, OverflowError, ZeroDivisionError):  # a logarithm of what is not positive
        return None
    return value if value is not None and abs(value) < _LARGEST else None


def give(func: Any, args: Any, out: Any, value: float) -> None:
    """An operator's first result has this typical element, if its values are not known."""
    first = _first(out)
    if not isinstance(first, FakeTensor) or first.is_inference():
        return
    if not (first.dtype.is_floating_point or first.dtype is torch.bool or first.numel() > 1):
        return  # a single whole number, which may be read, is none of these
    if shadow(first) is None:  # what autograd does to the version comes later
        viewed = args[0] if getattr(func, "is_view", False) else first
        vars(first)["_typical"] = value, viewed._version + (func.namespace == "aten" and mutates(func))


def take(tensor: Any, value: float | None) -> None:
    """A tensor that nothing has computed has this typical element."""
    if value is not None and isinstance(tensor, FakeTensor):
        vars(tensor)["_typical"] = value, tensor._version


def scale(tensor: FakeTensor, by: float) -> None:
    """Its elements have become so many times what they were, in place, without an operator that says so."""
    value = _operand(tensor) if _falls else None
    take(tensor, None if value is None else value * by)


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
    return -math.log(_classes(args, kwargs, out)) * _falls[0]()


def _negative_likelihood(args: Any, kwargs: Any, out: Any) -> float:
    known = typical(args[0])
    one = -known if known is not None else math.log(max(2, args[0].shape[1 if args[0].dim() > 1 else 0])) * _falls[0]()
    return one * _counted(args[1], args[4]) if args[3] == _SUM else one


def _counted(labels: torch.Tensor, ignored: int) -> int:
    """Labels that are not ignored, as far as they are known."""
    known = shadow(labels)
    if known is None:
        return labels.numel()
    with torch._C._DisableTorchDispatch():
        return int((known != ignored).sum())


def _binary(args: Any, kwargs: Any, out: Any) -> float:
    reduction = args[3] if len(args) > 3 else kwargs.get("reduction", 1)
    return math.log(2) * _falls[0]() * (args[0].numel() if reduction == _SUM else 1)


# ---- what operators make of them -------------------------------------------------------------------------------------


def _operand(x: Any) -> float | None:
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
        with torch._C._DisableTorchDispatch():
            return float(known) if known.numel() == 1 else known.mean(dtype=torch.float64).item()
    if x.numel() != 1:
        return None
    return SINGLE * _falls[0]() if x.dtype.is_floating_point else None


def _is_known(x: Any) -> bool:
    """Whether something is known of it: of two numbers that nothing is known of nothing follows."""
    return not isinstance(x, FakeTensor) or typical(x) is not None or shadow(x) is not None


def _same(args: Any, kwargs: Any, out: Any) -> float | None:
    return typical(args[0])


def _first_of(args: Any, kwargs: Any, out: Any) -> float | None:
    found = [typical(x) for x in args[0]]
    return None if any(x is None for x in found) else found[0]


def _sum(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of elements like each other. Those that nothing is known of are like single ones in a sum of all: so their mean is."""
    if not out.numel() or not out.dtype.is_floating_point:
        return None
    found = typical(args[0])
    if found is None and shadow(args[0]) is None and out.numel() == 1:
        found = SINGLE * _falls[0]()
    if found is None:
        return None
    total = found * args[0].numel() / out.numel()
    return Exponential(total) if type(found) is Exponential else total


def _of_one(compute: Callable[[float], float]) -> Rule:
    def rule(args: Any, kwargs: Any, out: Any) -> float | None:
        found = typical(args[0])
        return None if found is None else compute(found)

    return rule


def _of_two(compute: Callable[[float, float], float]) -> Rule:
    def rule(args: Any, kwargs: Any, out: Any) -> float | None:
        if not (_is_known(args[0]) or _is_known(args[1])):
            return None
        a, b = _operand(args[0]), _operand(args[1])
        return None if a is None or b is None else compute(a, b * kwargs.get("alpha", 1))

    return rule


def _difference(args: Any, kwargs: Any, out: Any) -> float | None:
    a = typical(args[0])
    if type(a) is LogOfSum and isinstance(args[1], FakeTensor) and not _is_known(args[1]):
        return a * _falls[0]()
    return _of_two(lambda a, b: a - b)(args, kwargs, out)


def _exponential(args: Any, kwargs: Any, out: Any) -> float:
    found = typical(args[0])
    return Exponential(1.0) if found is None else math.exp(found)


def _logarithm(args: Any, kwargs: Any, out: Any) -> float | None:
    found = typical(args[0])
    if found is None:
        return None
    if type(found) is Share:
        return -math.log(round(1 / found)) * _falls[0]()
    return LogOfSum(math.log(found)) if type(found) is Exponential else math.log(found)


def _times_logarithm(args: Any, kwargs: Any, out: Any) -> float | None:
    """A divergence of equal distributions is then nothing: shares times the difference of their logarithms."""
    factor, logarithm = _operand(args[0]), _logarithm(args[1:], kwargs, out)
    return None if factor is None or logarithm is None else factor * logarithm


def _log_of_sum(args: Any, kwargs: Any, out: Any) -> float | None:
    return LogOfSum(math.log(args[0].numel() / out.numel())) if out.numel() else None


def _selected(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of ``where``: what unknown masks select."""
    known = shadow(args[0])
    if known is None:
        return _operand(args[1])
    with torch._C._DisableTorchDispatch():
        part = known.mean(dtype=torch.float64).item() if known.numel() else 1.0
    found = [_operand(x) if weight else 0.0 for x, weight in ((args[1], part), (args[2], 1 - part))]
    return None if found[0] is None or found[1] is None else part * found[0] + (1 - part) * found[1]


def _equal(args: Any, kwargs: Any, out: Any) -> float:
    """Two tensors of classes: one in so many. The mean of indices below C is (C - 1) / 2."""
    means = [typical(x) for x in args[:2] if isinstance(x, FakeTensor) and not x.dtype.is_floating_point]
    mean = next((mean for mean in means if mean is not None), None)
    return 0.5 if mean is None else 1 / (2 * mean + 1)


def _mean_index(args: Any, kwargs: Any, position: int = 1) -> float | None:
    """Of the best one along the dimension that is the argument at this position."""
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    return (args[0].shape[dim] - 1) / 2 if isinstance(dim, int) and args[0].dim() else None


def counted(mask: Any, out: Any) -> int | None:
    """How many elements of a mask, for each one of `out`, are true; None where nothing is known of it."""
    part = typical(mask)
    if part is None or mask.dtype.is_floating_point or not 0 < part <= 1 or not out.numel():
        return None
    return max(1, round(part * int(mask.numel()) / int(out.numel())))


def _power(args: Any, kwargs: Any, out: Any) -> float | None:
    found = typical(args[0])
    if found is None or not isinstance(args[1], (int, float)):
        return None
    power = found ** args[1]
    return power if isinstance(power, float) else None


def _clamped(args: Any, kwargs: Any, out: Any) -> float | None:
    found = typical(args[0])
    bounds = [*args[1:3], None, None][:2]
    low, high = kwargs.get("min", bounds[0]), kwargs.get("max", bounds[1])
    if found is None or not all(isinstance(bound, (int, float, type(None))) for bound in (low, high)):
        return None
    return min(max(found, -math.inf if low is None else low), math.inf if high is None else high)


def _copied(args: Any, kwargs: Any, out: Any) -> float | None:
    return typical(args[1])


def _cast(args: Any, kwargs: Any, out: Any) -> float | None:
    """Of whole numbers that are known (labels, one of which is 1) their mean."""
    found = typical(args[0])
    known = shadow(args[0]) if found is None else None
    if known is None or known.is_meta or not known.numel() or not out.dtype.is_floating_point:
        return found
    with torch._C._DisableTorchDispatch():
        return known.mean(dtype=torch.float64).item()


def _scattered(args: Any, kwargs: Any, out: Any) -> float | None:
    """The mean of what was there and of what is written to some places along a dimension."""
    there, dim, index, value = args[:4]
    before, written = _filled(there), value if isinstance(value, (bool, int, float)) else typical(value)
    if before is None or written is None or not there.dim() or kwargs.get("reduce"):
        return None
    part: float = index.shape[dim] / there.shape[dim]
    return before + part * (written - before)


def _filled(tensor: Any) -> float | None:
    """The typical element, or the one value that all known elements have."""
    known = shadow(tensor)
    if known is None:
        return typical(tensor)
    with torch._C._DisableTorchDispatch():
        first = known.reshape(-1)[0] if known.numel() else None
        return float(first) if first is not None and bool((known == first).all()) else None


def _added_up_functionally(args: Any, kwargs: Any, out: Any) -> float | None:
    found = _operand(args[0])
    if found is None or args[1].lower() != "sum":
        return found
    c10d: Any = torch.distributed.distributed_c10d
    return found * float(c10d._resolve_process_group(args[2]).size())


_SAME = (
    "alias clone contiguous detach expand flip gather index index_select masked_fill masked_fill_ mean permute repeat reshape "
    "roll select slice squeeze t to transpose unbind split chunk unsqueeze view _unsafe_view _reshape_alias nan_to_num "
    "nanmean amax amin max min"
)
_RULES: dict[Any, Rule] = {
    **{getattr(aten, name): _same for name in _SAME.split() if hasattr(aten, name)},
    aten._log_softmax: _log_softmax,
    aten._softmax: lambda args, kwargs, out: Share(1.0 / _classes(args, kwargs, out)),
    aten.sigmoid: lambda *_: 0.5,
    **dict.fromkeys((aten.ne, aten.gt, aten.ge, aten.lt, aten.le), lambda *_: 1.0),
    aten.eq: _equal,
    aten.argmax: lambda args, kwargs, out: _mean_index(args, kwargs),
    aten.where: _selected,
    aten.logsumexp: _log_of_sum,
    aten.log_sigmoid_forward: lambda args, kwargs, out: -math.log(2) * _falls[0](),
    aten.softplus: lambda args, kwargs, out: math.log(2) * _falls[0](),
    aten.nll_loss_forward: _negative_likelihood,
    aten.nll_loss2d_forward: _negative_likelihood,
    aten.binary_cross_entropy: lambda args, kwargs, out: _binary((args[0], args[1], None, *args[3:]), kwargs, out),
    aten.binary_cross_entropy_with_logits: lambda args, kwargs, out: _binary((*args[:3], *args[4:]), kwargs, out),
    aten._to_copy: _cast,
    aten.full: lambda args, kwargs, out: _operand(args[1]),
    aten.full_like: lambda args, kwargs, out: _operand(args[1]),
    **dict.fromkeys((aten.zeros, aten.new_zeros, aten.zeros_like), lambda *_: 0.0),
    aten.scatter: _scattered,
    aten.scatter_: _scattered,
    aten.copy_: _copied,
    aten.cat: _first_of,
    aten.stack: _first_of,
    aten.sum: _sum,
    aten.abs: _of_one(abs),
    aten.neg: _of_one(lambda x: -x),
    aten.exp: _exponential,
    aten.log: _logarithm,
    aten.xlogy: _times_logarithm,
    aten.sqrt: _of_one(math.sqrt),
    aten.pow: _power,
    aten.clamp: _clamped,
    aten.clamp_min: _clamped,
    aten.add: _of_two(lambda a, b: a + b),
    aten.sub: _difference,
    aten.rsub: _of_two(lambda a, b: b - a),
    aten.mul: _of_two(lambda a, b: a * b),
    aten.div: _of_two(lambda a, b: a / b),
    aten.add_: _of_two(lambda a, b: a + b),
    aten.sub_: _of_two(lambda a, b: a - b),
    aten.mul_: _of_two(lambda a, b: a * b),
    aten.div_: _of_two(lambda a, b: a / b),
}
# Their second results are indices; where their arguments have the dimension.
_FINDS = {aten.max: 1, aten.min: 1, aten.topk: 2}
_COLLECTIVES: dict[str, Rule] = {
    "c10d::_allgather_base_": _copied,
    "_c10d_functional::all_reduce": _added_up_functionally,
    "_c10d_functional::all_gather_into_tensor": _same,
    "_c10d_functional::wait_tensor": _same,
}

"""The value model: answers to data-dependent questions (`.item()`, `.tolist()`, MoE splits) without data.

Small integer tensors (and tiny floating ones) carry shadow values that are computed for real on the CPU beside the fake
ones, and so do numbers that the step draws (`torch.rand` for a mask, `torch.randint` for labels), but for single ones: what a
coin decides is the same for all layers.

Where values come from training data or weights the model assumes: routing (`topk` of unknown scores) is round-robin, that is
perfectly balanced, or drawn from a distribution (`route_by`); collectives see symmetric ranks, except for the counts of
tokens that ranks exchange when routing is drawn, and for small integer tensors that come from a rank which runs beside this
one (`exchanged`); an unknown bool is False (initialisers loop on `mask.any()`), but `all` of unknown bools holds
(arguments are valid), unless they say which tokens are the last (loops go on to their limit), and factorisations succeed; an
unknown integer or float is 1 (`assume_floats`), and finite. Shapes that depend on values are next door (`dynamic`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device import elements, loops, typical
from autosac.capture.device.exchanged import collective_in_place, functional_collective, routing_in_use
from autosac.capture.device.operators import is_custom, mutates, per_operator
from autosac.capture.device.shadows import (
    MOST_KNOWN,
    UNKNOWN_INTEGER,
    count_writes,
    forget,
    note_write,
    overwrite,
    shadow,
    version,
)
from autosac.capture.device.sources import calling_frame
from autosac.capture.moe_load import Routing

aten = torch.ops.aten
_FLOAT_LIMIT = 64

_UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
    aten.resize_.default,
}

_SINGLE = torch.empty((), device="cpu")
_DRAWN = {
    aten.rand.default,
    aten.rand_like.default,
    aten.randn.default,
    aten.randn_like.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randperm.default,
    aten.rand.generator,
    aten.randn.generator,
    aten.randint.generator,
    aten.randint.low_generator,
    aten.randperm.generator,
}
# One operand that holds, or none that does, decides: whatever the other one is.
_ABSORBING: dict[Any, bool] = {
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.bitwise_or_.Tensor, aten.logical_or.default), True),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and_.Tensor, aten.logical_and.default), False),
}
# Whether an integer is a given one: whether a token is the last.
_RARE = {aten.eq.Scalar, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar}
# How far a loss, or what an iteration still changes, is from where a loop ends.
_THRESHOLDS: dict[Any, Callable[[float, float], bool]] = {
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
}
_COUNTS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList}
_ALL = {aten.all.default, aten.all.dim, aten._is_all_true.default}
_random: list[torch.Tensor] = []  # the state of the generator that draws them, one at most
_SEED = 0

_FINITENESS = {aten.eq.Tensor, aten.ne.Tensor, aten.ne.Scalar, aten.isnan.default, aten.isinf.default}

_assumed: list[Callable[[], float]] = [lambda: 1.0]


def route_by(routing: Routing | None) -> None:
    """Draw the routing of tokens to experts from now on; None: round-robin."""
    routing_in_use[:] = [routing] if routing is not None else []


def assume_floats(answer: Callable[[], float], falls: Callable[[], float]) -> None:
    """What `.item()` of an unknown floating-point value (a norm) answers from now on; `falls`: see `elements.begin`."""
    _assumed[0] = answer
    elements.begin(falls)


def _number(tensor: torch.Tensor) -> float:
    """What stands for an unknown floating-point number."""
    single = _assumed[0]()
    found = elements.printed(tensor)
    return single if found is None else found


def _filled(position: int) -> Callable[[Any, tuple[Any, ...]], torch.Tensor]:
    return lambda out, args: torch.full(out.shape, args[position], dtype=out.dtype, device="cpu")


def _zeros(out: Any, _: tuple[Any, ...]) -> torch.Tensor:
    return torch.zeros(out.shape, dtype=out.dtype, device="cpu")


def _ones(out: Any, _: tuple[Any, ...]) -> torch.Tensor:
    return torch.ones(out.shape, dtype=out.dtype, device="cpu")


# Operators whose result does not depend on the values of their inputs.
_CONSTANT: dict[Any, Callable[[Any, tuple[Any, ...]], torch.Tensor]] = {
    aten.zeros.default: _zeros,
    aten.zeros_like.default: _zeros,
    aten.new_zeros.default: _zeros,
    aten.zero_.default: _zeros,
    aten._efficientzerotensor.default: _zeros,  # of which PyTorch's own has no memory
    aten.ones.default: _ones,
    aten.ones_like.default: _ones,
    aten.new_ones.default: _ones,
    aten.full.default: _filled(1),
    aten.full_like.default: _filled(1),
    aten.new_full.default: _filled(2),
}


def item(tensor: torch.Tensor) -> bool | int | float:
    """The answer to `.item()`."""
    values = shadow(tensor)
    if values is not None:
        return values.item()
    if tensor.dtype.is_floating_point:
        return _number(tensor)
    if tensor.dtype is torch.bool:
        beyond: Callable[[], bool] | None = vars(tensor).get("_beyond")
        return beyond() if beyond is not None else bool(loops.answer(calling_frame()))
    return UNKNOWN_INTEGER


def propagate(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Give the outputs of `func` their shadows, if they follow from those of its inputs."""
    like = typical.estimated(func, args, kwargs, out)
    if mutates(func) and torch.is_inference_mode_enabled():
        count_writes(_written_by(func, args, kwargs))
    rule = _rule_of(func)
    if rule is not None:
        rule(func, args, kwargs, out)
    if like is not None:
        typical.give(func, args, out, like)


Rule: TypeAlias = "Callable[[Any, Any, Any, Any], None]"


@per_operator
def _rule_of(func: Any) -> Rule | None:
    """How an operator's outputs get their shadows; None if they have none."""
    constant = _CONSTANT.get(func)
    if constant is not None:
        return lambda _, args, __, out: _fill(constant, args, out)
    if func is aten.histc.default:
        return lambda _, args, __, out: _histogram(args, out)
    if func is aten.topk.default:
        return _topk
    if func in _FINITENESS:
        return _is_finite
    if func is aten._to_copy.default:
        return _cast
    if func in _DRAWN:
        return _draw
    if func in _ALL:
        return _all
    if func in _COUNTS:
        return _count
    if func in _RARE:
        return _is_given
    if func in _THRESHOLDS:
        return _is_beyond
    if func in _ABSORBING:
        return _connect
    if getattr(func, "namespace", "") == "c10d":
        return lambda func, args, _, __: collective_in_place(func, args)
    if _status(func):
        return _succeed
    if is_custom(func):
        return _overwrite_unknown if mutates(func) else None
    return None if func in _UNINITIALISED else _compute


def _fill(constant: Callable[[Any, tuple[Any, ...]], torch.Tensor], args: Any, out: Any) -> None:
    # Of floating-point numbers only single ones (a scale, a sum): vectors of zeros are weights, which training changes.
    most = 1 if out.dtype.is_floating_point else MOST_KNOWN
    if isinstance(out, FakeTensor) and out.numel() <= most:
        overwrite(out, constant(out, args))
    elif isinstance(out, FakeTensor):
        vars(out)["_filled"] = constant(_SINGLE, args), version(out)


def _cast(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Floating-point numbers that are all the same, and that nobody has written to since, become integers: so masks begin."""
    value, seen = vars(args[0]).get("_filled", (None, 0))
    if value is None or version(args[0]) != seen or out.numel() > MOST_KNOWN or out.dtype.is_floating_point:
        _compute(func, args, kwargs, out)
    else:
        vars(out)["_shadow"] = torch.full(out.shape, value.item(), dtype=out.dtype, device="cpu")


def _is_finite(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Unknown values are finite numbers: ``x == x`` and ``x != inf`` hold, ``x != x`` and ``isnan`` do not."""
    if shadow(args[0]) is None and out.numel() <= MOST_KNOWN and args[0].dtype.is_floating_point:
        other = args[1] if len(args) > 1 else args[0]
        if other is args[0] or (isinstance(other, float) and not math.isfinite(other)):
            holds = func is aten.eq.Tensor or func is aten.ne.Scalar
            out._shadow = torch.full(out.shape, holds, device="cpu")
            return
    _compute(func, args, kwargs, out)


def _draw(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Real numbers, from a generator of their own: those of the script on the host stay what they are."""
    if not isinstance(out, FakeTensor) or not 1 < out.numel() <= MOST_KNOWN:
        return
    sizes: dict[str, Any] = {"dtype": out.dtype, "layout": torch.strided, "device": torch.device("cpu")}
    if "generator" in kwargs:
        sizes["generator"] = None
    like = [torch.empty(out.shape, dtype=out.dtype, device="cpu")] if args and isinstance(args[0], torch.Tensor) else []
    with torch._C._DisableTorchDispatch():
        before = torch.get_rng_state()
        if _random:
            torch.set_rng_state(_random[0])
        else:
            torch.manual_seed(_SEED)
        try:
            vars(out)["_shadow"] = func(*like, *args[len(like) :], **sizes)
        finally:
            _random[:] = [torch.get_rng_state()]
            torch.set_rng_state(before)


def _status(func: Any) -> list[int]:
    """The outputs of a factorisation that say whether it has failed (0: it has not)."""
    schema = getattr(func, "_schema", None)
    return [] if schema is None else [i for i, out in enumerate(schema.returns) if out.name == "info"]


def _succeed(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Unknown matrices are regular, and positive definite where they have to be."""
    _compute(func, args, kwargs, out)
    for position in _status(func):
        if shadow(out[position]) is None and out[position].numel() <= MOST_KNOWN:
            vars(out[position])["_shadow"] = _zeros(out[position], ())


def _all(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if shadow(args[0]) is None and out.numel() <= MOST_KNOWN:
        out._shadow = torch.full(out.shape, not vars(args[0]).get("_rare"), dtype=out.dtype, device="cpu")
    else:
        _compute(func, args, kwargs, out)


def _count(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """What an unknown mask selects is counted as it is selected: all of it (`typical`)."""
    _compute(func, args, kwargs, out)
    if isinstance(out, FakeTensor) and not out.dtype.is_floating_point and shadow(out) is None:
        found = typical.counted(args[0], out) if isinstance(args[0], FakeTensor) else None
        if found is not None and out.numel() <= MOST_KNOWN:
            overwrite(out, torch.full(out.shape, found, dtype=out.dtype, device="cpu"))


def _is_given(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Unknown integers are not the given one all at once: a loop that ends when all sequences have, goes on to its limit."""
    _compute(func, args, kwargs, out)
    if shadow(out) is None and isinstance(args[0], FakeTensor) and not args[0].dtype.is_floating_point:
        vars(out)["_rare"] = True


def _is_beyond(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """One unknown number is compared as that which `.item()` answers, if somebody asks for the result itself: a loop.

    Not with negative numbers: then it is no loss or norm, but a slope (L-BFGS).
    """
    x, threshold = args
    if (
        isinstance(out, FakeTensor)
        and threshold > 0
        and not x.dim()
        and x.dtype.is_floating_point
        and shadow(x) is None
    ):
        like = elements.printed(x)
        vars(out)["_beyond"] = lambda: _THRESHOLDS[func](_assumed[0]() if like is None else like, threshold)
    else:
        _compute(func, args, kwargs, out)


def _connect(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """``True | unknown`` and ``False & unknown`` are known: a loop that may end early, but at its limit for certain, ends."""
    decides = _ABSORBING[func]
    known = [values for values in map(shadow, args) if values is not None]
    is_bool = out.dtype is torch.bool or not decides
    if len(known) == 1 and is_bool and out.numel() <= MOST_KNOWN and bool((known[0].bool() == decides).all()):
        overwrite(out, torch.full(out.shape, decides, dtype=out.dtype, device="cpu"))
    else:
        is_rare = decides and any(isinstance(x, FakeTensor) and vars(x).get("_rare") for x in args)
        _compute(func, args, kwargs, out)
        if is_rare and shadow(out) is None:
            vars(out)["_rare"] = True


def _topk(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if shadow(args[0]) is None:
        _route(args, out)
    else:
        _compute(func, args, kwargs, out)


def _compute(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Run `func` on the shadows of its inputs, if all of them have some and the result is small."""
    if not (_inputs_known(args) or _is_constant(func) or _has_numbers_only(func, args)):
        _forget_mutated(func, args)
        return
    leaves: list[Any] = pytree.tree_leaves(out)
    kept = [isinstance(leaf, FakeTensor) and leaf.numel() <= _limit(func, leaf) for leaf in leaves]
    if leaves and not any(kept) and not mutates(func):
        return
    result = _evaluate(func, getattr(func, "namespace", ""), args, kwargs, out)
    for fake, real, is_kept in zip(leaves, pytree.tree_leaves(result), kept, strict=False):
        if is_kept and isinstance(real, torch.Tensor):
            vars(fake)["_shadow"] = real


def _limit(func: Any, tensor: torch.Tensor) -> int:
    """Views share what is known of their base, however large: who writes into them must tell it."""
    computed = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return _FLOAT_LIMIT if computed and not getattr(func, "is_view", False) else MOST_KNOWN


def shadows(tree: Any) -> Any:
    """The values of all fake tensors in a tree in their places."""
    return pytree.tree_map(lambda x: shadow(x) if isinstance(x, FakeTensor) else x, tree)


def _inputs_known(args: Any) -> bool:
    """All tensor arguments have values, and there is one at least. Cheap: it stops at the first unknown one."""
    found = False
    for arg in args:
        if isinstance(arg, FakeTensor):
            if shadow(arg) is None:
                return False
            found = True
        elif isinstance(arg, torch.Tensor):
            if arg.numel() > MOST_KNOWN:
                return False
            found = True
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
            if any(shadow(x) is None for x in arg if isinstance(x, FakeTensor)):
                return False
            found = True
    return found


@per_operator
def _is_constant(func: Any) -> bool:
    """The operator has no tensors to read and draws nothing (`arange`)."""
    schema = getattr(func, "_schema", None)
    return (
        schema is not None
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not any("Tensor" in str(argument.type) for argument in schema.arguments)
    )


def _has_numbers_only(func: Any, args: Any) -> bool:
    """Python numbers are where the operator reads tensors: ``torch.div(32, 16, rounding_mode="trunc")``."""
    return (
        bool(args)
        and all(isinstance(argument, (bool, int, float)) for argument in args)
        and str(func._schema.arguments[0].type) == "Tensor"
    )


def _forget_mutated(func: Any, args: Any) -> None:
    """Writing unknown data into a tensor invalidates its shadow."""
    if args and isinstance(args[0], FakeTensor) and shadow(args[0]) is not None and mutates(func):
        forget(args[0])


def _written_by(func: Any, args: Any, kwargs: Any) -> list[FakeTensor]:
    """The simulated tensors that an operator changes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, FakeTensor)]
    return found


def _overwrite_unknown(func: Any, args: Any, kwargs: Any, _: Any) -> None:
    """What a custom operator writes is unknown."""
    for tensor in _written_by(func, args, kwargs):
        forget(tensor)


def _evaluate(func: Any, namespace: str, args: Any, kwargs: Any, out: Any) -> Any:
    args, kwargs = shadows(args), shadows(kwargs)
    if namespace in ("_c10d_functional", "_c10d_functional_autograd"):
        return functional_collective(func, args, out)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if mutates(func):
        note_write()
    try:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return None  # the CPU has no such kernel: the value stays unknown


def _histogram(args: Any, out: Any) -> None:
    values = shadow(args[0])
    counts = None if values is None else torch.histc(values.double(), *args[1:]).long()
    for routing in routing_in_use:
        if counts is None and (drawn := routing.counts_here(args[0].numel(), out.numel())) is not None:
            counts = torch.from_numpy(drawn)
        if counts is not None:
            routing.counted(counts.numpy())
    if counts is None:
        quotient, remainder = divmod(args[0].numel(), out.numel())
        counts = torch.full((out.numel(),), quotient, dtype=torch.int64, device="cpu")
        counts[:remainder] += 1
    out._shadow = counts.to(out.dtype)


def _route(args: Any, out: Any) -> None:
    indices = out[1]
    if not indices.dim() or indices.numel() > MOST_KNOWN:
        return
    for routing in routing_in_use:
        chosen = routing.route(args[0].shape, args[1])
        if chosen is not None:
            indices._shadow = torch.from_numpy(chosen)
            return
    indices._shadow = (torch.arange(indices.numel(), device="cpu") % args[0].shape[-1]).view(indices.shape)

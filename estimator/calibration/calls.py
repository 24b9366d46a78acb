"""From a trace's Signature back to a call that can be run and timed.

A signature keeps an operator's tensors in one flat list and its other arguments by name. The operator's schema says how
they belong together: walking its arguments in order, a tensor argument takes the next tensor, a list of tensors its share
of them, and what was neither a tensor nor kept (memory formats, devices) is left at its default or read off the outputs.

Values matter where they decide what a kernel does: indices stay inside of what they index, numbers are away from zero so
that no kernel meets denormals, and the operands of products are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autosac.errors import AutosacError
from autosac.estimator.work import argument, base_name, family
from autosac.trace import Signature, TensorMeta

_PRODUCTS = ("matmul", "batched_matmul", "convolution", "convolution_backward", "attention_forward")
# Operators whose tensor lists do not all have the same length: how many tensors do not belong to the (only) list.
_AFTER_THE_LIST = {"index_put": 1, "_unsafe_index_put": 1, "_index_put_impl": 1}


class NotReplayable(AutosacError):
    """The operator cannot be called from what its signature says."""


class ReplayedCall(NamedTuple):
    """A call that is ready to run: `run()` does it once and returns its result."""

    signature: Signature
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Do it once."""
        return self.function(*self.args, **self.kwargs)


def build_call(signature: Signature, device: torch.device) -> ReplayedCall:
    """A call of this operator on `device` with tensors of the same shapes, strides and types.

    NotReplayable if the operator is unknown to this PyTorch or its arguments do not follow from the signature.
    """
    overload = _overload(signature.name)
    if family(signature.name) == "attention_backward":
        return _attention_backward(signature, overload, device)
    tensors = [_tensor(meta, signature, position, device) for position, meta in enumerate(signature.inputs)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = dict(signature.arguments)
    rest = _Tensors(signature, tensors, overload)
    for parameter in overload._schema.arguments:
        value = _value(parameter, given, rest, signature, device)
        if parameter.kwarg_only:
            if value is not None:
                kwargs[parameter.name] = value
        else:
            args.append(value)
    if rest.left():
        raise NotReplayable(f"{signature.name}: {rest.left()} of its tensors have no place in {overload._schema}")
    return ReplayedCall(signature, overload, tuple(args), kwargs)


def tensor_bytes_needed(signature: Signature) -> int:
    """Bytes of the tensors that a call holds and makes."""
    return sum(_extent(meta) * _dtype(meta.dtype).itemsize for meta in (*signature.inputs, *signature.outputs))


def _overload(name: str) -> Any:
    parts = name.split(".")
    if len(parts) != 3:
        raise NotReplayable(f"{name} is not an operator of PyTorch's dispatcher")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError as e:
        raise NotReplayable(f"this PyTorch ({torch.__version__}) has no operator {name}") from e


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NotReplayable(f"this PyTorch ({torch.__version__}) has no type {name}")
    return dtype


# ---- arguments -------------------------------------------------------------------------------------------------


class _Tensors:
    """Deals a signature's tensors out to the arguments of the schema."""

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor], overload: Any) -> None:
        self._tensors = list(tensors)
        kinds = [str(a.type) for a in overload._schema.arguments]
        self._lists = sum("List[" in kind and "Tensor" in kind for kind in kinds)
        self._needed = sum(kind == "Tensor" for kind in kinds)
        base = base_name(signature.name)
        if base.startswith("_fused_"):
            self._lists = 6 if argument(signature, "amsgrad") else 5
            if "sgd" in base:
                self._lists = 3 if argument(signature, "momentum") else 2
            self._needed = 0
        elif base in _AFTER_THE_LIST:
            self._needed = 1 + _AFTER_THE_LIST[base]
        self._list_length = (len(self._tensors) - self._needed) // self._lists if self._lists else 0
        self._lists_left = self._lists

    def one(self, optional: bool) -> torch.Tensor | None:
        """The next tensor; None if it is optional and the others need what is left."""
        if not optional:
            self._needed -= 1
            if not self._tensors:
                raise NotReplayable("a tensor that the operator needs is missing in the signature")
            return self._tensors.pop(0)
        spare = len(self._tensors) - self._needed - self._lists_left * self._list_length
        return self._tensors.pop(0) if spare > 0 else None

    def several(self, name: str) -> list[torch.Tensor]:
        """The next list."""
        if not self._lists_left or (name == "max_exp_avg_sqs" and self._lists == 5):
            return []
        self._lists_left -= 1
        taken, self._tensors = self._tensors[: self._list_length], self._tensors[self._list_length :]
        return taken

    def left(self) -> int:
        """How many tensors no argument has taken."""
        return len(self._tensors)


def _value(parameter: Any, given: dict[str, Any], rest: _Tensors, signature: Signature, device: torch.device) -> Any:
    kind, name = str(parameter.type), parameter.name
    if name in given:
        value = given[name]
        if isinstance(value, str) and hasattr(torch, value) and isinstance(getattr(torch, value), torch.dtype):
            return getattr(torch, value)
        return list(value) if isinstance(value, tuple) else value
    if "Tensor" in kind:
        return rest.several(name) if "List[" in kind else rest.one("Optional" in kind)
    if parameter.has_default_value():
        if name == "memory_format" and signature.outputs:
            return _memory_format(signature.outputs[0])
        if not signature.inputs and name == "device":
            return device
        if not signature.inputs and name == "dtype" and signature.outputs:  # the default type of where it was called
            return _dtype(signature.outputs[0].dtype)
        return parameter.default_value
    if "List[" in kind:
        return []
    if "Optional" in kind:
        return None
    raise NotReplayable(f"{signature.name}: its argument {name} is not in the signature")


def _memory_format(meta: TensorMeta) -> torch.memory_format | None:
    """Only where it differs from keeping the input's: the output is contiguous."""
    expected = 1
    for size, stride in reversed(list(zip(meta.shape, meta.stride, strict=True))):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return torch.contiguous_format


# ---- tensors ---------------------------------------------------------------------------------------------------


def _extent(meta: TensorMeta) -> int:
    if not meta.shape or 0 in meta.shape:
        return 0 if 0 in meta.shape else 1
    return 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))


def _tensor(meta: TensorMeta, signature: Signature, position: int, device: torch.device) -> torch.Tensor:
    place = device if meta.place == "device" else torch.device("cpu")
    dtype = _dtype(meta.dtype)
    flat = torch.empty(_extent(meta), dtype=dtype, device=place)
    if dtype.is_complex:
        torch.view_as_real(flat).uniform_(0.5, 1.0)
    elif dtype.is_floating_point and dtype.itemsize == 1:
        flat.copy_(torch.empty(flat.shape, device=place).uniform_(0.5, 1.0).to(dtype))
    elif dtype.is_floating_point:
        if family(signature.name) in _PRODUCTS:
            flat.normal_()
        else:
            flat.uniform_(0.1, 1.0)
    elif dtype == torch.bool:
        flat.bernoulli_(0.9)
    else:
        flat.random_(0, max(1, _index_limit(signature, position)))
    return flat.as_strided(meta.shape, meta.stride)


def _index_limit(signature: Signature, position: int) -> int:
    """One above the largest integer that this input may hold; 1 where nothing is known to be indexed."""
    base, inputs = base_name(signature.name), signature.inputs
    data = inputs[0].shape
    dim = argument(signature, "dim", 0)
    if base == "embedding":
        return data[0]
    if base == "embedding_dense_backward":
        rows = argument(signature, "num_weights", 1)
        return int(rows) if isinstance(rows, int) else 1
    if base in ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"):
        scores = inputs[1].shape if "backward" in base else data
        return scores[1] if len(scores) > 1 else scores[0]
    if base in ("gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy", "take_along_dim"):
        return data[dim] if isinstance(dim, int) and data else 1
    if base in ("index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl") and position > 0:
        return min(data) if data else 1
    return 1


# ---- attention's backward --------------------------------------------------------------------------------------


def _attention_backward(signature: Signature, overload: Any, device: torch.device) -> ReplayedCall:
    """The backward reads what the forward of the same tensors leaves: run that, and hand its results over by name."""
    forward = _overload(signature.name.replace("_backward", "").replace(".default", "") + ".default")
    metas = signature.inputs[:4]
    if len(metas) < 4 or any(len(meta.shape) != 4 for meta in metas):
        raise NotReplayable(f"{signature.name}: not the usual gradient, query, key and value")
    grad, query, key, value = (_tensor(meta, signature, i, device) for i, meta in enumerate(metas))
    known: dict[str, Any] = {"query": query, "key": key, "value": value, "grad_out": grad, "grad_out_": grad}
    known |= {"attn_bias": None, "attn_mask": None, "compute_log_sumexp": True, "compute_logsumexp": True}
    known |= {name: v for name, v in signature.arguments if name in ("dropout_p", "is_causal", "scale")}
    results = forward(**{a.name: known[a.name] for a in forward._schema.arguments if a.name in known})
    known |= {r.name: value for r, value in zip(forward._schema.returns, results, strict=True)}
    known |= {"out": results[0], "logsumexp": results[1], "grad_input_mask": [True, True, True, False]}
    known |= {"philox_seed": known.get("philox_seed", known.get("rng_state"))}
    known |= {"philox_offset": known.get("philox_offset", known.get("unused"))}
    known |= {name: list(v) if isinstance(v, tuple) else v for name, v in signature.arguments}
    missing = [a.name for a in overload._schema.arguments if a.name not in known and not a.has_default_value()]
    if missing:
        raise NotReplayable(f"{signature.name}: its argument {missing[0]} is not a result of the forward")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in overload._schema.arguments:
        argument = known.get(parameter.name, parameter.default_value if parameter.has_default_value() else None)
        if parameter.kwarg_only:
            kwargs[parameter.name] = argument
        else:
            args.append(argument)
    assert math.prod(grad.shape) >= 0
    return ReplayedCall(signature, overload, tuple(args), kwargs)

"""From an operator in a profiler's trace to the Signature that a capture of the same call would hold.

The profiler notes shapes, types and (in newer versions) strides and scalar values of an operator's arguments, in the
order of its schema, but neither the overload nor the results. The overload is the one whose schema fits what was noted;
the results come from calling it on meta tensors, under the dispatch mode that a capture uses.

Older traces hold no strides (tensors are then taken to be contiguous) and no values: numbers take the schema's default,
or 1 if there is none, for no kernel's time depends on them. Lists that shape the result must follow from other
arguments (`_IMPLIED`); where they do not, the call is Unreadable, and so is one whose result was given another type. Copies of
memory alone convert nothing.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosac.capture.device import shapes
from autosac.capture.record.signatures import SignatureTable
from autosac.kineto.reader import HostEvent
from autosac.trace import Signature, TensorMeta

_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::half": torch.float16,
    "c10::bfloat16": torch.bfloat16,
    "long int": torch.int64,
    "long": torch.int64,
    "__int64": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "short": torch.int16,
    "signed char": torch.int8,
    "char": torch.int8,
    "unsigned char": torch.uint8,
    "unsigned short": torch.uint16,
    "unsigned int": torch.uint32,
    "unsigned long": torch.uint64,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::float8_e4m3fn": torch.float8_e4m3fn,
    "c10::float8_e5m2": torch.float8_e5m2,
    "c10::float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "c10::float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
# The numbers of c10::ScalarType, which is how a trace gives a dtype argument.
_SCALAR_TYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16),
    *(None, None, None, None, None, None, None, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz),
    torch.float8_e4m3fnuz,
)
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_HIDDEN = ("c10d", "profiler", "prim", "symm_mem", "prims")
_UNSET = object()
# Concatenations are compiled for the width of an element (Shape.cu); of the types of a width the one that steps hold most.
_WIDTH = re.compile(r"OpaqueType<(\d+)u?>")
_OF_WIDTH = {"1": "bool", "2": "c10::bfloat16", "4": "float", "8": "long"}


_TO_HOST = "aten::_local_scalar_dense"


class Unreadable(Exception):
    """Why a call has no signature, in a few words."""


@cache
def _more_shapes() -> torch.library.Library:
    """Shapes of results that PyTorch itself does not know, as a capture has them; they last as long as the library."""
    library = torch.library.Library("aten", "IMPL")
    shapes.install(library)
    return library


@cache
def _overloads(name: str) -> tuple[Any, ...]:
    """All overloads of an operator that this PyTorch has."""
    namespace, _, base = name.partition("::")
    if not base or not base.isidentifier() or namespace in _HIDDEN:
        return ()
    packet = (
        getattr(getattr(torch.ops, namespace), base, None) if torch._C._jit_get_schemas_for_operator(name) else None
    )
    if packet is None:
        return ()
    found = (getattr(packet, overload) for overload in packet.overloads())
    return tuple(overload for overload in found if _exists(overload))


def _exists(overload: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel(overload.name()))


def is_known(name: str) -> bool:
    """Whether this PyTorch has the operator."""
    return bool(_overloads(name))


def is_vocabulary(op: HostEvent) -> bool:
    """Whether PyTorch's dispatcher shows this call to a capture: composites are seen as what they call."""
    types = op.args.get("Input type")
    return _is_shown(op.name, tuple(map(str, types)) if isinstance(types, list) else ())


@cache
def _is_shown(name: str, types: tuple[str, ...]) -> bool:
    """Some operators are composite in one overload only: that of the call counts, or the first if none fits."""
    fitting = _fitting(name, types) or _overloads(name)[:1]
    return bool(fitting) and not _is_composite(fitting[0])


def _is_composite(overload: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"))


def _fitting(name: str, types: Sequence[str]) -> list[Any]:
    """The overloads that a call may be of: those whose tensors are all there, else those that were called without some."""
    found = _overloads(name)
    whole = [overload for overload in found if _fits(overload, types)]
    return whole or [overload for overload in found if _fits(overload, types, undefined=True)]


def _fits(overload: Any, types: Sequence[str], *, undefined: bool = False) -> bool:
    """Whether the kinds of the arguments are those of the overload's schema.

    `undefined`: tensors may be missing that the schema does not call optional. Autograd's formulas pass such tensors to
    attention's backwards (a mask that there was none of).
    """
    parameters = overload._schema.arguments
    return len(parameters) == len(types) and all(
        _may_be(str(p.type), held) or (undefined and str(p.type) == "Tensor" and held == "")
        for p, held in zip(parameters, types, strict=True)
    )


class _FirstCall(TorchDispatchMode):
    """Keeps the first operator that is called, as a capture records it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self.table = SignatureTable("meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        result = func(*args, **kwargs)
        self.table.add(func, args, kwargs, inputs, _tensors(result))
        return result


def _described(overload: Any, args: list[Any], kwargs: dict[str, Any]) -> Signature:
    """A composite that the GPU runs as one kernel, which a capture records as such.

    Defaults are left out, as PyTorch does for a dispatch mode.
    """
    with torch.no_grad():
        result = overload(*args, **kwargs)
    parameters = {p.name: p for p in overload._schema.arguments}
    positional = [p for p in parameters.values() if not p.kwarg_only]
    while args and _is_default(positional[len(args) - 1], args[-1]):
        args = args[:-1]
    kwargs = {name: value for name, value in kwargs.items() if not _is_default(parameters[name], value)}
    table = SignatureTable("meta")
    table.add(overload, args, kwargs, _tensors((args, kwargs)), _tensors(result))
    return table.finished()[0]


def _is_default(parameter: Any, value: Any) -> bool:
    return parameter.has_default_value() and not isinstance(value, torch.Tensor) and parameter.default_value == value


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def to_signature(op: HostEvent, copies: Sequence[str] = (), node: str = "", kernels: Sequence[str] = ()) -> Signature:
    """The signature of one call. Unreadable if the trace does not say enough.

    `copies`: the names of its copies, which say whether it reads or writes the host's memory; `node`: the autograd node
    that it ran in, whose formula implies arguments that old traces do not hold; `kernels`: the names of its kernels,
    which say how large the elements of a list's tensors are.
    """
    types = op.args.get("Input type")
    dims = op.args.get("Input Dims", op.args.get("Input dims"))
    if not isinstance(types, list) or not isinstance(dims, list) or len(types) != len(dims):
        raise Unreadable("no shapes: record with record_shapes=True")
    if len(types) == 0 and _overloads(op.name)[0]._schema.arguments:
        raise Unreadable("no shapes: record with record_shapes=True")
    call = _Call(op, types, dims, node, bool(copies), kernels)
    why = "no overload of this PyTorch fits its arguments"
    for overload in _fitting(op.name, call.types):
        try:
            return _placed(call.run(overload), copies)
        except Unreadable as e:
            why = str(e)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError) as e:
            why = f"PyTorch refuses the call: {' '.join(str(e).split())[:90]}"
    raise Unreadable(why)


def _placed(signature: Signature, copies: Sequence[str]) -> Signature:
    """With the host's end of a copy on the host."""
    to_device = any("HtoD" in name or "HostToDevice" in name for name in copies)
    to_host = any("DtoH" in name or "DeviceToHost" in name for name in copies)
    if not to_device and not to_host:
        return signature
    if to_host:
        if signature.mutates:
            inputs = tuple(_on_host(m) if i in signature.mutates else m for i, m in enumerate(signature.inputs))
            return signature._replace(inputs=inputs, outputs=tuple(map(_on_host, signature.outputs)))
        return signature._replace(outputs=tuple(map(_on_host, signature.outputs)))
    inputs = tuple(m if i in signature.mutates else _on_host(m) for i, m in enumerate(signature.inputs))
    return signature._replace(inputs=inputs)


def _on_host(meta: TensorMeta) -> TensorMeta:
    return meta._replace(place="cpu")


class _Call:
    """What a trace holds of one call."""

    def __init__(
        self, op: HostEvent, types: list[Any], dims: list[Any], node: str, is_copy: bool, kernels: Sequence[str]
    ) -> None:
        self.name, self.node, self.is_copy, self.kernels = op.name, node, is_copy, kernels
        self.types, self.dims = [str(t) for t in types], dims
        strides, values = op.args.get("Input Strides"), op.args.get("Concrete Inputs")
        self.strides = strides if isinstance(strides, list) and len(strides) == len(dims) else None
        self.values = values if isinstance(values, list) and len(values) == len(dims) else None

    def run(self, overload: Any) -> Signature:
        """Call the overload on meta tensors."""
        _more_shapes()
        parameters = overload._schema.arguments
        values = {p.name: self._value(i, p) for i, p in enumerate(parameters)}
        for name, value in _implied(self, values).items():
            if name in values and (values[name] is _UNSET or self.values is None):
                values[name] = value
        missing = [p.name for p in parameters if values[p.name] is _UNSET]
        if missing:
            raise Unreadable(f"the trace does not hold its argument {missing[0]}")
        if "device" in values:
            values["device"] = torch.device("meta")
        args = [values[p.name] for p in parameters if not p.kwarg_only]
        kwargs = {p.name: values[p.name] for p in parameters if p.kwarg_only}
        if self.name == _TO_HOST:  # its result is a number
            table = SignatureTable("meta")
            table.add(overload, args, kwargs, _tensors(args), [])
            return table.finished()[0]
        if _is_composite(overload):
            return _described(overload, args, kwargs)
        recorder = _FirstCall()
        with torch.no_grad(), recorder:
            overload(*args, **kwargs)
        found = recorder.table.finished()
        if not found:
            raise Unreadable("it calls nothing")
        return found[0]

    def _value(self, i: int, parameter: Any) -> Any:
        kind, held = str(parameter.type), self.types[i]
        if "Tensor" in kind:
            if "List[" in kind:
                return self._tensor_list(i, kind)
            return (
                self._tensor(self.dims[i], self.strides[i] if self.strides else None, held)
                if _is_tensor(held)
                else None
            )
        text = self.values[i] if self.values else _UNSET
        if text is _UNSET or (text == "" and held not in ("", "None")):
            if parameter.name == "dtype" and held == "Scalar" and not self.is_copy:
                raise Unreadable("the trace does not hold its result's type")
            return _default(parameter, kind, held)
        return _parsed(text, kind, parameter)

    def _tensor(self, dims: Any, strides: Any, held: str) -> torch.Tensor:
        dtype = _DTYPES.get(held.lower())
        if dtype is None:
            raise Unreadable(f"unknown type {held[:40]!r}")
        if not _are_sizes(dims):
            raise Unreadable("a shape is damaged")
        if isinstance(strides, list) and len(strides) == len(dims) and _are_sizes(strides):
            return torch.empty_strided(dims, strides, dtype=dtype, device="meta")
        return torch.empty(dims, dtype=dtype, device="meta")

    def _tensor_list(self, i: int, kind: str) -> Any:
        dims, strides = self.dims[i], self.strides[i] if self.strides else None
        if not isinstance(dims, list) or not dims:
            if "Optional" in kind and self.types[i] in ("", "None"):
                return None
            raise Unreadable("the trace does not hold the tensors of its list")
        dtype = _list_dtype(self.types, self.kernels)
        nested = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
        return [self._tensor(d, s, dtype) for d, s in zip(dims, nested, strict=True)]


def _list_dtype(types: Sequence[str], kernels: Sequence[str] = ()) -> str:
    """A list's type is not noted: that of the other tensors, else one as wide as what the kernel copies, else float32."""
    copied = (_WIDTH.search(kernel) for kernel in kernels)
    wide = next((_OF_WIDTH.get(found[1]) for found in copied if found), None)
    return next((t for t in types if _is_tensor(t)), wide or "float")


def _is_tensor(held: str) -> bool:
    return held.lower() in _DTYPES


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _may_be(kind: str, held: str) -> bool:
    """Whether an argument of this schema type may have been noted so."""
    optional = "Optional" in kind
    if "Tensor" in kind:
        if "List[" in kind:
            return held in ("TensorList", "GenericList") or (optional and held == "")
        return _is_tensor(held) or (optional and held in ("", "None"))
    if _is_tensor(held):
        return False
    if held == "Scalar":
        return "List[" not in kind and "str" not in kind
    if held == "ScalarList":
        return "List[" in kind
    if held == "TensorList":
        return False
    return optional or "List[" in kind or kind not in ("int", "float", "bool", "number", "Scalar", "SymInt")


def _default(parameter: Any, kind: str, held: str) -> Any:
    """An argument whose value was not noted: the schema's default, or 1 for a number that was given."""
    default = parameter.default_value if parameter.has_default_value() else _UNSET
    number = held == "Scalar" and "List[" not in kind and any(word in kind for word in ("number", "Scalar", "float"))
    if number and (default is None or default is _UNSET):
        return 1.0
    if default is not _UNSET or "List[" in kind:
        return default
    if "Optional" in kind:
        return None
    return False if kind == "bool" else _UNSET


def _parsed(text: Any, kind: str, parameter: Any) -> Any:
    """An argument from the text that was noted."""
    if not isinstance(text, str) or text in ("", "None"):
        if isinstance(text, list):
            return text
        return None if "Optional" in kind or not parameter.has_default_value() else parameter.default_value
    if "str" in kind:
        return text
    try:
        value = ast.literal_eval({"inf": "1e999", "-inf": "-1e999", "nan": "0.0"}.get(text, text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return parameter.default_value if parameter.has_default_value() else _UNSET
    return _typed(value, kind, parameter.name)


def _typed(value: Any, kind: str, name: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if name == "dtype" or "ScalarType" in kind or name == "output_dtype":
            return _SCALAR_TYPES[value] if 0 <= value < len(_SCALAR_TYPES) else None
        if name == "layout":
            return torch.strided if value == 0 else None
        if name == "memory_format":
            return _MEMORY_FORMATS[value] if 0 <= value < len(_MEMORY_FORMATS) else None
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(3.0e38, value)
    return value


# ---- arguments that follow from others -------------------------------------------------------------------------


def _normalized(call: _Call, values: Mapping[str, Any]) -> dict[str, Any]:
    weight = values.get("weight")
    if not isinstance(weight, torch.Tensor):
        return {}
    return {"normalized_shape": list(weight.shape), "output_mask": [True, True, True]}


def _summed(call: _Call, values: Mapping[str, Any]) -> dict[str, Any]:
    """The gradient of a bias: the sum of all rows (PyTorch's formula of the node's backward)."""
    return {"dim": [0], "keepdim": True} if call.node in ("AddmmBackward0", "AddmmBackward") else {}


# Lists that old traces do not hold, where other arguments or the formula of the autograd node imply them.
_IMPLIED: dict[str, Callable[[_Call, Mapping[str, Any]], dict[str, Any]]] = {
    "aten::native_layer_norm": _normalized,
    "aten::native_layer_norm_backward": _normalized,
    "aten::sum": _summed,
}


def _implied(call: _Call, values: Mapping[str, Any]) -> dict[str, Any]:
    rule = _IMPLIED.get(call.name)
    return rule(call, values) if rule is not None else {}

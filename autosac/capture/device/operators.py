"""What is known of an operator, looked up fast: the hash of an OpOverload is Python code, and every call asks many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def per_operator(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """`functools.cache` for a function of one operator, by its identity. The operators stay alive."""
    known: dict[int, tuple[Any, _T]] = {}

    def call(func: Any) -> _T:
        entry = known.get(id(func))
        if entry is None:
            entry = known[id(func)] = func, function(func)
        return entry[1]

    call.__doc__ = function.__doc__
    return call


@per_operator
def mutates(func: Any) -> bool:
    """Whether an operator writes into an argument."""
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


_BUILT_IN = ("aten", "prims", "prim", "quantized", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")


@per_operator
def is_custom(func: Any) -> bool:
    """Whether it is not PyTorch's own: what it does with values is code of others, of kernels that only a GPU has."""
    return getattr(func, "namespace", "aten") not in _BUILT_IN and isinstance(func, torch._ops.OpOverload)

"""What is known of an operator: what it writes, whether it may run again, whether its result arrives later.

The schema says which arguments an operator changes (`written_arguments`). A few operators change more than their schema
says: older normalisation operators their running statistics (`_HIDDEN_WRITES`), communication in place what it is given for
results (`torch.distributed.all_reduce`). Operators of other libraries may do anything, and communication in which the ranks
do not all do the same would wait for ranks that do not run it again (`is_foreign`): their results are always kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autosac.integrations.operators.kernels import written_arguments_of
from autosac.integrations.operators.keys import is_collective, op_name
from autosac.integrations.operators.names import is_foreign_name

# Running statistics that are written in training although the schema does not say so: (argument, argument that says whether).
_HIDDEN_WRITES = {
    "aten::native_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::cudnn_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::miopen_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::batch_norm_gather_stats": (("running_mean", "running_var"), None),
    "aten::batch_norm_gather_stats_with_counts": (("running_mean", "running_var"), None),
}
# Kernels that ask whether their arguments need gradients, and compute something else if not.
_ASKS_FOR_GRADIENTS = frozenset({"aten._sparse_mm_reduce_impl"})
_BETWEEN_SOME = frozenset(
    f"c10d.{name}" for name in ("reduce_", "scatter_", "gather_", "send", "recv_", "recv_any_source_")
)


@functools.cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """Name and whether it is written, of every argument in the schema's order."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    in_place = getattr(func, "namespace", "") == "c10d" and schema.name.endswith("_")
    return tuple(
        (a.name, (a.alias_info is not None and a.alias_info.is_write) or (in_place and _is_result(a.name)))
        for a in schema.arguments
    )


def _is_result(name: str) -> bool:
    """Whether communication in place writes to its argument of this name."""
    return name == "tensors" or name.startswith("output")


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator's schema says it changes."""
    return tuple((i, name) for i, (name, written) in enumerate(_arguments(func)) if written)


@functools.cache
def _hidden(func: Any) -> tuple[tuple[tuple[int, str], ...], int, str]:
    schema = getattr(func, "_schema", None)
    names, flag = _HIDDEN_WRITES.get(schema.name if schema is not None else "", ((), None))
    positions = {name: i for i, (name, _) in enumerate(_arguments(func))}
    places = tuple((positions[name], name) for name in names if name in positions)
    return places, positions.get(flag, -1) if flag else -1, flag or ""


class TritonLaunch:
    """The launch of a Triton kernel, which no schema describes.

    `kernel`: the ``JITFunction``, whose source says what it writes to (`kernels`). If it does not say that, or without a
    kernel, it may change every tensor that the unit made.
    """

    def __init__(self, call: Any, name: str, kernel: Any = None) -> None:
        self._call = call
        self.name = name
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch it again."""
        self._call(*args, **kwargs)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The arguments that this launch may change; None: any."""
        return None if self._kernel is None else written_arguments_of(self._kernel, args, kwargs)


def argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at this position or of this name; None if it was left out."""
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments (tensors or lists of tensors) whose elements this call changes.

    Operators that only change sizes or strides (``t_``, ``squeeze_``, ``set_``) change no element; ``resize_`` may.
    """
    if only_metadata(func):
        return []
    places = written_arguments(func)
    hidden, flag, name = _hidden(func)
    if hidden and (flag < 0 or argument((flag, name), args, kwargs)):
        places = places + hidden
    return [argument(place, args, kwargs) for place in places]


@functools.cache
def may_write(func: Any) -> bool:
    """Whether some call of this operator changes elements of what it is given."""
    return not only_metadata(func) and bool(written_arguments(func) or _hidden(func)[0])


@functools.cache
def only_metadata(func: Any) -> bool:
    """Whether the operator changes how a tensor looks at its memory, and nothing else."""
    return torch.Tag.inplace_view in getattr(func, "tags", ()) and "resize" not in str(func)


@functools.cache
def is_foreign(func: Any) -> bool:
    """Whether the operator must not run again: a custom one, of which nothing is known; one to which other ranks belong; one
    that computes something else when no gradient is needed.
    """
    if getattr(func, "namespace", None) is None:
        return False
    name = op_name(func)
    return is_foreign_name(name) or name.removesuffix(".default") in _BETWEEN_SOME | _ASKS_FOR_GRADIENTS


@functools.cache
def is_wait(func: Any) -> bool:
    """Whether the operator only waits for a result that communication is still writing, and returns it."""
    return is_collective(func) and "wait_tensor" in str(func)

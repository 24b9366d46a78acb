"""Optimizers that work in slices: their temporaries are those of two slices of the parameters, not of all.

PyTorch's optimizers hand all parameters of a kind to one function for lists (``torch._foreach_sqrt``), whose results are as
large as the parameters: for AdamW a fifth of what parameters, gradients and states take, where all have one type. Nothing that
a module keeps or recomputes lowers that. But these functions go through the tensors of a list one by one, so a list may be
divided, and no number changes. They take another route, with other roundings, for a list of which one tensor has another
layout or type than the rest. Such lists stay whole.

The optimizers of `torch.optim` sort their parameters by device and type with one method, and go through what it returns. It
returns slices here. A fused implementation has no temporaries, and is left alone, as are optimizers that are not known to
read nothing but the tensors of what is returned (`torch.optim.Adafactor`, and those of other packages).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autosac.plans import Plan

_MODULES = frozenset(
    f"torch.optim.{name}"
    for name in ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
)
_FUNCTIONS = "_multi_tensor_"
_METHOD = "_group_tensors_by_device_and_dtype"

_bytes = 0


def slice_optimizers(slice_bytes: int) -> None:
    """From now on optimizers of this process work on parameters of so many bytes at once, or on one; 0: on all."""
    global _bytes
    _bytes = slice_bytes
    original = getattr(Optimizer, _METHOD)
    if not slice_bytes or getattr(original, "_autosac", False):
        return

    @functools.wraps(original)
    def sorted_tensors(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not _bytes or torch.compiler.is_compiling() or not _is_for_lists(sys._getframe(1)):
            return found
        return {_Kind(key): part for key, value in found.items() for part in _slices(*value)}

    sorted_tensors._autosac = True  # type: ignore[attr-defined]
    setattr(Optimizer, _METHOD, staticmethod(sorted_tensors))


def follow_slices(plan: Plan) -> None:
    """Let optimizers work in slices if the plan says so. What another plan has set stays: no number depends on it."""
    if plan.settings.optimizer_slice_bytes:
        slice_optimizers(plan.settings.optimizer_slice_bytes)


def in_force() -> int:
    """How much optimizers of this process work on at once; 0: all."""
    return _bytes


@contextlib.contextmanager
def sliced_optimizers(slice_bytes: int) -> Iterator[None]:
    """`slice_optimizers` within the context."""
    before = _bytes
    slice_optimizers(slice_bytes)
    try:
        yield
    finally:
        slice_optimizers(before)


class _Kind(tuple[Any, ...]):
    """The device and the type of a slice. Of equal ones each is a key of its own."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


def _is_for_lists(frame: Any) -> bool:
    """Whether one of PyTorch's functions for lists of parameters asks."""
    return frame.f_globals.get("__name__") in _MODULES and frame.f_code.co_name.startswith(_FUNCTIONS)


def _slices(lists: Sequence[list[Any]], indices: Sequence[int]) -> Iterator[tuple[list[list[Any]], Sequence[int]]]:
    """The parts of lists that begin and end at the same places; `indices` are as long, or empty."""
    if not _is_uniform(lists):
        yield list(lists), indices
        return
    for begin, end in _bounds(_local_bytes(parameter) for parameter in lists[0]):
        yield [each[begin:end] for each in lists], indices[begin:end]


def _is_uniform(lists: Sequence[list[Any]]) -> bool:
    """Whether all tensors of a list have one type, and lie in memory as their parameters, which are dense. Numbers of steps
    and the like (tensors without dimensions) and what a parameter does not have do not count.
    """
    laid_out = [_layout(parameter) for parameter in lists[0]]
    if any(layout is None for layout in laid_out):
        return False
    for each in lists:
        pairs = [(t, layout) for t, layout in zip(each, laid_out, strict=False) if t is not None and t.dim()]
        if len({tensor.dtype for tensor, _ in pairs}) > 1 or any(_layout(tensor) != layout for tensor, layout in pairs):
            return False
    return True


def _layout(tensor: Any) -> tuple[Any, ...] | None:
    """Sizes and strides of what this rank has; None where that is no dense block of memory."""
    local = _local(tensor)
    if local.layout is not torch.strided:
        return None
    expected = 1
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(local.shape), tuple(local.stride())


def _bounds(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where slices begin and end, given the sizes of all parameters: as many in each as take `_bytes`, at least one."""
    begin = end = filled = 0
    for size in sizes:
        if end > begin and filled + size > _bytes:
            yield begin, end
            begin, filled = end, 0
        end, filled = end + 1, filled + size
    yield begin, end


def _local_bytes(parameter: Any) -> int:
    local = _local(parameter)
    return int(local.numel() * local.element_size())


def _local(tensor: Any) -> Any:
    """What this rank has of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)

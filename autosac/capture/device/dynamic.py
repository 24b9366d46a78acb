"""Results of operators whose output shape depends on data (`nonzero`, `unique`, packed sequences).

They are real where their inputs are known. Where values are not, the shape is the largest that it can be: an unknown mask
selects everything, and unknown numbers are all different. So memory and time are upper bounds; who wants to know is notified
(`on_assumption`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device.operators import is_custom, per_operator
from autosac.capture.device.shadows import MOST_KNOWN, UNKNOWN_INTEGER, known_lengths, known_values, shadow
from autosac.capture.device.values import shadows

aten = torch.ops.aten


class OnHost(NamedTuple):
    """A part of a result that is a real tensor on the host."""

    tensor: torch.Tensor


_listeners: list[Callable[[str], None]] = []  # one at most


def on_assumption(note: Callable[[str], None]) -> None:
    """Set who listens to assumptions about unknown values from now on."""
    _listeners[:] = [note]


@per_operator
def is_dynamic(func: Any) -> bool:
    """Whether the operator's output shapes depend on data. Indexing is not one: it asks `nonzero` for its masks."""
    return func in _FROM_SIZES or (torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor)


def dynamic(func: Any, args: Any, kwargs: Any) -> Any:
    """The result, with tensors on the meta device where their values are unknown; None if nothing is known of it."""
    from_sizes = _FROM_SIZES.get(func)
    with torch._C._DisableTorchDispatch():
        if from_sizes is not None:
            return from_sizes(args)
        if not is_custom(func) and all(
            shadow(leaf) is not None for leaf in pytree.tree_leaves(args) if isinstance(leaf, FakeTensor)
        ):
            return func(*shadows(args), **kwargs)
        largest = _LARGEST.get(func)
        if largest is None:
            return None
        found, assumption = largest(args)
    if assumption:
        for note in _listeners:
            note(assumption)
    return found


@contextmanager
def largest_sizes(args: Any) -> Iterator[None]:
    """A custom operator's shape function asks for a size that depends on data (`new_dynamic_size`): it gets the largest one.

    That is what it says itself, or else as many as the longest input has rows (of boxes that suppress each other, all).
    """
    rows = max((x.shape[0] for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim()), default=1)
    before = FakeImplCtx.new_dynamic_size

    def size(_: Any, *, min: int = 0, max: int | None = None) -> int:
        return rows if max is None else max

    FakeImplCtx.new_dynamic_size = size  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FakeImplCtx.new_dynamic_size = before  # type: ignore[method-assign]
    for note in _listeners:
        note(_LONGEST)


_LONGEST = "results of custom operators whose sizes depend on data are assumed to be as large as they can be"
_EVERYTHING = "masks that depend on activations are assumed to select everything"
_BELOW = "numbers that are counted (bincount) are assumed to be below its `minlength`"
_ONCE = "numbers of repetitions (repeat_interleave) that depend on activations are assumed to be 1"
_DIFFERENT = "numbers whose repetitions are dropped (unique) are assumed to be all different"


def _nonzero(args: Any) -> tuple[Any, str]:
    x = args[0]
    if x.numel() > MOST_KNOWN:
        return _meta(x.numel(), x.dim(), dtype=torch.int64), _EVERYTHING
    return torch.ones(x.shape, dtype=torch.bool).nonzero(), _EVERYTHING


def _masked_select(args: Any) -> tuple[Any, str]:
    x, mask = args
    shape, known = torch.broadcast_shapes(x.shape, mask.shape), shadow(mask)
    if known is not None:
        return _meta(int(known.expand(shape).sum()), dtype=x.dtype), ""
    return _meta(shape.numel(), dtype=x.dtype), _EVERYTHING


def _unique(args: Any) -> tuple[Any, str]:
    x = args[0]
    each = _meta(*x.shape, dtype=torch.int64)
    return (_meta(x.numel(), dtype=x.dtype), each, _meta(x.numel(), dtype=torch.int64)), _DIFFERENT


def _unique_rows(args: Any) -> tuple[Any, str]:
    x, dim = args[0], args[1]
    counts = _meta(x.shape[dim], dtype=torch.int64)
    return (_meta(*x.shape, dtype=x.dtype), counts, counts.clone()), _DIFFERENT


def _bincount(args: Any) -> tuple[Any, str]:
    x: Any = args[0]
    weights = args[1] if len(args) > 1 else None
    least: int = args[2] if len(args) > 2 else 0
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return _meta(max(least, UNKNOWN_INTEGER + 1) if x.numel() else least, dtype=dtype), _BELOW


def _repeat_interleave(args: Any) -> tuple[Any, str]:
    return _meta(args[0].numel() * UNKNOWN_INTEGER, dtype=args[0].dtype), _ONCE


# Their largest results where values are unknown, and what that assumes.
_LARGEST: dict[Any, Callable[[Any], tuple[Any, str]]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_rows,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}


def _pack_padded_sequence(args: Any) -> Any:
    """``(padded, lengths on the host, batch_first)``: rows of all times, and how many sequences reach each time."""
    padded, lengths, _ = args
    known = known_values(lengths)
    if known is None:
        return None
    sizes = (known[None, :] > torch.arange(int(known.max()))[:, None]).sum(1)
    rows = _meta(int(sizes.sum()), *padded.shape[2:], dtype=padded.dtype)
    return rows, sizes if known is not lengths else OnHost(sizes)


def _ctc_loss(args: Any) -> Any:
    """``(log_probs [T, B, classes], targets, input lengths, target lengths)``: losses, and log alpha [B, T, 2 S + 1]."""
    log_probs, lengths = args[0], args[3]
    batch = len(lengths)
    states = 2 * max(lengths, default=0) + 1
    return _meta(batch, dtype=log_probs.dtype), _meta(batch, log_probs.shape[0], states, dtype=log_probs.dtype)


def _ctc_loss_of_tensors(args: Any) -> Any:
    """The same with lengths in tensors, which a GPU is not given: unknown targets are as long as they can be."""
    log_probs, targets, _, lengths = args[:4]
    longest = targets.shape[-1] // (1 if targets.dim() == 2 else max(lengths.numel(), 1))
    return _ctc_loss((log_probs, targets, None, known_lengths(lengths, longest)))


def _lstsq(args: Any) -> Any:
    """CUDA has one driver (gels): neither the rank nor singular values. Residuals are those of systems with more rows."""
    a, b = args[:2]
    rows, columns = a.shape[-2:]
    is_vector = b.dim() == a.dim() - 1
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-1] if is_vector else b.shape[:-2])
    right = b.shape[-1:] if not is_vector else ()
    residuals = (*batch, *right) if rows > columns else (0,)
    nothing = _meta(0, dtype=torch.int64), _meta(0, dtype=a.dtype)
    return _meta(*batch, columns, *right, dtype=a.dtype), _meta(*residuals, dtype=a.dtype), *nothing


# Those whose shapes follow from some of their inputs alone.
_FROM_SIZES: dict[Any, Callable[[Any], Any]] = {
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss_of_tensors,
    aten.linalg_lstsq.default: _lstsq,
}


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

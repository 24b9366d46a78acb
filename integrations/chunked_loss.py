"""A loss computed in chunks of rows, so that its temporaries are those of one chunk.

The loss of a large vocabulary holds several tensors as large as the logits in float32: the logits themselves, their
log-softmax, and the gradients of both. No module's checkpointing lowers that peak. Where the loss is a sum over rows, each
chunk of rows can be computed by itself: the forward keeps nothing but the logits, the backward computes a chunk's loss again
and writes its gradient to its place. A row's gradient does not depend on other rows, so it is bitwise what it would be
without chunks; the loss is the same sum in another order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from autosac.errors import AutosacError, UsageError
from autosac.limits import MOST_LOSS_CHUNKS
from autosac.plans import Plan

Loss: TypeAlias = Callable[..., Tensor]

# The sum of parts may differ by rounding from the whole's loss, a mean by a factor of two.
_ROUNDING = {torch.float32: 2e-5, torch.float64: 2e-5}
_COARSE = 1e-2  # of shorter types, which the loss may have been computed in
# So few predictions may be given to the loss as a whole, to compare: 16 MiB in float32.
_FEW_ELEMENTS = 2**22

_of_capture: list[int] = []


@contextlib.contextmanager
def captured_in(chunks: int) -> Iterator[None]:
    """Within the context every chunked loss has this many chunks, whatever it was made with: for captures."""
    _of_capture.append(chunks)
    try:
        yield
    finally:
        _of_capture.pop()


def chunked_loss(loss_fn: Loss, plan: Plan | None = None, *, chunks: int | None = None) -> ChunkedLoss:
    """A loss function that is computed in chunks of rows, so that its temporaries are those of one chunk.

    Args:
        loss_fn: called with predictions ``[*rows, classes]`` and labels ``[*rows]``. It has to be a sum over rows, as
            TorchTitan's losses are, or `torch.nn.functional.cross_entropy` or a `torch.nn.CrossEntropyLoss` (reduction "sum"
            or "mean").
        plan: a plan that contains the number of chunks.
        chunks: the number of chunks, instead of a plan; 1 computes the loss as a whole. While a step is captured, the capture
            decides.

    Returns:
        A function to call instead of `loss_fn`. Gradients of the predictions are bitwise those of `loss_fn`; those of a
        mean with weights of classes are to rounding, since the weights are summed in another order.

    Raises:
        UsageError: `loss_fn` is known not to be a sum over rows, or the number of chunks is out of range.
        AutosacError: on a call, if the loss is not a sum over rows, depends on parameters of its own, draws random numbers, or
            changes its predictions.
    """
    if chunks is None:
        chunks = plan.settings.loss_chunks if plan is not None else 1
    if not 1 <= chunks <= MOST_LOSS_CHUNKS:
        raise UsageError(f"{chunks} chunks of a loss: expected 1 to {MOST_LOSS_CHUNKS}")
    return ChunkedLoss(loss_fn, chunks)


class ChunkedLoss:
    """See `chunked_loss`."""

    def __init__(self, loss_fn: Loss, chunks: int) -> None:
        self.loss_fn = loss_fn
        self.chunks = chunks
        self._sum, self._count = _as_sum(loss_fn)
        self._is_cross_entropy = self._sum is not loss_fn
        self._is_checked = False

    def __call__(self, pred: Tensor, labels: Tensor) -> Tensor:
        """The loss of predictions, of shape [*rows, classes] or that of the labels, and labels, of shape [*rows]."""
        chunks = _of_capture[-1] if _of_capture else self.chunks
        if chunks == 1 or not pred.requires_grad or not torch.is_grad_enabled():
            return self.loss_fn(pred, labels)
        if self._is_cross_entropy and (pred.dim() != 2 or labels.dim() != 1):
            raise AutosacError(
                "a cross-entropy in chunks takes predictions [rows, classes] and labels [rows] of whole numbers, not "
                f"{tuple(pred.shape)} and {tuple(labels.shape)}: flatten them before"
            )
        pred, labels = _rows_in_front(pred, labels)
        if not self._is_checked:
            self._is_checked = _is_sum_over_rows(self._sum, pred, labels, chunks)
        total: Tensor = _Chunked.apply(pred, labels, self._sum, chunks)  # type: ignore[no-untyped-call] # torch's
        return total if self._count is None else total / self._count(labels)


class _Chunked(torch.autograd.Function):
    """The sum of a loss over chunks of dimension 1 of predictions [1, rows, ...] and labels [1, rows, ...]."""

    @staticmethod
    def forward(ctx: Any, pred: Tensor, labels: Tensor, loss_fn: Loss, chunks: int) -> Tensor:
        ctx.save_for_backward(pred, labels)
        ctx.loss_fn, ctx.chunks = loss_fn, chunks
        ctx.autocast = _autocast_of(pred)
        parts = zip(pred.chunk(chunks, 1), labels.chunk(chunks, 1), strict=True)
        first, *rest = (loss_fn(*part) for part in parts)
        return sum(rest, first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise AutosacError(
                "a loss in chunks has no second derivative: call backward without create_graph, or give it one chunk"
            )
        pred, labels = ctx.saved_tensors
        gradients = torch.empty_like(pred)
        parts = zip(gradients.chunk(ctx.chunks, 1), pred.chunk(ctx.chunks, 1), labels.chunk(ctx.chunks, 1), strict=True)
        for place, rows, wanted in parts:
            with torch.enable_grad(), ctx.autocast():
                rows = rows.detach().requires_grad_()
                loss = ctx.loss_fn(rows, wanted)
            _check_own_parameters(loss, rows)
            place.copy_(torch.autograd.grad(loss, rows, gradient)[0])
            del loss
        return gradients, None, None, None


def _rows_in_front(pred: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and labels with all rows in dimension 1, and one dimension of size 1 in front of it."""
    dims = labels.dim() if pred.dim() == labels.dim() + 1 else 1
    if dims == 0 or pred.shape[:dims] != labels.shape[:dims]:
        raise AutosacError(
            f"a loss of predictions {tuple(pred.shape)} and labels {tuple(labels.shape)} cannot be computed in chunks: "
            "predictions are to be [*rows, classes], labels [*rows]"
        )
    return pred.reshape(1, -1, *pred.shape[dims:]), labels.reshape(1, -1, *labels.shape[dims:])


def _as_sum(loss_fn: Loss) -> tuple[Loss, Callable[[Tensor], Tensor] | None]:
    """A loss as a sum over rows, and what that is to be divided by, from the labels (None: nothing)."""
    settings: dict[str, Any]
    if loss_fn is F.cross_entropy:
        settings = {}
    elif type(loss_fn) is nn.CrossEntropyLoss:
        settings = {name: getattr(loss_fn, name) for name in ("weight", "ignore_index", "label_smoothing", "reduction")}
    else:
        return loss_fn, None
    reduction = settings.pop("reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"a loss with reduction={reduction!r} is not a number that can be summed over rows")
    settings = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, **settings}

    def summed(pred: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum", **settings)

    return summed, None if reduction == "sum" else partial(_counted, settings["weight"], settings["ignore_index"])


def _counted(weight: Tensor | None, ignore_index: int, labels: Tensor) -> Tensor:
    """What the mean of a cross-entropy is divided by: the number of labels that count, or the sum of their weights."""
    counts = labels != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[labels.where(counts, 0)] * counts).sum()


def _is_sum_over_rows(loss_fn: Loss, pred: Tensor, labels: Tensor, chunks: int) -> bool:
    """Whether the loss of two halves of chunks was seen to be the sum of each one's. AutosacError if it is not.

    False if fewer than two halves have a loss at all (their rows are ignored), which says nothing. If all rows are few, they
    are compared with their halves, too.
    """
    if is_fake(pred) or pred.shape[1] < 2:
        return False
    before, tolerance = _random_states(pred), _ROUNDING.get(pred.dtype, _COARSE)
    halves = list(zip(pred.chunk(2 * chunks, 1), labels.chunk(2 * chunks, 1), strict=True))
    each = [_number(loss_fn, *half) for half in halves]
    found = [i for i, part in enumerate(each) if part and math.isfinite(part)][:2]
    if len(found) == 2:
        both = _number(loss_fn, *_joined([halves[i] for i in found]))
        _compare(both, [each[i] for i in found], tolerance, "two parts of the rows")
    if pred.numel() <= _FEW_ELEMENTS and all(math.isfinite(part) for part in each):
        _compare(_number(loss_fn, pred, labels), each, tolerance, "all rows")
    if any(not torch.equal(a, b) for a, b in zip(before, _random_states(pred), strict=True)):
        raise AutosacError("the loss cannot be computed in chunks: it draws random numbers, which would be others")
    return len(found) == 2


def _compare(whole: float, parts: list[float], tolerance: float, what: str) -> None:
    if math.isfinite(whole) and abs(whole - sum(parts)) > tolerance * sum(map(abs, parts)):
        shown = " + ".join(f"{part:.6g}" for part in parts[:4]) + (" + ..." if len(parts) > 4 else "")
        raise AutosacError(
            f"the loss cannot be computed in chunks: that of {what} is not the sum of each one's ({whole:.6g}, {shown}); give "
            "one with reduction='sum' and divide by the number of rows"
        )


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    preds, labels = zip(*parts, strict=True)
    return torch.cat(preds, 1), torch.cat(labels, 1)


def _number(loss_fn: Loss, pred: Tensor, labels: Tensor) -> float:
    """The loss as a number. AutosacError if it is none, or if its function changes the predictions."""
    version = pred._version
    try:
        with torch.no_grad():
            loss = loss_fn(pred, labels)
    except (RuntimeError, ValueError, IndexError) as e:
        raise AutosacError(f"the loss cannot be computed in chunks, [1, rows, ...] each: {e}") from e
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise AutosacError(f"{got} cannot be computed in chunks: it has to be one number")
    if pred._version != version:
        raise AutosacError("the loss cannot be computed in chunks: its function changes the predictions in place")
    return float(loss)


def _random_states(pred: Tensor) -> list[Tensor]:
    device = [] if pred.device.type == "cpu" else [torch.get_device_module(pred.device).get_rng_state(pred.device)]
    return [torch.get_rng_state(), *device]


def _autocast_of(pred: Tensor) -> Callable[[], Any]:
    """The autocast that is active here, to be entered again."""
    kind = pred.device.type
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext
    return partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


def _check_own_parameters(loss: Tensor, rows: Tensor) -> None:
    """AutosacError if the loss depends on a leaf other than its rows, whose gradient would be lost."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable is not rows:
            raise AutosacError(
                f"the loss cannot be computed in chunks: it has a parameter of its own, of shape {tuple(variable.shape)}"
            )
        todo += [following for following, _ in node.next_functions]

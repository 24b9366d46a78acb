"""A loss in chunks of rows: the same gradients, less memory, and a clear refusal where it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autosac
from autosac.errors import AutosacError, UsageError
from autosac.integrations.chunked_loss import captured_in
from autosac.plans import Plan, Settings
from plans import MADE_FOR

Loss = Callable[[Tensor, Tensor], Tensor]


def titans(pred: Tensor, labels: Tensor) -> Tensor:
    """TorchTitan's loss: a sum over rows in float32."""
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)


def flows(pred: Tensor, labels: Tensor) -> Tensor:
    """The loss of diffusion and flow models: a sum of squares, labels as large as predictions."""
    return F.mse_loss(pred.float(), labels.float().detach(), reduction="sum")


def outcome(loss_fn: Loss, pred: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The loss, divided by a number of tokens as TorchTitan does, and the gradient of the predictions."""
    pred = pred.clone().requires_grad_()
    loss = loss_fn(pred, labels) / scale
    loss.backward()
    assert pred.grad is not None
    return loss.detach(), pred.grad


def labelled(rows: tuple[int, ...], classes: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random predictions, and labels of which about one in four is ignored, the first ones not."""
    generator = torch.Generator().manual_seed(seed)
    pred = torch.randn(*rows, classes, generator=generator).to(dtype)
    labels = torch.randint(0, classes, rows, generator=generator)
    ignored = torch.rand(rows, generator=generator) < 0.25
    ignored.view(-1)[:2] = False
    return pred, labels.masked_fill(ignored, -100)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 9)),
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1.0, 3.0, 17.0]),
)
def test_rows_have_bitwise_the_same_gradients(
    rows: tuple[int, int], chunks: int, seed: int, dtype: torch.dtype, scale: float
) -> None:
    """However many chunks, more than rows included: gradients are equal bit by bit, losses up to the order of summation."""
    pred, labels = labelled(rows, 11, seed, dtype)
    loss, gradient = outcome(titans, pred, labels, scale)
    in_chunks, chunked = outcome(autosac.chunked_loss(titans, chunks=chunks), pred, labels, scale)
    assert torch.equal(gradient, chunked)
    torch.testing.assert_close(loss, in_chunks)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_torchs_cross_entropy_may_be_a_mean(weighted: bool, smoothing: float, reduction: str) -> None:
    """Its mean is that of the labels that count, by their weights: each chunk is summed, the sum divided once."""
    pred, labels = labelled((13,), 5, 3, torch.float32)
    weight = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25]) if weighted else None
    module = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction=reduction)
    loss, gradient = outcome(module, pred, labels, 1.0)
    in_chunks, chunked = outcome(autosac.chunked_loss(module, chunks=4), pred, labels, 1.0)
    torch.testing.assert_close(loss, in_chunks)
    torch.testing.assert_close(gradient, chunked)
    if not weighted:  # weights are multiplied by in another place
        assert torch.equal(gradient, chunked)


def test_the_function_is_known_too() -> None:
    """`F.cross_entropy` itself: its mean, with -100 ignored."""
    pred, labels = labelled((9,), 4, 5, torch.float32)
    _, gradient = outcome(F.cross_entropy, pred, labels, 1.0)
    assert torch.equal(gradient, outcome(autosac.chunked_loss(F.cross_entropy, chunks=3), pred, labels, 1.0)[1])


def test_labels_as_large_as_predictions() -> None:
    """A squared error is summed over chunks of the first dimension."""
    pred, target = torch.randn(6, 3, 4, dtype=torch.bfloat16), torch.randn(6, 3, 4)
    _, gradient = outcome(flows, pred, target, 1.0)
    assert torch.equal(gradient, outcome(autosac.chunked_loss(flows, chunks=4), pred, target, 1.0)[1])


def test_a_graph_with_many_paths_is_walked_once() -> None:
    """Sixty sums of a tensor and itself have more paths than anybody could follow."""

    def winding(pred: Tensor, labels: Tensor) -> Tensor:
        for _ in range(60):
            pred = (pred + pred) / 2
        return titans(pred, labels)

    pred, labels = labelled((2, 4), 3, 0, torch.float32)
    _, gradient = outcome(winding, pred, labels, 1.0)
    assert torch.equal(gradient, outcome(autosac.chunked_loss(winding, chunks=3), pred, labels, 1.0)[1])


def test_the_forward_keeps_no_more_than_predictions_and_labels() -> None:
    """Without chunks autograd keeps the log-softmax in float32, too; with chunks only what the loss was given."""
    pred, labels = labelled((2, 8), 16, 1, torch.bfloat16)
    kept: list[tuple[torch.dtype, int]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        autosac.chunked_loss(titans, chunks=4)(pred.requires_grad_(), labels)
    assert kept == [(torch.bfloat16, 256), (torch.int64, 16)]


def test_the_backward_holds_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is called for each chunk in the forward and again in the backward, with that chunk's rows only."""
    rows: list[int] = []

    def counting(pred: Tensor, labels: Tensor) -> Tensor:
        rows.append(pred.shape[1])
        return titans(pred, labels)

    pred, labels = labelled((1, 10), 4, 2, torch.float32)
    loss = autosac.chunked_loss(counting, chunks=4)
    outcome(loss, pred, labels, 1.0)
    assert rows == [*[2] * 5, 4, 10, *[3, 3, 3, 1] * 2], "halves of chunks, two together, all: whether it is a sum"
    rows.clear()
    outcome(loss, pred, labels, 1.0)
    assert rows == [3, 3, 3, 1] * 2


def test_autocast_is_as_in_the_forward() -> None:
    """A loss with a product in it runs in bfloat16 in both passes if it does without chunks."""
    basis = torch.randn(4, 4)

    def rotated(pred: Tensor, labels: Tensor) -> Tensor:
        return titans(pred @ basis, labels)

    pred, labels = labelled((1, 8), 4, 4, torch.float32)

    def under(loss_fn: Loss) -> Tensor:
        leaf = pred.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(leaf, labels)
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(under(rotated), under(autosac.chunked_loss(rotated, chunks=2)))


def test_evaluation_and_one_chunk_call_the_loss_itself() -> None:
    """Without gradients nothing is kept, so the loss runs as it is; as it does in one chunk."""
    seen: list[torch.Size] = []

    def noting(pred: Tensor, labels: Tensor) -> Tensor:
        seen.append(pred.shape)
        return titans(pred, labels)

    pred, labels = labelled((2, 3), 4, 0, torch.float32)
    autosac.chunked_loss(noting, chunks=2)(pred, labels)
    with torch.no_grad():
        autosac.chunked_loss(noting, chunks=2)(pred.requires_grad_(), labels)
    autosac.chunked_loss(noting)(pred, labels)
    assert seen == [(2, 3, 4)] * 3


def test_the_plan_says_how_many_and_a_capture_overrules_it() -> None:
    """From the plan's settings; captures try other numbers without another training step."""
    plan = Plan(made_for=MADE_FOR, units=(), settings=Settings(loss_chunks=3))
    rows: list[int] = []

    def noting(pred: Tensor, labels: Tensor) -> Tensor:
        rows.append(pred.shape[1])
        return titans(pred, labels)

    loss = autosac.chunked_loss(noting, Plan.from_bytes(plan.to_bytes()))
    assert loss.chunks == 3
    assert b"loss_chunks" not in Plan(made_for=MADE_FOR, units=()).to_bytes(), "as earlier versions wrote it"
    pred, labels = labelled((1, 6), 4, 0, torch.float32)
    with captured_in(2):
        outcome(loss, pred, labels, 1.0)
    assert rows == [2, 2, 2, 4, 6, 3, 3, 3, 3]


class Learned(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, pred: Tensor, labels: Tensor) -> Tensor:
        return titans(pred / self.temperature, labels)


@pytest.mark.parametrize(
    ("loss_fn", "shape", "labels", "words"),
    [
        (lambda p, t: F.cross_entropy(p.flatten(0, 1), t.flatten()), (2, 4, 5), (2, 4), "not the sum of each one's"),
        (lambda p, t: titans(p, t) ** 2, (2, 4, 5), (2, 4), "not the sum of each one's"),
        (lambda p, t: (p.logsumexp(-1)).sum(1), (2, 4, 5), (2, 4), "one number"),
        (Learned(), (2, 4, 5), (2, 4), r"parameter of its own, of shape \(\)"),
        (titans, (2, 4, 5), (4, 2), r"\(2, 4, 5\) and labels \(4, 2\)"),
        (lambda p, t: F.cross_entropy(p, t, reduction="sum"), (3, 5, 5), (3, 5), "cannot be computed in chunks"),
        (F.cross_entropy, (3, 5, 4), (3, 4), "flatten them before"),
    ],
)
def test_what_is_no_sum_over_rows_stops(
    loss_fn: Loss, shape: tuple[int, ...], labels: tuple[int, ...], words: str
) -> None:
    """A mean, a square, a vector, a learned temperature, classes in the middle: an error, and no gradient."""
    pred = torch.randn(*shape, requires_grad=True)
    with pytest.raises(AutosacError, match=words):
        autosac.chunked_loss(loss_fn, chunks=2)(pred, torch.zeros(labels, dtype=torch.int64)).backward()
    assert pred.grad is None


@pytest.mark.parametrize(
    ("loss_fn", "chunks", "words"),
    [
        (titans, 0, "0 chunks"),
        (titans, 4096, "1 to 1024"),
        (nn.CrossEntropyLoss(reduction="none"), 2, "reduction='none'"),
    ],
)
def test_what_is_refused_when_it_is_made(loss_fn: Any, chunks: int, words: str) -> None:
    """Numbers out of range, and a cross-entropy that is no number."""
    with pytest.raises(UsageError, match=words):
        autosac.chunked_loss(loss_fn, chunks=chunks)


def masked_mean(pred: Tensor, labels: Tensor) -> Tensor:
    """A mean over the rows that are not ignored."""
    counts = (labels != -100).sum().clamp(min=1)
    return titans(pred, labels) / counts


def by_position(pred: Tensor, labels: Tensor) -> Tensor:
    """The last rows of 40 weigh more than the others."""
    each = F.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * (1 + torch.arange(len(each)) // 30)).sum()


def at_most(pred: Tensor, labels: Tensor) -> Tensor:
    """A sum with an upper bound, which only all rows together reach."""
    return titans(pred, labels).clamp(max=45.0)


def balanced(pred: Tensor, labels: Tensor) -> Tensor:
    """A sum, and a little of what all rows have in common."""
    return titans(pred, labels) + 1e-4 * pred.softmax(-1).sum((0, 1)).square().sum()


def noisy(pred: Tensor, labels: Tensor) -> Tensor:
    """Labels that change at random, hardly ever."""
    return titans(pred, labels) + 0 * torch.rand(1)[0]


def in_place(pred: Tensor, labels: Tensor) -> Tensor:
    """Predictions are shifted in their own memory."""
    return titans(pred.sub_(pred.amax(-1, keepdim=True)), labels)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (masked_mean, "two parts of the rows is not the sum"),
        (balanced, "two parts of the rows is not the sum"),
        (by_position, "all rows is not the sum"),
        (at_most, "all rows is not the sum"),
        (noisy, "draws random numbers"),
        (in_place, "changes the predictions in place"),
        (lambda p, t: {"loss": titans(p, t)}, "a dict cannot"),
    ],
)
def test_what_the_first_rows_do_not_show_stops(loss_fn: Loss, words: str) -> None:
    """The first rows are ignored, as a prompt is: the loss is compared where rows count, and no gradient is made."""
    pred, labels = labelled((1, 40), 5, 1, torch.float32)
    labels[:, :11] = -100
    pred.requires_grad_()
    with pytest.raises(AutosacError, match=words):
        autosac.chunked_loss(loss_fn, chunks=4)(pred * 1.0, labels).backward()
    assert pred.grad is None


def test_rows_that_are_all_ignored_show_nothing() -> None:
    """A batch without a label stops nothing, and the next one is compared."""
    pred, labels = labelled((1, 8), 5, 1, torch.float32)
    loss = autosac.chunked_loss(masked_mean, chunks=2)
    assert outcome(loss, pred, torch.full_like(labels, -100), 1.0)[0] == 0
    with pytest.raises(AutosacError, match="not the sum"):
        outcome(loss, pred, labels, 1.0)


def test_a_second_derivative_is_refused() -> None:
    """The gradient would look like a constant to whoever differentiates it again: that stops."""
    pred, labels = labelled((1, 4), 3, 0, torch.float32)
    loss = autosac.chunked_loss(titans, chunks=2)(pred.requires_grad_(), labels)
    with pytest.raises(AutosacError, match="second derivative"):
        torch.autograd.grad(loss, pred, create_graph=True)

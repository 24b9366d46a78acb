"""What kernels leave unwritten is not compared when a module is recomputed; what they write is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

from autosac.errors import AutosacError
from autosac.integrations.apply import apply
from autosac.integrations.recompute.witness import Watch, of, undefined

_aten = torch.ops.aten
_noise = itertools.count(1)


def _forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Attention whose generator's state is other bytes in every call, as memory that nobody has written."""
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    seed, offset = (torch.tensor(next(_noise)) for _ in range(2))
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, torch.empty(0)


def _backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any, **__: Any) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """Attention by cuDNN's operator, for tensors on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
        yield


class Attention(nn.Module):
    """Self-attention through cuDNN's operator."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, 8] -> the same."""
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, self.dropout, True)[0]
        return self.out(mixed.transpose(1, 2).flatten(2))


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_attention_without_dropout_is_recomputed_whatever_its_unwritten_results_hold(
    lab: Any, cudnn_attention: None
) -> None:
    """The state of a generator that was not used differs in every call; the gradients are the same bit for bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Attention(0.0)), torch.randn(2, 3, 8)
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"1": ()}))
    assert lab.same(tuple(_gradients(planned, x)), tuple(_gradients(model, x)))


def test_attention_with_dropout_that_draws_other_numbers_is_refused(lab: Any, cudnn_attention: None) -> None:
    """With dropout the state decides what is dropped: one that differs stops the step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Attention(0.5)), torch.randn(2, 3, 8)
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"1": ()}))
    with pytest.raises(AutosacError, match=r"1 does not give the same values.*_scaled_dot_product_cudnn_attention"):
        _gradients(planned, x)


def _grouped(left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """A grouped product of rows that leaves what lies behind the last group as other numbers in every call."""
    found = torch.full((left.shape[0], right.shape[2]), float(next(_noise)))
    ends = [0, *offs.tolist()]
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        found[begin:end] = left[begin:end] @ right[group]
    return found


class Experts(nn.Module):
    """Two experts of five and two rows; the eighth row is padding that nobody asks for in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(2, 8, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[8, 8] -> [7, 8]"""
        ends = torch.tensor([5, 7], dtype=torch.int32)
        x = torch.sigmoid(self.scale * x)
        middle = torch.nn.functional.silu(Grouped.apply(x, self.first, ends))
        return Grouped.apply(middle, self.second, ends)[:7]


class Grouped(torch.autograd.Function):
    """The product with a derivative that leaves the padding alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _aten._grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        parts = (slice(0, 5), slice(5, 7))
        dx = torch.cat([gradient[p] @ w.t() for p, w in zip(parts, weight, strict=True)] + [torch.zeros(1, 8)])
        return dx, torch.stack([x[p].t() @ gradient[p] for p in parts]), None


@pytest.fixture
def grouped_products() -> Iterator[None]:
    """The grouped product of this file, for tensors on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", _grouped, "CPU")
        yield


@pytest.mark.usefixtures("grouped_products")
def test_rows_behind_the_last_group_are_not_compared(lab: Any) -> None:
    """What an activation makes of them is not compared either; the gradients are the same bit for bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Experts()), torch.randn(8, 8)
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"1": ()}))
    assert lab.same(tuple(_gradients(planned, x)), tuple(_gradients(model, x)))


@pytest.mark.usefixtures("grouped_products")
def test_what_a_grouped_product_is_made_of_is_compared(lab: Any) -> None:
    """A parameter before it that changes out of autograd's sight stops the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts())
    planned = apply(model, lab.plan_for(model, {"1": ()}))
    out = planned(torch.randn(8, 8))
    planned[1].scale.data.add_(1)
    with pytest.raises(AutosacError, match="1 does not give the same values"):
        out.square().sum().backward()


@pytest.mark.parametrize(("end", "count"), [(7, 1), (8, 0)])
def test_a_grouped_product_is_unwritten_where_its_groups_end_early(end: int, count: int) -> None:
    """Rows of one matrix, or columns of the other; a gradient of weights has no such rest."""
    ends, wide, deep = torch.tensor([5, end], dtype=torch.int32), torch.zeros(8, 8), torch.zeros(2, 8, 8)
    func, out = _aten._grouped_mm.default, torch.zeros(8, 8)
    assert len(undefined(func, (wide, deep), {"offs": ends}, out)) == count
    assert len(undefined(func, (deep, wide, ends), {}, out)) == count
    assert undefined(func, (wide, wide, ends), {}, deep) == undefined(func, (deep, deep), {}, deep) == []


@pytest.mark.parametrize(
    ("name", "arguments", "unwritten"),
    [
        ("_scaled_dot_product_flash_attention", (1, 2, 3), {6, 7, 8}),
        ("_scaled_dot_product_flash_attention", (1, 2, 3, 0.1), {7, 8}),
        ("_scaled_dot_product_efficient_attention", (1, 2, 3, None, True), {2, 3}),
        ("_scaled_dot_product_efficient_attention", (1, 2, 3, None, True, 0.1), set()),
        ("_scaled_dot_product_cudnn_attention", (1, 2, 3, None, True), {6, 7, 8}),
        ("_flash_attention_forward", (1, 2, 3, None, None, 4, 4, 0.0, True, False), {2, 3, 4}),
    ],
)
def test_which_results_of_attention_are_unwritten(name: str, arguments: tuple[Any, ...], unwritten: set[int]) -> None:
    """The generator's state without dropout, and what is called unused; never the output or its logsumexp."""
    func = getattr(_aten, name).default
    out = tuple(torch.tensor(i) for i, _ in enumerate(func._schema.returns))
    queries = (torch.zeros(()), *arguments[1:])  # as many as there are sums
    assert {int(tensor) for tensor in undefined(func, queries, {}, out)} == unwritten


@pytest.mark.parametrize(("length", "padded", "unwritten"), [(197, 224, 1), (224, 224, 0)])
def test_sums_behind_the_last_query_are_not_compared(length: int, padded: int, unwritten: int) -> None:
    """The memory-efficient kernels round the length of their logsumexp up to 32s (ViT: 197 tokens)."""
    sums = torch.zeros(2, 3, padded)
    out = (torch.zeros(2, 3, length, 8), sums, torch.tensor(0), torch.tensor(0))
    heads_first, heads_last = torch.zeros(2, 3, length, 8), torch.zeros(2, length, 3, 8)
    found = undefined(
        _aten._scaled_dot_product_efficient_attention.default, (heads_first,) * 3 + (None, True, 0.1), {}, out
    )
    assert len(found) == unwritten and all(tensor is sums for tensor in found)
    func = _aten._efficient_attention_forward.default
    found = undefined(func, (heads_last,) * 3 + (None, None, None, None, None, 0.1, 0), {}, (*out, length, length))
    assert len(found) == unwritten and all(tensor is sums for tensor in found)


def test_a_librarys_reserve_is_not_compared() -> None:
    """The batch norm of cuDNN returns bytes of which some are unwritten; its other results are compared."""
    out = (torch.ones(2), torch.ones(1), torch.ones(1), torch.zeros(9, dtype=torch.uint8))
    assert [t.numel() for t in undefined(_aten.cudnn_batch_norm.default, (), {}, out)] == [9]
    assert undefined(_aten.mul.Tensor, (), {}, torch.zeros(9, dtype=torch.uint8)) == []


@pytest.mark.usefixtures("mesh")
def test_what_communication_has_not_filled_yet_is_waited_for() -> None:
    """A tensor that is saved before its first use: its content is not read before it has arrived."""
    found = collectives.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert not found.completed
    assert of(found) == of(torch.ones(4))
    assert found.completed


@pytest.mark.parametrize(
    "view", [lambda t: t[:, :6], lambda t: t[:, 1:].t(), lambda t: t[:4, ::2], lambda t: t[:, :1].expand(5, 3)]
)
def test_what_lies_between_the_elements_is_not_compared(view: Any) -> None:
    """Of memory that was only allocated a view has the written elements. A changed element is seen, however the view lies."""
    first, second = (torch.full((5, 7), value) for value in (1.0, 2.0))
    for memory in (first, second):
        view(memory).fill_(3.0) if view(memory).stride(-1) else memory[:, :1].fill_(3.0)
    assert of(view(first)) == of(view(second))
    view(second)[1, 0] += 1
    assert of(view(first)) != of(view(second))


def test_a_watch_sees_what_operators_leave() -> None:
    """Of the CTC loss the table is partly written, the loss is not; after groups that fill all rows nothing more is left, and
    after some that end early every tensor may be made of what is.
    """
    left, right = torch.ones(6, 8).bfloat16(), torch.ones(2, 8, 8).bfloat16()
    with Watch() as watch:
        scores = torch.randn(5, 1, 3).log_softmax(2)
        loss, table = torch._ctc_loss(scores, torch.tensor([[1, 2]]), [5], [2])
        torch._grouped_mm(left, right, offs=torch.tensor([3, 6], dtype=torch.int32))
        assert [watch.has_left(t) for t in (scores, loss, table, table[:, 1])] == [False, False, True, True]
        torch._grouped_mm(left, right, offs=torch.tensor([3, 5], dtype=torch.int32))
        assert watch.has_left(loss)

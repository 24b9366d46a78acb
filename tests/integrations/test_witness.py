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
from autosac.integrations.recompute.witness import of, undefined

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
    assert {int(tensor) for tensor in undefined(func, arguments, {}, out)} == unwritten


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

"""What the units of `parts` compile: functions of an input, a weight of twice as many columns, and a buffer of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.families.custom import count, scaled_sine

WIDTH = 16
FUNCTIONS: list[Callable[..., Any]] = []
BROKEN: set[Callable[..., Any]] = set()  # those that Dynamo does not compile in one piece
CHANGES = {
    "argument_changed",
    "view_of_argument_changed",
    "argument_changed_without_gradients",
}  # of what they are given


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS.append(function)
    return function


def _broken(function: Callable[..., Any]) -> Callable[..., Any]:
    BROKEN.add(function)
    return _function(function)


# ---- pure -----------------------------------------------------------------------------------------------


@_function
def products(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w).sin() @ w.t()


@_function
def shared(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return products(products(x, w, b).tanh(), w, b)


@_function
def nested_region(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x + _region(torch.sin(_region(x * b, w)), w)


@torch.compiler.nested_compile_region
def _region(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.exp(x * 0.1) @ w)[:, :WIDTH]


@_function
def dropped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.dropout((x @ w)[:, :WIDTH], 0.3) + torch.rand_like(x)


@_function
def attended(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q, k = (x @ w).view(1, -1, 2, WIDTH).unbind(2)
    return F.scaled_dot_product_attention(q, k, x[None], is_causal=True)[0]


@_function
def flexible(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q = x.detach()[None, None]  # without gradients, which PyTorch has not on the CPU
    return x * flex_attention(q, q.sin(), q.cos())[0, 0]  # type: ignore[index, operator] # torch says a tuple, too


@_function
def normalised(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    statistics = (torch.zeros(WIDTH), torch.ones(WIDTH))
    return F.batch_norm(x, *statistics, training=True) + F.rms_norm(x, (WIDTH,))


@_function
def grouped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    is_grouped = torch.arange(len(x))[:, None] < 6  # what is behind the last group is not written
    rows, weights = torch.where(is_grouped, x, 0.0).bfloat16(), w.reshape(2, WIDTH, WIDTH).bfloat16()
    ends = torch.tensor([3, 6], dtype=torch.int32)
    return torch.where(is_grouped, torch._grouped_mm(rows, weights, offs=ends).to(x.dtype), x)


@_function
def without_gradients_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        deviation = x.std() + 1
    return x.sin() / deviation + x.detach().cos()


@_function
def in_bfloat16(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.sin(x @ w) @ w.t()


@_function
def checkpointed_inside(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return checkpoint(products, x, w, b, use_reentrant=False)


@_function
def per_sample(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return vmap(lambda row: torch.outer(row, row).tanh().sum(0))(x)


@_function
def branching(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (x.exp(),))


@_function
def complex_numbers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.fft.rfft(x.float()) * torch.polar(x.float()[:, :9].abs() + 1, x.float()[:, :9])


@_function
def by_row(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return sum((row.sin() for row in x[:3]), x.sum(0)) * x


@_function
def ordered(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    values, order = x.sort(-1)
    return values.sin() + x.gather(-1, order.flip(-1)) + x.cumsum(0)


# ---- custom functions and operators ------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x) * w.mean()
        ctx.save_for_backward(x, w, y)
        ctx.half = 0.5
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        return gradient * torch.cos(x) * w.mean() + ctx.half * y, torch.full_like(w, 0.1) * gradient.mean()


@_function
def custom_function_inside(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return _Scaled.apply(x.tanh(), w)


@_function
def custom_operator(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return scaled_sine(x.tanh(), 1.5) * x


@_function
def changing_operator(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.sin() * count(x.detach(), b)


# ---- what results share ------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


@_function
def several(x: Tensor, w: Tensor, b: Tensor) -> Any:
    h = torch.exp(-x * x)
    return {"h": h, "rest": [_Pair(h, (h @ w).relu()), 3, x.argmax(-1)]}


@_function
def returned_input(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return x, x.sin()


@_function
def views_of_input(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return x.t(), x[2:5].exp(), x.view(-1)


@_function
def shared_results(x: Tensor, w: Tensor, b: Tensor) -> Any:
    h = x.sin()
    return h, h.t(), h, h[1:]


@_function
def returned_weight(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return w, x * b, w.detach(), b


# ---- changes in place --------------------------------------------------------------------------------------


@_function
def own_changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x * 1.0
    h[1:3].mul_(0.5)
    return h.sigmoid_() + w.mean()


@_function
def argument_changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = (x * 0.5).cos()
    x.mul_(0.9)
    return h * 1.5


@_function
def view_of_argument_changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x[1:4].mul_(0.5)
    x.t()[0].add_(1.0)
    return x.sin()


@_function
def argument_changed_without_gradients(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x * 0.5
    with torch.no_grad():
        x.view(-1)[::2].add_(0.1)
    return h + w.mean()


@_function
def buffer_changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    b.add_(x.detach().mean() * 0.01)
    return x.sigmoid() * (1 + b * 0.1)


@_function
def buffer_read_and_changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x * b.cos()
    b.mul_(0.99)
    return h + x.tanh() * b


@_function
def buffer_read(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * b.cos() + x.tanh()


# ---- not in one piece --------------------------------------------------------------------------------------


@_broken
def in_two_graphs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x.sin()
    torch._dynamo.graph_break()
    return (h @ w).cos()[:, :WIDTH]


@torch.compiler.disable
def _uncompiled(x: Tensor) -> Tensor:
    return F.dropout(torch.exp(x * 0.3), 0.2).sigmoid()


@_broken
def partly_disabled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return _uncompiled(x.sin()).cos() @ w @ w.t()


@_broken
def number_read(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.exp() * x.detach().mean().item() if float(x.detach().sum()) > 0 else x.sin()


@_broken
def rows_chosen(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    chosen = (x.detach().sum(-1) > 0).nonzero()[:, 0]
    return x.index_add(0, chosen, (x[chosen] @ w).sin()[:, :WIDTH].to(x.dtype))


@_broken
def hooked_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x.sin()
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 0.5)
    return h.exp() * b


@_broken
def layer_called(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return functional_call(_LAYER, {"weight": w.t(), "bias": w.sum(0)}, (x,)).tanh() * b


_LAYER = torch.nn.Linear(WIDTH, 2 * WIDTH)


@_broken
def calls_another(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.compile(products, backend="aot_eager")(x.tanh(), w, b) * x

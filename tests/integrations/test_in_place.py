"""Memory that a unit writes, and views of it. Real tensors on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosac.integrations.apply import apply


class Body(nn.Module):
    """A layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self.function(self.linear(x))


def data(y: torch.Tensor) -> torch.Tensor:
    """A change through `.data`, of which autograd knows nothing: it sees the changed values."""
    y.data.mul_(2)
    return y.sin().exp()


def detached(y: torch.Tensor) -> torch.Tensor:
    """Constants, changed before and after they are read."""
    scale = y.detach() * 2
    early = scale + 1
    scale.mul_(3)
    return (y * early).sin() * scale


def unsafe_split(y: torch.Tensor) -> torch.Tensor:
    """Each part is changed in place, of which autograd does not tell the others."""
    first, second = torch.unsafe_split(y, 3, -1)
    first.mul_(2)
    second.add_(1)
    return first.sin() * second.cos()


def unsafe_chunk(y: torch.Tensor) -> torch.Tensor:
    """The same with chunks, one of which is changed twice."""
    first, second = torch.unsafe_chunk(y.exp(), 2, -1)
    return second.add_(first.relu_()).mul_(0.5).sin()


def transposed(y: torch.Tensor) -> torch.Tensor:
    """Transposed in place, with an additional dimension that comes and goes."""
    z = (y * 2).t_().unsqueeze_(0)
    z.squeeze_().sin_()
    return (z.sigmoid() * z.t().flatten().sum()).t()


def resized(y: torch.Tensor) -> torch.Tensor:
    """A buffer that gets larger, and is filled."""
    buffer = torch.ones(2)
    buffer.resize_(y.shape).fill_(0.5)
    buffer[0] = 3.0
    return (y * buffer).sin()


def out_argument(y: torch.Tensor) -> torch.Tensor:
    """Results that are written to memory which was there before, one after the other."""
    buffer = torch.empty_like(y)
    torch.mul(y.detach(), 2.0, out=buffer)
    first = (y * buffer.clone()).sin()
    torch.add(buffer, 1.0, out=buffer)
    return first.exp() * buffer.cos()


def view_of_view(y: torch.Tensor) -> torch.Tensor:
    """A view of a view is changed, and all of the memory is saved afterwards."""
    z = y * 1.5
    z[:, 1:5].view(-1, 2, 2)[..., 0].mul_(3)
    return z.sin() * z.flip(-1)


def conjugated(y: torch.Tensor) -> torch.Tensor:
    """Lazily conjugated and negated views, and another dtype."""
    z = torch.view_as_complex((y * 2).view(y.shape[0], -1, 2))
    return (z.conj() * z).imag.neg().sin() + torch.view_as_real(z.conj() * z.exp()).sum(-1)


def swapped(y: torch.Tensor) -> torch.Tensor:
    """A tensor takes over the memory of another one by `set_`."""
    scale = torch.ones(6)
    other = y.detach().mean(0).exp()
    scale.set_(other)
    other.mul_(2)
    return (y * scale).sin()


def indexed(y: torch.Tensor) -> torch.Tensor:
    """Places are written by index and by mask."""
    z = y.exp()
    w = z * 2
    w[:, torch.tensor([0, 2])] = y[:, :2]
    w.masked_fill_(y > 0, 0.5)
    return w.sin() * w.cumsum(-1)


def routed(y: torch.Tensor) -> torch.Tensor:
    """Chosen experts' scores are divided by their sum in place, as Hugging Face's mixtures do."""
    scores, chosen = y.softmax(-1).topk(2, -1)
    scores /= scores.sum(-1, keepdim=True)
    return y.gather(-1, chosen).sin() * scores.exp()


FUNCTIONS = [
    data,
    detached,
    unsafe_split,
    unsafe_chunk,
    transposed,
    resized,
    out_argument,
    view_of_view,
    conjugated,
    swapped,
    indexed,
    routed,
]


@pytest.mark.parametrize("share", [0, 1, 2, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_that_is_written_in_place(
    lab: Any, function: Callable[[torch.Tensor], torch.Tensor], share: int
) -> None:
    """Nothing, everything, every second and every third operator kept: bitwise what it is without a plan, and no warning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Body(function), nn.Identity())
    x = torch.randn(3, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        out = m(x)
        out.square().sum().backward()
        return (out.detach(), *(p.grad for p in m.parameters()))

    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"1": set(range(0, 100, share)) if share else set()})
    planned = apply(copy.deepcopy(model), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.same(run(planned), run(copy.deepcopy(model)))


def test_a_view_of_what_is_kept_needs_no_operator(lab: Any) -> None:
    """Saved slices, transposes and another dtype's view of a kept product are looked up in it."""

    def views(y: torch.Tensor) -> torch.Tensor:
        z = y * 2
        return z[:, 1:].sin().sum() + z.t().exp().sum() + z.view(-1, 2).cos().sum()

    torch.manual_seed(0)
    model = nn.Sequential(Body(views))
    x = torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": {"aten.mul.Tensor"}})
    planned = apply(copy.deepcopy(model), plan)
    with lab.counting(planned, ["0"]) as ran:
        planned(x).backward()
    model(x).backward()
    assert lab.same(tuple(p.grad for p in planned.parameters()), tuple(p.grad for p in model.parameters()))
    assert ran.again == {"0": ["aten.exp.default"]}, "whose result its own backward asks for"


def trained_with(cache: torch.Tensor, write: Any, lab: Any) -> list[tuple[Any, ...]]:
    """Of a body with a cache outside of it: the cache and the gradients without a plan, and under one that keeps nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(Body(write))
    x = torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": set()})
    planned = apply(copy.deepcopy(model), plan)
    found = []
    for m in (model, planned):
        cache.copy_(torch.linspace(0, 1, 6))
        m(x).sum().backward()
        found.append((cache.clone(), *(p.grad for p in m.parameters())))
    return found


def test_memory_from_outside_is_changed_once(lab: Any) -> None:
    """A cache outside of the module is written by its forward and not by its backward, and what was read before is
    what it was.
    """
    cache = torch.linspace(0, 1, 6)

    def write(y: torch.Tensor) -> torch.Tensor:
        read = (y + cache).sin()
        cache.add_(1)
        return (read * (cache * 2)).sin()

    assert lab.same(*trained_with(cache, write, lab))
    assert torch.equal(cache, torch.linspace(0, 1, 6) + 1)


@pytest.mark.parametrize("is_changed_again", [False, True])
def test_a_derivative_inside_of_the_forward_after_a_change(lab: Any, is_changed_again: bool) -> None:
    """The module changes a cache, reads it, and takes a derivative before it ends: what it read is what is there then."""
    cache = torch.linspace(0, 1, 6)

    def write(y: torch.Tensor) -> torch.Tensor:
        cache.lerp_(y.detach().mean(0), 0.1)
        read = (y * cache.sin()).sin()
        if is_changed_again:
            cache.add_(1)
        inner = read.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.exp().sin().sum(), inner)
        return (read * slope * cache.cos()).sin()

    assert lab.same(*trained_with(cache, write, lab))

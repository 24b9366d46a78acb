"""Function transforms inside of units and around their backward, bitwise as without a plan. Real tensors on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosac.integrations.apply import apply


class Inner(nn.Module):
    """A unit that takes a derivative of its layer inside its forward, and draws a random mask after it."""

    def __init__(self, derivative: Any) -> None:
        super().__init__()
        self.layer, self.derivative = nn.Linear(4, 4), derivative

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.derivative(lambda y: self.layer(y).sin(), x)
        return nn.functional.dropout(h.sin(), 0.5).exp()


DERIVATIVES = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: torch.func.vmap(torch.func.jacrev(f))(x).sum(1),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "none": lambda f, x: f(x),
}


def planned(lab: Any, model: nn.Module) -> nn.Module:
    """A copy of the model whose unit `0` keeps nothing."""
    return apply(copy.deepcopy(model), lab.plan_for(model, {"0": ()}))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_inside_a_unit(lab: Any, name: str) -> None:
    """Output and gradients are those without a plan; the sine after the derivative runs again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Inner(DERIVATIVES[name])), torch.randn(3, 4, requires_grad=True)

    def step(model: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        out = model(x)
        return (out.detach(), *torch.autograd.grad(out.sum(), [x, *model.parameters()], materialize_grads=True))

    expected, under = step(model), planned(lab, model)
    with lab.counting(under, ["0"]) as ran:
        assert lab.same(step(under), expected)
    assert "aten.sin.default" in ran.again["0"]


def test_the_users_own_hooks_refuse_a_derivative(lab: Any) -> None:
    """Under the user's saved-tensor hooks PyTorch's error is raised, as without a plan, and the hooks stay in force."""
    model, x = nn.Sequential(Inner(DERIVATIVES["grad"])), torch.randn(3, 4, requires_grad=True)
    under, saved = planned(lab, model), []
    for one in (model, under):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
                one(x)
            saved.clear()
            x.sin()
            assert len(saved) == 1


def test_a_backward_inside_vmap(lab: Any) -> None:
    """A jacobian by one vectorized backward: the mask is drawn again outside of vmap, and the next forward is as ever."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Inner(DERIVATIVES["none"])), torch.randn(3, 4, requires_grad=True)
    basis = torch.eye(12).view(12, 3, 4)

    def rows(model: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(model(x), [x, *model.parameters()], basis, is_grads_batched=True)

    under = planned(lab, model)
    assert lab.same(rows(under), rows(model))
    assert lab.same(rows(under), rows(model))


def test_a_unit_inside_the_users_own_checkpointing(lab: Any) -> None:
    """It runs once: gradients and running statistics are those without any checkpointing, which counts statistics twice."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid()))
    model, twice = planned(lab, plain), copy.deepcopy(plain)
    x = torch.randn(8, 4)
    plain(x).square().sum().backward()
    for other in (model, twice):
        checkpoint(other, x, use_reentrant=False).square().sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)
    assert torch.equal(model.get_buffer("0.1.running_mean"), plain.get_buffer("0.1.running_mean"))
    assert not torch.equal(twice.get_buffer("0.1.running_mean"), plain.get_buffer("0.1.running_mean"))

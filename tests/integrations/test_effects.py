"""What a module changes outside of itself happens once, as without a plan. Real tensors on the CPU."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from autosac.integrations.apply import PlanMismatchWarning, apply


class Average(nn.Module):
    """Keeps a moving average of what it sees in a buffer, and uses it before and after the change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.linspace(0.1, 0.4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        before = self.linear(x + self.mean).sin()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return (before + self.mean).sin()


class Exchange(Average):
    """Gives the buffer a new tensor instead of changing it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        before = self.linear(x + self.mean).sin()
        self.mean = (self.mean * 0.9 + x.mean(0) * 0.1).detach()
        return (before + self.mean).sin()


class Python(nn.Module):
    """State in Python: a counter, a list, numbers of `random`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        self.calls += 1
        self.seen.append(float(x.detach().sum()))
        return (self.linear(x) * (self.calls + random.random())).sin() * len(self.seen)


def batch_norm() -> nn.Module:
    """Running statistics and the number of batches."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Linear(4, 4))


def spectral() -> nn.Module:
    """A power iteration in every forward."""
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Sigmoid(), nn.Linear(4, 4))


def run(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, gradients and all that the model has as a state, after every step; and what Python's generator gives next."""
    torch.manual_seed(1)
    random.seed(1)
    found = []
    for x in batches:
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        found += [out.detach(), *(p.grad for p in model.parameters())]
        found += [tensor.clone() for tensor in model.state_dict().values()]
        found += [torch.tensor(getattr(m, "calls", 0)) for m in model.modules()]
    return [*found, torch.tensor(random.random())]


@pytest.mark.parametrize("plan", ["nothing", "some", "everything"])
@pytest.mark.parametrize("make", [Average, Exchange, Python, batch_norm, spectral])
def test_effects_happen_once(lab: Any, make: Any, plan: str) -> None:
    """For plans that keep nothing, every second operator and everything, three steps give the same outputs,
    gradients and state; the third has another shape, of which the plan knows nothing.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), make())
    batches = [torch.randn(size, 4) for size in (3, 3, 5)]
    keep = {"nothing": set(), "some": set(range(0, 100, 2)), "everything": set(range(100))}[plan]
    made, _ = lab.plan_keeping(model, lambda m: m(batches[0]), {"1": keep})
    planned, plain = apply(copy.deepcopy(model), made), copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(planned, batches)
    assert lab.same(tuple(found), tuple(run(plain, batches)))
    assert len([w for w in caught if issubclass(w.category, PlanMismatchWarning)]) == 1


def test_a_whole_model_may_be_recomputed_without_decisions(lab: Any) -> None:
    """A unit without any decision recomputes everything, has its effects once and never warns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Average())
    batches = [torch.randn(size, 4) for size in (3, 5)]
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"1": ()}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.same(tuple(run(planned, batches)), tuple(run(copy.deepcopy(model), batches)))


class Parent(nn.Module):
    """Sets an attribute of its child before the child's forward, and takes it away afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        self.child.scale = x.detach().mean()
        out = self.child(x)
        self.child.scale = None
        return out


class Scaled(nn.Module):
    """Multiplies by what somebody has set on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.dropout = nn.Linear(4, 4), None, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self.dropout((self.linear(x) * self.scale).sin()).exp() * (2.0 if self.training else 3.0)


@pytest.mark.parametrize("keep", [set(), {"aten.sin.default"}])
def test_attributes_set_by_a_parent_and_the_training_flag(lab: Any, keep: set[str]) -> None:
    """The child reads what its parent set; that the attribute is gone and the model evaluates by the time of the
    backward does not matter.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Parent())
    x = torch.randn(3, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        out = m.train()(x)
        m.eval()
        out.sum().backward()
        return (out.detach(), *(p.grad for p in m.parameters()))

    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"1.child": keep})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.same(run(apply(copy.deepcopy(model), plan)), run(copy.deepcopy(model)))


@pytest.mark.parametrize("keep", [set(), {"aten.addmm.default"}])
def test_functional_call(lab: Any, keep: set[str]) -> None:
    """Parameters that are exchanged for one forward are those of its backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        mine = {name: p.clone().requires_grad_() for name, p in others.items()}
        out = torch.func.functional_call(m, mine, (x,))
        out.square().sum().backward()
        return (out.detach(), *(p.grad for p in mine.values()))

    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"1": keep})
    planned = apply(copy.deepcopy(model), plan)
    assert lab.same(run(planned), run(copy.deepcopy(model)))
    assert all(p.grad is None for p in planned.parameters())


class Gathering(nn.Module):
    """Communicates in place, as layers of Megatron-LM do: waiting, not waiting, and between some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.linear(x).sin()
        total, later, root = (torch.zeros_like(h) for _ in range(3))
        dist.all_gather_into_tensor(total, h.detach().exp())
        work = dist.all_to_all_single(later, h.detach().cos(), async_op=True)
        y = (h * total).sin()
        work.wait()
        dist.gather(h.detach().tan(), [root])
        return (y * later).sin() * root.cos()


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("keep", [set(), {"c10d._allgather_base_.default"}])
def test_communication_in_place(lab: Any, keep: set[str]) -> None:
    """What it writes to is made again by it, or is kept; the recomputation does not read fresh memory.

    No schema says that these operators write.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(Gathering()), torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": keep})
    planned = apply(copy.deepcopy(model), plan)
    assert lab.same(tuple(run(planned, [x, x])), tuple(run(model, [x, x])))

"""Compiled units that Dynamo cannot compile in one piece: they run without the compiler, as eager units do."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import inductor

from autosac.errors import CaptureError, PlanError, PlanNotFollowedError
from autosac.integrations.apply import apply
from autosac.plans import Plan, Settings, Unit
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH = 16


class Block(nn.Module):
    """Two products around Python code."""

    def __init__(self, between: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.calls = between, 0
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = self.down(self.between(self, torch.tanh(self.up(x))).sin())
        return x + result


def counted(block: Block, x: Tensor) -> Tensor:
    """A counter that changes what is computed."""
    block.calls += 1
    return x * (0.5 if block.calls % 2 else 2.0)


def drawn(_: Block, x: Tensor) -> Tensor:
    """Python's random numbers, in a branch."""
    return x * 1.5 if random.random() < 0.5 else x.cos()


def read(_: Block, x: Tensor) -> Tensor:
    """A value that the host reads."""
    return x / (1.0 + float(x.detach().abs().max()))


def simple(_: Block, x: Tensor) -> Tensor:
    """Nothing that breaks a graph."""
    return x.cos()


def plan(budget: float | None = None) -> Plan:
    """Recompute all of a block, or what the partitioner likes."""
    unit = Unit(
        fqn="0", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=(), parameters={}, memory_budget=budget
    )
    return Plan(made_for=MADE_FOR, units=(unit,), settings=Settings())


def gradients(between: Callable[[Block, Tensor], Tensor], made: Plan | None, **options: Any) -> list[Tensor]:
    """Of three steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    model, x = nn.Sequential(Block(between)), torch.randn(4, WIDTH)
    if made is not None:
        apply(model, made)
        model[0].compile(backend="aot_eager", **options)
    for _ in range(3):
        model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.compiled_plan
@pytest.mark.parametrize("between", [counted, drawn, read, simple], ids=lambda between: between.__name__)
def test_python_code_of_a_unit_runs_once(between: Callable[[Block, Tensor], Tensor]) -> None:
    """Gradients are those of eager code, to the bit. PyTorch's checkpointing would count twice, and draw again."""
    torch.testing.assert_close(gradients(between, plan()), gradients(between, None), rtol=0, atol=0)


def test_units_without_breaks_are_compiled_as_a_whole() -> None:
    """The compiler accepts nothing else with `fullgraph`."""
    found = gradients(simple, plan(), fullgraph=True)
    torch.testing.assert_close(found, gradients(simple, None), rtol=0, atol=0)


def test_a_budget_for_what_cannot_be_compiled_in_one_piece() -> None:
    """A capture that finds that out says that the policy cannot be had, as of what cannot be captured."""
    with pytest.raises(PlanNotFollowedError, match="cannot be compiled in one piece"):
        gradients(read, plan(0.4))
    assert issubclass(PlanNotFollowedError, PlanError)
    assert issubclass(PlanNotFollowedError, CaptureError)


class Returned(Block):
    """A result that is a view, which AOTAutograd makes a second time."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = self.down(torch.tanh(self.up(x.flatten(0, 0)))).flatten().view(x.shape)
        return result


class Averaged(Block):
    """Running statistics, which AOTAutograd writes back at the end."""

    def __init__(self, between: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(between)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = super().forward(self.norm(x))
        return result


class Branching(Block):
    """Graphs of branches, which AOTAutograd traces anew."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = super().forward(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
        return result


@pytest.mark.module_budget
def test_a_budget_covers_the_seeds_of_random_numbers() -> None:
    """Inductor draws them at the beginning of a graph. The gradients are those without a budget."""
    found = []
    for made in (plan(0.0), None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(lambda _, h: nn.functional.dropout(h, 0.5))), torch.randn(4, WIDTH)
        if made is not None:
            apply(model, made)
        model[0].compile(backend=inductor())
        model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.module_budget
@pytest.mark.parametrize("budget", [0.0, 0.4])
@pytest.mark.parametrize("kind", [Returned, Averaged, Branching])
def test_a_budget_covers_what_the_compiler_adds(kind: type[Block], budget: float) -> None:
    """A second view, the writing back, or inner graphs. PyTorch refuses budgets that do not cover all of a graph's forward."""
    found = []
    for made in (plan(budget), None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(kind(simple)), torch.randn(4, WIDTH)
        if made is not None:
            apply(model, made)
            model[0].compile(backend="aot_eager")
        model(x).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def rectified(_: Block, x: Tensor) -> Tensor:
    """An input that is changed: AOTAutograd copies it first."""
    return torch.relu_(x).square()


def halved(block: Block, x: Tensor) -> Tensor:
    """A parameter that is changed out of autograd's sight, which is copied, too."""
    block.up.weight.data.mul_(0.5)
    return x @ block.up.weight


def replaced(block: Block, x: Tensor) -> Tensor:
    """A parameter that gets another memory, which AOTAutograd sets at the end."""
    block.up.weight.data = block.up.weight.data * 0.5
    return x @ block.up.weight


class Changing(Block):
    """Something is changed before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = self.down(self.between(self, x))
        return result


@pytest.mark.module_budget
@pytest.mark.parametrize("budget", [0.0, 0.4])
@pytest.mark.parametrize("change", [rectified, halved, replaced], ids=lambda change: change.__name__)
def test_a_budget_covers_what_the_compiler_adds_for_changes(
    change: Callable[[Block, Tensor], Tensor], budget: float
) -> None:
    """Inputs that need gradients are copied before they are changed. Gradients and what is changed are those of eager code."""
    found = []
    for made in (plan(budget), None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(Changing(change)), torch.randn(4, WIDTH, requires_grad=True)
        if made is not None:
            apply(model, made)
            model[0].compile(backend="aot_eager")
        given = x * 1.5
        (model(given).sin() + given.square()).sum().backward()
        found.append([x.grad, given.detach(), *(p.grad for p in model.parameters()), *model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_unit_inside_of_a_forward_derivative() -> None:
    """Dynamo gives up on the compiled model, but not on what it calls: it must not compile how a unit runs eagerly."""
    found = []
    for made in (plan(), None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(simple)), torch.randn(4, WIDTH)
        if made is not None:
            apply(model, made)
        model[0].compile(backend="aot_eager")
        _, derivative = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        model(x).square().sum().backward()
        found.append([derivative.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Shared(nn.Module):
    """A module that counts its calls in its class, if it is not told to leave that to the model."""

    calls = 0

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.up = counts, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output depends on the counter, read in three ways."""
        if self.counts:
            type(self).calls += 1
        return self.up(x).sin() * (1 + Shared.calls) + type(self).calls * self.calls


class Counting(nn.Sequential):
    """Counts the calls of its modules in their class."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        for module in self:
            Shared.calls += 1
            x = module(x)
        return x


@pytest.mark.parametrize("planned", [(1,), (0, 1)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_a_class_whose_attributes_change_in_compiled_code(planned: tuple[int, ...], whole: bool, counts: bool) -> None:
    """A unit shares them with its class, with other modules of it, and with code that writes to the class by its name."""

    def trained(names: tuple[int, ...], is_compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        Shared.calls, model = 0, (nn.Sequential if counts else Counting)(Shared(counts), Shared(counts))
        apply(
            model, Plan(made_for=MADE_FOR, units=tuple(dataclasses.replace(plan().units[0], fqn=f"{i}") for i in names))
        )
        for module in [model] if whole else model:
            if is_compiled:
                module.compile(backend="aot_eager")
        x, outputs = torch.randn(4, WIDTH), []
        for _ in range(3):
            out = model(x)
            out.sum().backward()
            outputs.append(out.detach())
        return [*outputs, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(map(torch.equal, trained((), False), trained(planned, True)))


@pytest.mark.module_budget
def test_a_budget_for_a_unit_that_writes_to_its_class() -> None:
    """It cannot be compiled in one piece: one line says so."""
    Shared.calls = 0
    model = apply(nn.Sequential(Shared(True)), plan(0.5))
    model[0].compile(backend="aot_eager")
    with pytest.raises(PlanNotFollowedError, match="the module cannot be compiled in one piece"):
        model(torch.randn(4, WIDTH))

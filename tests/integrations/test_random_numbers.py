"""Memory budgets of PyTorch's partitioner and graphs that draw random numbers, by real `torch.compile` on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosac
from autosac.integrations.apply import apply
from autosac.integrations.random_numbers import draws
from autosac.plans import Plan, Settings
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH, TOKENS = 16, 64


class Block(nn.Module):
    """Something to compute again, and dropout or stochastic depth."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        hidden = nn.functional.gelu(self.up(x))
        if self.kind == "dropout":
            hidden = nn.functional.dropout(hidden, 0.5)
        result: Tensor = self.down(hidden)
        if self.kind == "depth":
            result = result * (torch.rand(TOKENS, 1) < 0.5)
        return x + result


def gradients(kind: str, budget: float, **options: Any) -> list[Tensor | None]:
    """Of a compiled block under a plan with this budget for all."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(kind)
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        apply(block, Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=budget)))
        torch.compile(block, **options)(torch.randn(TOKENS, WIDTH)).square().sum().backward()
    return [p.grad for p in block.parameters()]


@pytest.mark.parametrize("kind", ["dropout", "depth"])
@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_gradients_are_those_without_a_budget(kind: str, budget: float) -> None:
    """Those of a budget that lets the partitioner draw again were a quarter off. A warning says that the graph has none."""
    wanted = gradients(kind, 1.0, backend="aot_eager")
    with pytest.warns(UserWarning, match="draws random numbers"):
        found = gradients(kind, budget, backend="aot_eager")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("error:a compiled graph draws")
def test_other_graphs_keep_their_budget() -> None:
    """Nothing is said, and the gradients are those of the same operators."""
    torch.testing.assert_close(
        gradients("none", 0.0, backend="aot_eager"), gradients("none", 1.0, backend="aot_eager"), rtol=0, atol=0
    )


@pytest.mark.filterwarnings("ignore:a compiled graph saves")
def test_budgets_in_bytes() -> None:
    """A graph of Inductor's that draws random numbers has one way only, the default one."""
    wanted = gradients("dropout", 1.0)
    found = gradients("dropout", 1.0, options=autosac.compile_options(budget="1KiB"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_attention_draws_only_with_dropout() -> None:
    """PyTorch marks it as random either way."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph.call_function(attention, (x, x, x, 0.0))
    assert not draws(graph)
    graph.call_function(attention, (x, x, x, 0.1))
    assert draws(graph)

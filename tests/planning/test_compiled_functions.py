"""Plans of eager modules that call compiled functions: the function runs again as a whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosac

pytestmark = [pytest.mark.capture, pytest.mark.slow]
WIDTH = 256


@torch.compile
def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Two products, which no fused kernel holds."""
    return F.gelu(x @ up) @ down


class Block(nn.Module):
    """A norm and a product that run eagerly, then the compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 16)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + feed_forward(self.linear(self.norm(x)).sigmoid(), self.up, self.down)


def make_step(device: torch.device) -> Any:
    """Three blocks."""
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    x = torch.randn(64, 128, WIDTH, device=device)

    def step() -> None:
        model(x).pow(2).mean().backward()
        model.zero_grad()

    return model, step


def test_a_module_with_a_compiled_function_is_planned() -> None:
    """What is verified is the step under the plan, whose modules have no decision about the function's products."""
    none = autosac.simulate(make_step)
    plan = autosac.plan(make_step, budget=int(0.7 * none.peak_active_bytes), budget_kind="active")
    assert plan.units
    for unit in plan.units:
        decided = {decision.op for decision in unit.decisions}
        assert "aten.addmm.default" in decided and "aten.mm.default" not in decided
    under = autosac.simulate(make_step, plan=plan)
    assert under.peak_active_bytes == plan.predictions["autosac"].peak_active_bytes
    assert under.peak_active_bytes <= 0.7 * none.peak_active_bytes
    assert under.recompute_ms > 0

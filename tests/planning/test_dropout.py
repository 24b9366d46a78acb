"""Plans of modules with dropout: what is random is recomputed like anything else, and draws what it drew."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import autosac
from autosac.plans import Plan

pytestmark = pytest.mark.capture
BLOCKS = 4


class Block(nn.Module):
    """A product, and much that is cheap to compute again, dropout among it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1), nn.GELU(), nn.Dropout(0.1), nn.GELU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        return x + self.layers(x)


def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], object]]:
    """Four blocks, a batch of 4,096 rows."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)

    def step() -> None:
        model(torch.rand(4096, 512, device=device)).sum().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def plan() -> Plan:
    """For eight tenths of the active peak without checkpointing."""
    none = autosac.simulate(make_step, gpu="h100-sxm-80gb")
    budget_bytes = int(0.8 * none.peak_active_bytes)
    return autosac.plan(make_step, gpu="h100-sxm-80gb", budget=budget_bytes, budget_kind="active")


def test_dropout_is_recomputed_where_products_are_kept(plan: Plan) -> None:
    """A product's result is 8 MiB, and what is made of it by dropout 20: with the product kept, that is cheap."""
    kinds = [{(d.op, d.keep) for d in unit.decisions} for unit in plan.units]
    assert any({("aten.addmm.default", True), ("aten.native_dropout.default", False)} <= kind for kind in kinds)
    found, full = (plan.predictions[name] for name in ("autosac", "full"))
    assert found.peak_active_bytes <= plan.made_for.budget_bytes
    assert found.recompute_ms < 0.5 * full.recompute_ms


def test_gradients_under_the_plan_are_those_without(plan: Plan, tmp_path: Path) -> None:
    """Bit for bit, with the same state of the generator afterwards."""
    plan.save(tmp_path / "plan.json")
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x = torch.rand(8, 512)
    found = []
    for one in (deepcopy(model), autosac.apply(deepcopy(model), tmp_path / "plan.json")):
        torch.manual_seed(3)
        one(x).square().sum().backward()
        found.append([*(p.grad for p in one.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

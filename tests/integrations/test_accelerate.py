"""The plugin for accelerate, in a real training loop on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import UsageError
from tests.support.models import WIDTH, Block

accelerate = pytest.importorskip("accelerate")
BATCH = 16384


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """An autoencoder's."""
    loss: torch.Tensor = (model(batch["x"]) - batch["x"]).pow(2).mean()
    return loss


def made() -> tuple[Any, torch.optim.Optimizer]:
    """The same model every time, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def gradients(accelerator: Any) -> list[torch.Tensor]:
    """Of the second step of a loop on fixed data."""
    model, optimizer = accelerator.prepare(*made())
    random = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        loss = loss_of(model, {"x": torch.randn(BATCH, WIDTH, generator=random)})
        accelerator.backward(loss)
        found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_planned_training_is_the_same() -> None:
    """A plan for a budget below the step's peak: it checkpoints modules, and the gradients are the same."""
    from autosac.integrations.accelerate import AutoSAC

    batch = {"x": torch.randn(BATCH, WIDTH)}
    plain = accelerate.Accelerator(cpu=True)
    asking = AutoSAC(budget="1GiB", batch=batch, loss=loss_of)
    peak = autosac.simulate(asking.training(*made()[:1], plain, made()[1])).peak_active_bytes
    plugin = AutoSAC(budget=f"{0.9 * peak:.0f}B", batch=batch, loss=loss_of, budget_kind="active")
    expected = gradients(plain)
    found = gradients(plugin.on(accelerate.Accelerator(cpu=True)))
    assert plugin.plan is not None and plugin.plan.units
    assert plugin.plan.predictions["autosac"].peak_active_bytes <= 0.9 * peak
    assert all(map(torch.equal, expected, found))


def test_wrong_arguments() -> None:
    """Neither a plan nor a budget, a budget without a batch, and two models at once."""
    from autosac.integrations.accelerate import AutoSAC

    with pytest.raises(UsageError, match="either a plan or a budget"):
        AutoSAC()
    with pytest.raises(UsageError, match="needs a batch"):
        AutoSAC(budget="1GiB")
    plugin = AutoSAC(budget="1GiB", batch={})
    with pytest.raises(UsageError, match="several models"):
        plugin.on(accelerate.Accelerator(cpu=True)).prepare(nn.Linear(1, 1), nn.Linear(1, 1))

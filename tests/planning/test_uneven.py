"""Plans of modules that run on tensors of several sizes in one step."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import InfeasibleError
from autosac.plans import ANY_SIZE

pytestmark = pytest.mark.capture
SIZES = 4096, 1024, 1024  # rows of each forward


class Block(nn.Module):
    """Two layers with a residual. `is_odd`: short inputs take another operator."""

    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.is_odd = is_odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        y: torch.Tensor = self.last(nn.functional.gelu(self.first(x)))
        if self.is_odd and len(x) < max(SIZES):
            y = y.tanh()
        return x + y


def make_model(is_odd: bool = False) -> nn.Module:
    """Four blocks."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*(Block(is_odd) for _ in range(4)))))


def loss_of(model: nn.Module, device: torch.device | str) -> torch.Tensor:
    """Of crops of three sizes."""
    return torch.stack([model(torch.ones(rows, 256, device=device)).square().mean() for rows in SIZES]).sum()


def step_of(is_odd: bool) -> Callable[[torch.device], tuple[nn.Module, Callable[[], object]]]:
    """The step over crops of three sizes."""

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], object]]:
        model = make_model(is_odd).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            loss_of(model, device).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return make_step


def test_a_module_that_runs_on_several_sizes_is_checkpointed() -> None:
    """Its decisions leave the sizes open in which its forwards differ, memory is the mean of them, and training follows them
    without a warning and with the same gradients.
    """
    none = autosac.simulate(step_of(False), gpu="h100-sxm-80gb")
    plan = autosac.plan(
        step_of(False),
        gpu="h100-sxm-80gb",
        budget=int(0.6 * none.peak_active_bytes),
        budget_kind="active",
    )
    assert plan.predictions["autosac"].peak_active_bytes <= 0.6 * none.peak_active_bytes
    decided = [decision for unit in plan.units for decision in unit.decisions]
    wide = next(decision for decision in decided if decision.outputs == (((ANY_SIZE, 1024), "float32"),))
    assert wide.memory_bytes == sum(SIZES) // len(SIZES) * 1024 * 4
    bare, planned = make_model(), autosac.apply(make_model(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (bare, planned):
            loss_of(model, "cpu").backward()
    pairs = zip(bare.parameters(), planned.parameters(), strict=True)
    assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


def test_modules_that_run_other_operators_are_refused() -> None:
    """No decisions suit all of their forwards, and the error says so, once for all of them."""
    with pytest.raises(InfeasibleError, match=r"; blocks is not checkpointed: executions differ in their operators$"):
        autosac.plan(step_of(True), gpu="h100-sxm-80gb", budget="8MiB")

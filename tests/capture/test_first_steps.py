"""Modules that fill a cache in their first forward: only the recorded step has to follow the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosac
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.errors import CaptureError

WIDTH = 16


class Block(nn.Module):
    """It makes its bias when it first needs one; `anew`: for each forward."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.bias: torch.Tensor | None = None
        self.anew = anew

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, changed."""
        if self.bias is None or self.anew:
            self.bias = torch.arange(WIDTH, device=x.device) * 0.5
        changed: torch.Tensor = self.narrow(torch.tanh(self.wide(torch.tanh(x + self.bias))))
        return x + changed


def step_of(*, anew: bool) -> Callable[[torch.device], Any]:
    """A training step of three blocks."""

    def make_step(device: torch.device) -> Any:
        model = nn.Sequential(*(Block(anew=anew) for _ in range(3))).to(device)
        x = torch.ones(4096, WIDTH, device=device)
        return model, lambda: model(x).sum().backward()

    return make_step


@pytest.fixture(scope="module")
def plan() -> autosac.Plan:
    """For blocks that keep their bias."""
    make_step = step_of(anew=False)
    peak_bytes = autosac.simulate(make_step).peak_active_bytes
    return autosac.plan(make_step, budget=int(0.98 * peak_bytes), budget_kind="active")


def test_a_cache_that_the_first_step_fills(plan: autosac.Plan) -> None:
    """The plan is that of the steps after it: it does not know the operator that fills the cache."""
    operators = {decision.op for unit in plan.units for decision in unit.decisions}
    assert "aten.addmm.default" in operators
    assert "aten.arange.default" not in operators


def test_a_recorded_step_that_does_not_follow_its_plan(plan: autosac.Plan, tmp_path: Path) -> None:
    """Such a capture stops: it is not the step that the plan would be judged by."""
    path = tmp_path / "plan.json"
    plan.save(path)
    with pytest.raises(CaptureError, match=r"training step 2: .*runs more calls of aten\.arange\.default"):
        capture_eager(step_of(anew=True), EagerRequest(plan_file=str(path)))

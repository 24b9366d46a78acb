"""Baselines as plans: what a trace recomputes is read from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autosac
from autosac.planning.baseline_plans import mirrored
from autosac.simulation import simulation_of


def test_baselines_of_a_job_as_plans(titan: Any) -> None:
    """The plan that mirrors a baseline of TorchTitan's takes its memory at the most, and less time of the device: a plan's
    recomputation runs nothing that the backward does not need.
    """
    for name, baseline in titan.captures.baselines().items():
        if name == "none":
            assert mirrored(titan.planner.policies, baseline.trace) == ()
            continue
        plan = titan.planner.mirror(baseline)
        assert plan.units, name
        own = simulation_of(titan.captured(plan), baseline.target, plan)
        assert own.peak_active_bytes <= baseline.peak_active_bytes, name
        assert own.recompute_ms < baseline.recompute_ms, name


def test_nothing_that_no_plan_may(eager: Any) -> None:
    """A baseline that checkpoints a module which plans may not is no plan."""
    policies = eager.planner.policies
    trace = eager.captured(eager.plain(eager.outer))
    kept, policies.units = policies.units, policies.units[1:]
    missing = {unit.name for unit in kept} - {unit.name for unit in policies.units}
    try:
        assert missing and mirrored(policies, trace) == ()
    finally:
        policies.units = kept


class Again(torch.autograd.Function):
    """Keeps a module's input and runs the module again in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, child: nn.Module) -> torch.Tensor:
        """The module's result."""
        ctx.child = child
        ctx.save_for_backward(x)
        with torch.no_grad():
            return child(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """Its input's gradient."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.child(x)
        out.backward(gradient)
        return x.grad, None


class Reversible(nn.Module):
    """Two modules that run again by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, twice changed."""
        for part in self.parts:
            x = torch.tanh(x + Again.apply(x, part))  # type: ignore[no-untyped-call]
        return x


def test_modules_that_run_again_within_a_checkpointed_one() -> None:
    """What runs again is no plan then; the planner says what the smallest budget is, as for other jobs."""

    def make_step(device: torch.device) -> Any:
        model = nn.Sequential(Reversible(), nn.Linear(8, 8)).to(device)
        return model, lambda: model(torch.ones(4096, 8, device=device)).sum().backward()

    with pytest.raises(autosac.InfeasibleError, match="the smallest budget found to work is"):
        autosac.plan(make_step, budget=2**20, budget_kind="active")

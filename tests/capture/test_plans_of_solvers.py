"""Plans of the real solvers, obeyed by real CPU training: same loss and gradients, and no more memory than promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.api import EagerCaptures
from autosac.errors import InfeasibleError
from autosac.integrations.apply import apply
from autosac.memory_sim import simulate_memory
from autosac.planning.closed_loop import Goal, Planner
from autosac.plans import Plan
from autosac.simulation import Simulation

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@pytest.fixture(scope="module")
def observed(cpu_captures: EagerCaptures) -> tuple[EagerCaptures, Simulation]:
    """The step captured as the CPU would run it."""
    return cpu_captures, cpu_captures.observed()


def plans(base: Simulation, solver: str) -> list[tuple[Plan, int]]:
    """Plans for five budgets between the smallest possible and no checkpointing, with the peaks that the MILP promises."""
    planner = Planner(base, Goal(budget_bytes=1, budget_kind="active", solver=solver))
    high = base.memory.peak_bytes
    try:
        planner.solve(1)
        raise AssertionError("one byte cannot be enough")
    except InfeasibleError:
        low = int(planner.problem.problem.peaks_bytes(lowest_decision(planner)).max())
    found = []
    for share in SHARES:
        plan, solution = planner.solve(int(low + share * (high - low)))
        found.append((plan, solution.peak_bytes))
    return found


def lowest_decision(planner: Planner) -> list[int | None]:
    """Everything recomputed that may be, in every outermost unit."""
    units = planner.problem.problem.units
    return [u.stored_bytes if u.parent < 0 and u.lowest_change_bytes < 0 else None for u in units]


def loss_and_gradients(make_step: Callable[..., Any], plan: Plan | None) -> list[torch.Tensor]:
    """Of one real forward and backward with a fixed seed."""
    model: nn.Module
    model, _ = make_step(torch.device("cpu"))
    if plan is not None:
        apply(model, plan)
    torch.manual_seed(1)
    tokens = torch.randint(0, 300, (8, 128))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("error::autosac.integrations.apply.PlanMismatchWarning")
@pytest.mark.parametrize("solver", ["pareto", "greedy", "knapsack", "ilp"])
def test_gradients_are_bitwise_equal(make_step: Any, observed: tuple[EagerCaptures, Simulation], solver: str) -> None:
    """Under every solver's plan at five budgets, loss and all gradients are those without checkpointing, bit for bit."""
    expected = loss_and_gradients(make_step, None)
    for plan, _ in plans(observed[1], solver):
        assert plan.units
        found = loss_and_gradients(make_step, plan)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_promised_peak_holds(observed: tuple[EagerCaptures, Simulation]) -> None:
    """The step simulated under the MILP's solution has at most the peak that the MILP promises."""
    captures, base = observed
    for plan, promised in plans(base, "ilp")[::2]:
        under = captures.under(plan)
        peak = simulate_memory(under.trace, workspaces=base.target.workspaces).peak_bytes
        assert peak <= promised * 1.001, (peak, promised)

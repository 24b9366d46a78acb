"""Plans of the real solvers, obeyed by real CPU training: same loss and gradients, and no more memory than promised."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.api import EagerCaptures
from autosac.errors import InfeasibleError, UsageError
from autosac.estimator.sac_curves import MAX_SEGMENTS, evaluate
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


def plans(base: Simulation, solver: str, curve: str = "staircase") -> list[tuple[Plan, int]]:
    """Plans for five budgets between the smallest possible and no checkpointing, with the peaks that the MILP promises."""
    planner = Planner(base, Goal(budget_bytes=1, budget_kind="active", solver=solver, curve=curve))
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


def test_plans_by_an_upper_bound_of_the_curves(observed: tuple[EagerCaptures, Simulation]) -> None:
    """With pwlf's bound the MILP has at most five lines for a unit, none of them below the staircase's corners, and its plans
    keep to the same budgets at no less than the least possible cost.
    """
    _, base = observed
    planner = Planner(base, Goal(budget_bytes=1, budget_kind="active", solver="knapsack", curve="pwlf"))
    for module, unit in zip(planner.problem.modules, planner.problem.problem.units, strict=True):
        points = planner.policies.of_module(module).sac.tradeoff.curve()
        assert 1 <= len(unit.segments) <= MAX_SEGMENTS
        assert all(evaluate(unit.segments, x) >= y - 1e-9 for (x, _), (_, y) in pairwise(points))
    for (plan, promised), (other, limit) in zip(plans(base, "knapsack", "pwlf"), plans(base, "knapsack"), strict=True):
        assert plan.reasons and plan.units
        assert planner.measured(plan)[1] <= promised and planner.measured(other)[1] <= limit
        assert planner.gap(plan) >= 0


def test_an_unknown_curve_is_named() -> None:
    """Goals refuse what is no model of the curves."""
    with pytest.raises(UsageError, match="curve 'spline': expected one of staircase, pwlf"):
        Goal(budget_bytes=1, curve="spline")

"""Real CPU training as the truth: simulated peaks against allocations that PyTorch's profiler saw."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autosac.api import EagerCaptures
from autosac.integrations.apply import apply
from autosac.memory_sim import simulate_memory
from autosac.planning.closed_loop import Goal, full_plan, make_plan
from autosac.plans import Plan
from autosac.simulation import Simulation

# What differs: checkpointing keeps the CPU generator's state, 5,056 bytes a module, which no operator allocates.
TOLERANCE = 0.005


def real_growth_bytes(make_step: Any, plan: Plan | None) -> int:
    """By how much a real second step's peak lies above the memory at its beginning, as the profiler counts."""
    model, step = make_step(torch.device("cpu"))
    if plan is not None:
        apply(model, plan)
    step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    present = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        present += change.nbytes()
        peak = max(peak, present)
    return peak


def simulated_growth_bytes(simulation: Simulation) -> int:
    """The same of the simulated step."""
    trace = simulation.trace
    resident = sum(trace.storages[storage].nbytes for storage in trace.residents())
    return simulate_memory(trace, round_to_bytes=1).peak_bytes - resident


def test_peak_without_and_with_full_checkpointing(make_step: Any, cpu_captures: EagerCaptures) -> None:
    """The simulated peak is that of a real CPU run, without checkpointing and with everything recomputed."""
    captures = cpu_captures
    observed = captures.observed()
    assert abs(simulated_growth_bytes(captures.plain()) / real_growth_bytes(make_step, None) - 1) <= TOLERANCE
    plan = full_plan(observed)
    real, simulated = real_growth_bytes(make_step, plan), simulated_growth_bytes(captures.under(plan))
    assert abs(simulated / real - 1) <= TOLERANCE
    assert simulated < simulated_growth_bytes(observed)


def test_peak_under_plans(make_step: Any, cpu_captures: EagerCaptures) -> None:
    """Under plans for three budgets between full and no checkpointing, the simulated peak is that of a real CPU run."""
    captures = cpu_captures
    observed = captures.observed()
    full = captures.under(full_plan(observed))
    high, low = observed.peak_active_bytes, full.peak_active_bytes
    for share, solver in ((0.35, "greedy"), (0.6, "knapsack"), (0.85, "ilp")):
        budget = int(low + share * (high - low))
        goal = Goal(budget_bytes=budget, budget_kind="active", solver=solver, changes=False)
        planned = make_plan(captures, goal)
        real = real_growth_bytes(make_step, planned.plan)
        simulated = simulated_growth_bytes(planned.simulation)
        assert abs(simulated / real - 1) <= TOLERANCE, (share, solver, simulated, real)
        assert planned.simulation.peak_active_bytes <= budget

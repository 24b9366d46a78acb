"""Baselines as plans: what a trace recomputes is read from it."""

from __future__ import annotations

from typing import Any

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

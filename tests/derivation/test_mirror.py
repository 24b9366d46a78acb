"""Baselines as plans: what a trace recomputes is read from it."""

from __future__ import annotations

from typing import Any

from autosac.mirror import mirrored
from autosac.plans import Unit
from autosac.simulation import simulation_of


def decided(unit: Unit) -> tuple[str, tuple[bool, ...]]:
    """The decisions that cost or save time."""
    return unit.fqn, tuple(decision.keep for decision in unit.decisions if decision.runtime_ms > 0)


def test_a_plan_is_read_from_its_own_trace(eager: Any) -> None:
    """Of random plans, dropout, in-place operators and two microbatches included, every decision is found again."""
    for plan in [eager.random(seed) for seed in range(4)] + [eager.plain(eager.outer)]:
        found = mirrored(eager.planner.policies, eager.captured(plan))
        by_name = {unit.fqn: unit for unit in found}
        assert [decided(by_name[unit.fqn]) for unit in plan.units] == [decided(unit) for unit in plan.units]
        assert len(found) == len(plan.units)


def test_baselines_of_a_job_as_plans(titan: Any) -> None:
    """The plan that mirrors a baseline of TorchTitan's takes its time and its memory, to the byte.

    With expert parallelism the job checkpoints above FSDP units, which no plan may.
    """
    nested = titan.base.trace.info["parallelism"].get("ep", 1) > 1
    for name, baseline in titan.captures.baselines().items():
        if name == "none":
            assert mirrored(titan.planner.policies, baseline.trace) == ()
            continue
        plan = titan.planner.mirror(baseline)
        assert bool(plan.units) != nested
        if nested:
            continue
        own = simulation_of(titan.captured(plan), baseline.target, plan)
        assert own.peak_active_bytes == baseline.peak_active_bytes, name
        assert abs(own.step_ms - baseline.step_ms) < 1e-3 * baseline.step_ms, name


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

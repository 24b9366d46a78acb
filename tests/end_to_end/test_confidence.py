"""A plan that has to fit with a given probability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autosac.jobs.tasks import plan_job
from autosac.memory_sim import AllocatorConfig
from autosac.planning.confidence import margin_of
from autosac.plans import Plan

GPU = ("--gpu", "h100-sxm-80gb", "--world-size", "2")


def test_a_margin_is_kept(autosac: Callable[..., Any], job_file: str, tmp_path: Path) -> None:
    """At 99.9 %, without expandable segments, 5 % of the budget stay free, and the plan says how sure it is."""
    path = tmp_path / "plan.json"
    wanted = ("--budget", "1.1GiB", "--confidence", "0.999", "--alloc-conf", "")
    ran = autosac("plan", job_file, *GPU, *wanted, "-o", path)
    assert ran.code == 0, ran.err
    assert "it fits the budget with a probability of 99.9" in ran.out and "the step takes" in ran.out

    plan = Plan.load(path)
    stated, certainty = plan.predictions["autosac"], plan.certainty
    assert certainty is not None and stated.peak_reserved_bytes is not None
    budget = plan.made_for.budget_bytes
    left = margin_of("reserved", AllocatorConfig()).budget_bytes(budget, 0.999)
    assert budget == int(1.1 * 2**30) and certainty.margin_bytes == budget - left
    assert stated.peak_reserved_bytes <= left < 0.96 * budget and certainty.fits >= 0.999
    assert certainty.step_low_ms < stated.step_ms < certainty.step_high_ms
    assert "it fits the budget with a probability of 99.9" in autosac("explain", path).out


def test_what_the_plugin_asks_for(job_file: str) -> None:
    """The [autosac] section's confidence is the command's, for the budget that it names; 0 keeps no margin."""
    job = {"config_file": job_file, "overrides": (), "gpu": "h100-sxm-80gb", "world_size": 2}
    sure, plain = (
        plan_job(**job, budget=budget, confidence=level)  # type: ignore[arg-type]
        for budget, level in (("1.1GiB", 0.999), ("70GiB", 0.0))
    )
    assert plain.certainty is None and sure.certainty is not None and sure.certainty.fits >= 0.999
    assert sure.made_for.budget_bytes == int(1.1 * 2**30) and plain.made_for.budget_bytes == 70 * 2**30
    margin, stated = sure.certainty.margin_bytes, sure.predictions["autosac"].peak_reserved_bytes
    assert margin > 0 and stated is not None and stated <= int(1.1 * 2**30) - margin

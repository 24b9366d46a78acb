"""The best local batch size of a job with a fixed global batch, and the job that obeys the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autosac.plans import Plan

GPU = ("--gpu", "h100-sxm-80gb", "--world-size", "2")
GLOBAL = ("--training.global_batch_size", "32")


def test_the_plan_of_the_best_batch(autosac: Callable[..., Any], job_file: str, tmp_path: Path) -> None:
    """Of 8 sequences twice without recomputation and 16 once with some, 16 trains faster; the plan names the override, and
    with it the job trains on the tokens per second that the table says.
    """
    path = tmp_path / "plan.json"
    wanted = ("--maximize", "tokens-per-second", "--batch-sizes", "8,16")
    ran = autosac("plan", job_file, *GPU, "--budget", "2.6GiB", *wanted, "-o", path, "--", *GLOBAL)
    assert ran.code == 0, ran.err
    assert "Local batch sizes, global batch 32" in ran.out
    assert "with this plan, the job needs: --training.local_batch_size 16" in ran.out

    plan = Plan.load(path)
    stated = plan.predictions["autosac"]
    assert plan.made_for.overrides == ("--training.local_batch_size", "16")
    assert plan.made_for.job_settings["training.local_batch_size"] == "16"
    assert plan.units and stated.peak_reserved_bytes is not None and stated.peak_reserved_bytes <= 2.6 * 2**30

    simulated = autosac("simulate", job_file, *GPU, "--plan", path, "--json", "--", *GLOBAL, *plan.made_for.overrides)
    assert abs(simulated.document["step"]["step_ms"] - stated.step_ms) < 1e-6
    rate = 32 // 2 * 2048 / stated.step_ms * 1e3
    assert f" {rate:,.0f} " in ran.out
    plain = autosac("simulate", job_file, *GPU, "--ac", "none", "--json", "--", *GLOBAL).document
    assert rate > 32 // 2 * 2048 / plain["step"]["step_ms"] * 1e3

    refused = autosac("simulate", job_file, *GPU, "--quiet", "--plan", path, "--", *GLOBAL)
    assert refused.code == 2
    assert refused.err == "autosac: the plan was made for training.local_batch_size = 16; this job has 8\n"

"""What a search decides about a job that has stages or a plan of its own, and the job's file that carries it."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from searches import SPACE, inputs

from autosac.capture.process.server import CaptureServer
from autosac.configurations.found.best_files import write_best
from autosac.configurations.found.job_files import checkpointing_settings, written_job
from autosac.configurations.running.sessions import searching
from autosac.jobs.tasks import TitanJob, simulate_in


@pytest.fixture(scope="module", autouse=True)
def _shared(module_shares_captures: None) -> None:
    """Searches capture in processes that are there already, and what has not been captured yet."""


def test_the_jobs_own_plan_gives_way(tmp_path: Path) -> None:
    """A job that plans within a budget as it starts: with a plan file the budget goes, with other checkpointing the plan."""
    own = tmp_path / "own.toml"
    own.write_text('[autosac]\nenable = true\nbudget = "68GiB"\nobserve = true\n')
    read = [
        tomllib.loads(written_job(str(own), (), {**checkpointing_settings(name, plan), "training.seq_len": 8}))
        for name, plan in (("autosac", "best.plan.json"), ("full", None))
    ]
    assert [found["autosac"] for found in read] == [
        {"enable": True, "plan": "best.plan.json", "observe": True},
        {"enable": False, "budget": "68GiB", "observe": True},
    ]
    assert "budget" in written_job(str(own), (), {"training.seq_len": 8})


def test_balanced_stages_are_simulated_where_they_differ(job: Path) -> None:
    """Both splits are searched by default; stages that are TorchTitan's own are worked out once."""
    changes = {"pipeline_parallel": (2,), "pipeline_schedule": ("1F1B", "Interleaved1F1B")}
    space = SPACE.model_copy(update={**changes, "microbatch": (4,), "checkpointing": ("none",)})
    with searching(inputs(job, space=space, budget="79GiB", gap=0.0)) as found:
        found.run()
        layouts, known = found.layouts, {**found.outcome.values, **found.outcome.pruned}
        stages = {layout: found.stage_layers(layout) for layout in layouts}
    assert [layout.split for layout in layouts] == ["torchtitan", "balanced"] * 2 and set(known) == set(layouts)
    for own, balanced in zip(layouts[::2], layouts[1::2], strict=True):
        assert (known[balanced] == math.inf) == (stages[own] == stages[balanced])
    assert math.isfinite(min(known.values()))


OWN_STAGES = """
[parallelism]
pipeline_parallel_layers_per_stage = 2
pipeline_parallel_first_stage_less_layers = 0
"""


def test_the_search_decides_on_the_stages_and_the_job_carries_them(
    job: Path, tmp_path: Path, capture_server: CaptureServer
) -> None:
    """A job with stages of its own, on two ranks with three stages each: written, it takes the step that the search says."""
    own, best = tmp_path / "own.toml", tmp_path / "best.toml"
    own.write_text(job.read_text() + OWN_STAGES)
    changes = {"pipeline_parallel": (2,), "pipeline_schedule": ("Interleaved1F1B",), "stages_per_rank": (3,)}
    changes |= {"microbatch": (4,), "checkpointing": ("none",), "pipeline_split": ("torchtitan",)}
    space = SPACE.model_copy(update=changes)
    given = inputs(own, space=space, budget="79GiB", study=tmp_path / "study")
    with searching(given) as found:
        result = found.run()
        assert [str(layout) for layout in found.layouts] == ["pp 2, batch 4 x 4, Interleaved1F1B, 3 stages a rank"]
    assert result.best is not None
    write_best(best, given, result)
    parallelism = tomllib.loads(best.read_text())["parallelism"]
    assert [len(part) for part in parallelism["module_fqns_per_model_part"]] == [3, 1, 1, 1, 1, 2]
    assert "pipeline_parallel_layers_per_stage" not in parallelism
    written = TitanJob.of(str(best), gpu="h100-sxm-80gb", world_size=2)
    simulation, _ = simulate_in(capture_server, written)
    assert simulation.step_ms == pytest.approx(result.best.measured.step_ms)

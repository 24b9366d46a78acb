"""From the command line: a TorchTitan 0.3 job is planned, and simulated under its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autosac.bench.run import run_suite
from autosac.bench.suite import load_suite
from autosac.cli.parser import main
from autosac.titan.version import check_job


def test_plan_and_simulate(jobs_on_path: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan fits its budget, holds the job's settings, and gives the peak that it promised."""
    path = tmp_path / "plan.json"
    machine = ["--gpu", "h100-sxm-80gb", "--world-size", "2", "--json"]
    overrides = ["--", "--training.local_batch_size", "32"]
    assert main(["simulate", "jobs:tiny", *machine, "--ac", "none", *overrides]) == 0
    without = json.loads(capsys.readouterr().out)
    budget = round(0.9 * without["peak_active_bytes"])
    arguments = ["--budget", f"{budget / 2**30}GiB", "--budget-kind", "active", "-o", str(path)]
    assert main(["plan", "jobs:tiny", *machine, *arguments, *overrides]) == 0
    capsys.readouterr()
    plan = json.loads(path.read_text())
    assert plan["units"] and plan["made_for"]["job_settings"]["parallelism.spmd_backend"] == "partial_dtensor"
    assert main(["simulate", "jobs:tiny", *machine, "--plan", str(path), *overrides]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_active_bytes"]
    assert peak == plan["predictions"]["autosac"]["peak_active_bytes"] <= budget < without["peak_active_bytes"]


@pytest.mark.parametrize("job", ["examples/llama3_8b.toml", "llama3", "llama3:", ":llama3_8b"])
def test_jobs_are_named_by_module_and_config(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else, a job file of TorchTitan 0.2 included, is told how."""
    assert main(["simulate", job, "--gpu", "h100-sxm-80gb"]) == 2
    assert "as MODULE:CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            "llama3:llama3_8B",
            "llama3 has no configuration llama3_8B (do you mean llama3_8b?); it has llama3_debugmodel,",
        ),
        (
            "torchtitan.models.llama3:llama3_9b",
            "torchtitan.models.llama3 has no configuration llama3_9b (do you mean llama3_8b?)",
        ),
        ("lama3:llama3_8b", "there is no module lama3 (do you mean llama3?); TorchTitan's own are "),
    ],
)
def test_names_that_nothing_has_are_refused_at_once(job: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a capture process, with the names that there are."""
    assert main(["simulate", job, "--gpu", "h100-sxm-80gb"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"autosac: job {job}: ") and said in error and "starting" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "job", ["llama3:llama3_8b", "llama3:cast", "torchtitan.models.llama3:llama3_8b", "jobs:anything"]
)
def test_names_that_may_be_something_are_left_to_torchtitan(jobs_on_path: None, job: str) -> None:
    """What a module imports, and modules of one's own."""
    check_job(job)


@pytest.mark.parametrize("more", [(), ("--maximize", "tokens-per-second"), ("--levers", "quick")])
def test_losses_in_chunks_are_the_configurations_own(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is captured."""
    assert main(["plan", "llama3:llama3_8b", "--gpu", "h100-sxm-80gb", "--quiet", "--chunk-loss", *more]) == 2
    assert capsys.readouterr().err == (
        "autosac: TorchTitan 0.3 computes losses in chunks itself: choose ChunkedCELoss in the configuration\n"
    )


def test_a_job_in_a_bench_suite(jobs_on_path: None, tmp_path: Path) -> None:
    """A suite of the harness names a job by MODULE:CONFIG; the plan fits and recomputes less than full checkpointing."""
    path = tmp_path / "suite.toml"
    path.write_text(
        'name = "s"\ngpu = "h100-sxm-80gb"\nbudgets = ["0.13GiB"]\nbudget_kind = "active"\n'
        'policies = ["none", "full", "knapsack"]\n[[models]]\nname = "tiny"\njob = "jobs:tiny"\nworld_size = 2\n'
        'configurations = [{ name = "c", "training.local_batch_size" = 32 }]\n'
    )
    rows = {row.policy: row for row in run_suite(load_suite(path), tmp_path)[0].rows}
    assert rows["knapsack"].peak_active_bytes <= 0.13 * 2**30 < rows["none"].peak_active_bytes
    assert 0 < rows["knapsack"].recompute_ms < rows["full"].recompute_ms

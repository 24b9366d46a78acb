"""A search of a TorchTitan 0.3 job: the configuration that it writes takes the step that it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from autosac.cli.parser import main
from autosac.configurations.running.jobs import own_of
from autosac.jobs.tasks import TitanJob, simulate_job
from autosac.titan.python_jobs import read_python_job

SPACE = """
tensor_parallel = [1]
context_parallel = [1]
data_parallel_replicate = [1]
microbatch = [2, 4]
checkpointing = ["none", "full"]
reshard_after_forward = ["always"]
"""


def test_the_written_configuration_takes_the_step_that_it_says(
    jobs_on_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The best of two microbatches, written as a function and read again, has the search's step time, and the arguments."""
    space, best = tmp_path / "space.toml", tmp_path / "best.py"
    space.write_text(SPACE)
    words = ["search", "jobs:tiny", "--gpu", "h100-sxm-80gb", "--world-size", "2", "--global-batch", "8"]
    words += ["--space", str(space), "--study", str(tmp_path / "study"), "--workers", "1", "-o", str(best)]
    assert main([*words, "--json", "--quiet", "--", "--training.seq_len", "128"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["proven"] and document["best"]["checkpointing"] == "none"
    pipelines = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)  # older ones have none with TorchTitan 0.3
    assert document["counts"]["legal"] == (6 if pipelines else 2)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    written = TitanJob.of("best:tiny_autosac", gpu="h100-sxm-80gb", world_size=2)
    simulation, _ = simulate_job(written)
    assert simulation.step_ms == pytest.approx(document["best"]["step_ms"])
    settings = read_python_job("best:tiny_autosac", ()).settings
    assert (settings["training.seq_len"], settings["training.global_batch_size"]) == (128, 8)


def test_states_may_be_of_two_bytes(jobs_on_path: None) -> None:
    """The job's own optimizer is no value of the knob: a search keeps it, and its bounds count 8 bytes a parameter."""
    own = own_of("jobs:lean", (), 2, 8)
    assert own.optimizer == "fused_opt_states_bf16" and own.state_bytes == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "best.toml"], "name the file such as best.py"),
        (["--", "--parallelism.tensor_parallel_degree", "2"], "is a knob of the search"),
        (["--", "--training.nonsense", "2"], "TorchTitan rejects the job: "),
    ],
)
def test_wrong_input_is_one_line(
    jobs_on_path: None, words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each mistake ends before any capture."""
    given = ["search", "jobs:tiny", "--gpu", "h100-sxm-80gb", "--study", str(tmp_path / "study"), "--quiet", *words]
    assert main(given) == 2
    complaint = capfd.readouterr().err
    assert message in complaint and complaint.count("\n") == 1

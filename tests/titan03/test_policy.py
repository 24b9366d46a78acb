"""The checkpointing policy for TorchTitan 0.3, in real training on the CPU (train.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC

from autosac.capture.jobs.titan_v03 import Transformed
from autosac.integrations.torchtitan.policy_hook import reaching_flux

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, jobs_on_path: None) -> Any:
    """What train.py found."""
    folder = tmp_path_factory.mktemp("train")
    command = [sys.executable, str(HERE / "train.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


def test_training_is_bitwise_the_same_under_a_plan(report: Any) -> None:
    """Three steps by TorchTitan's Trainer: equal losses, gradients and parameters; the planned operators run again."""
    assert report["same"] and report["as_planned"] and not report["fallbacks"]
    assert len(set(report["losses"])) == 3 and report["tensors"] == 2 * 17
    assert 10 < report["kept"] < report["operators"]
    assert report["classes"] == ["FSDPLlama3TransformerBlock"] * 2, "FSDP is applied to the planned module"


def test_compiled_layers_save_what_their_policies_keep(report: Any) -> None:
    """In each step the first layer saves its products, all but the last, which is only added; the second none."""
    needed = 128 * (3 * 256 + 256 + 2 * 768) * 2  # of 128 tokens in bfloat16
    saved = report["compiled"]["saved"]
    assert [a - b for a, b in zip(saved[::2], saved[1::2], strict=True)] == [needed] * 3
    assert report["compiled"]["close"]


def test_training_is_bitwise_the_same_under_torchtitans_own_checkpointing(report: Any) -> None:
    """Where that is the plan TorchTitan's policy wraps the layers; a plan for other parameters is refused."""
    assert report["own"]["same"]
    assert report["own"]["classes"] == ["FSDPCheckpointWrapper"] * 2
    assert report["own"]["other"].startswith(
        "PlanError: the plan was made for another model: the model has a parameter"
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("both", "UsageError: AutoSAC is given both a plan and a budget"),
        ("missing", "PlanError: cannot read the plan"),
        ("nameless", "UsageError: AutoSAC plans jobs that the command line names"),
        ("world", "PlanError: the plan was made for 16 ranks; this job has 1"),
        ("setting", "PlanError: the plan was made for training.seq_len = 64; this job has 128"),
        ("model", "PlanError: the plan was made for model_spec.model = Llama3Model.Config "),
        ("parameters", "PlanError: the plan was made for another model: the plan's model has a parameter layers.1."),
    ],
)
def test_misfits_stop_the_job_before_its_first_step(report: Any, case: str, message: str) -> None:
    """Wrong requests and plans for other jobs: each says what."""
    assert report["misfits"][case].startswith(message)


def test_the_job_is_named_by_the_command_line() -> None:
    """Both spellings of TorchTitan's two options; all else stays in order."""
    from autosac.integrations.torchtitan.policy import named_job

    line = ["--module", "llama3", "--training.steps", "5", "--config=llama3_8b", "--compile.enable"]
    assert named_job(line) == ("llama3:llama3_8b", ["--training.steps", "5", "--compile.enable"])
    assert named_job(["--module", "llama3"]) == ("", [])


@pytest.mark.parametrize("ours", [True, False])
def test_flux_obeys_a_policy_for_the_whole_model(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """TorchTitan's Flux calls a function of its own where a job has a policy: the policy, if that decides for whole models."""
    module: Any = ModuleType("parallelize")
    applied: list[str] = []
    module.apply_ac = lambda _: applied.append("TorchTitan's own")
    monkeypatch.setitem(sys.modules, "torchtitan.models.flux.parallelize", module)
    policy = Transformed.Config(function=lambda _: applied.append("the policy")) if ours else FullAC.Config()
    with reaching_flux(SimpleNamespace(activation_checkpoint=policy, dump_folder="")):
        module.apply_ac(nn.Linear(1, 1))
    module.apply_ac(nn.Linear(1, 1))
    assert applied == ["the policy" if ours else "TorchTitan's own", "TorchTitan's own"]

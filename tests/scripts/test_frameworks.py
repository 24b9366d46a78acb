"""Small sizes of the scripts in `benchmarks/scripts`: frameworks as their users write them, in torchrun's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks/scripts"
SMALL = ("--layers", "2", "--width", "256")
CASES = {
    "nanogpt.py": (
        None,
        4,
        ("--layers", "1", "--width", "256", "--heads", "4", "--dtype", "float16", "--accumulation", "4"),
    ),
    "fsdp2.py": (None, 4, (*SMALL, "--length", "512")),
    "fsdp1.py": (None, 4, (*SMALL, "--length", "512")),
    "hf_trainer.py": ("transformers", 8, (*SMALL, "--fsdp", "--heads", "4", "--inner", "512", "--length", "256")),
    "accelerate_loop.py": ("accelerate", 2, ("--width", "512", "--batch", "64")),
    "lightning_module.py": ("lightning", 2, ("--width", "512", "--batch", "64")),
    "megatron_gpt.py": (
        "megatron",
        4,
        (*SMALL, "--heads", "4", "--length", "256", "--tensor", "2", "--pipeline", "2"),
    ),
    "accelerate_fsdp2.py": (
        "accelerate",
        4,
        (*SMALL, "--inner", "512", "--heads", "4", "--vocabulary", "1000", "--length", "256", "--checkpointing"),
    ),
    "fabric.py": ("lightning", 2, ("--layers", "2", "--width", "128", "--batch", "4")),
    "deepspeed_zero.py": ("deepspeed", 4, (*SMALL, "--stage", "3", "--length", "256")),
    "diffusers_loop.py": ("diffusers", 2, ("--small", "--batch", "4")),
}


@pytest.mark.parametrize("script", CASES)
def test_runs_as_it_is(script: str, autosac: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step computes, communicates if there are several ranks that train together, and fits."""
    package, nproc, arguments = CASES[script]
    if package is not None:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    machine = ("--gpu", "h100-sxm-80gb", "--json", "--nproc", str(nproc))
    ended = autosac("run", str(SCRIPTS / script), *machine, "--", *arguments)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["job"]["world_size"] == nproc and found["verdict"] == "fits"
    assert found["script"]["steps"] == 3
    assert found["step"]["compute_ms"] > 0 and found["step"]["optimizer_ms"] > 0
    assert (found["step"]["communication_ms"] > 0) == (script != "lightning_module.py")

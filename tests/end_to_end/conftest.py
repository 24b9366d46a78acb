"""Small TorchTitan jobs: captured through one process, as job files for the public API, and under the command line.

The command line runs in this process (captures run in a process of their own).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.cli.parser import main
from autosac.jobs.tasks import TitanJob
from autosac.trace import Trace

BATCH = ("--training.local_batch_size", "2", "--training.seq_len", "128")


def arguments(model: str, options: dict[str, Any]) -> tuple[str, ...]:
    """TorchTitan's arguments for a model ("llama3" or "llama3 flavor") and options of any section."""
    name, _, flavor = model.partition(" ")
    words = ["--model.name", name, "--model.flavor", flavor or "debugmodel", *BATCH]
    for key, value in options.items():
        section, _, option = key.partition("__")
        words += [f"--{section}.{option}"] if value is True else [f"--{section}.{option}", str(value)]
    return tuple(words)


@pytest.fixture(scope="session")
def capture(capture_server: CaptureServer) -> Callable[..., Trace]:
    """Captures 2 sequences of 128 tokens a rank of a model with three layers, without checkpointing; the same job is captured
    once.
    """
    known: dict[TitanRequest, Trace] = {}

    def run(model: str, world_size: int, **options: Any) -> Trace:
        request = TitanRequest(
            config_file=None,
            overrides=arguments(model, options),
            world_size=world_size,
            checkpointing="none",
            layers=3,
        )
        if request not in known:
            known[request] = capture_server.capture(request)
        return known[request]

    return run


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., TitanJob]:
    """A job for the public API, on H100s."""

    def make(model: str, world_size: int, **options: Any) -> TitanJob:
        path = tmp_path / "job.toml"
        path.write_text("")
        overrides = arguments(model, {"activation_checkpoint__mode": "none", **options})
        return TitanJob.of(str(path), gpu="h100-sxm-80gb", world_size=world_size, overrides=overrides)

    return make


JOB = """
[model]
name = "llama3"
flavor = "debugmodel"

[training]
local_batch_size = 8
seq_len = 2048

[activation_checkpoint]
mode = "none"
"""


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its JSON output."""
        return json.loads(self.out)


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """A job file for TorchTitan's own debug model."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


@pytest.fixture(autouse=True)
def captures_are_shared(monkeypatch: pytest.MonkeyPatch, shared_cache: Path, shared_processes: None) -> None:
    """What one test has captured is not captured again in another, but for `capture`; processes that
    capture serve several tests.
    """
    monkeypatch.setenv("AUTOSAC_CACHE", str(shared_cache))


@pytest.fixture
def autosac(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command: its exit code, what it printed and what it complained of."""

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run

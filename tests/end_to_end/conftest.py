"""A small TorchTitan job, and the command line run in this process (captures run in a process of their own)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autosac.cli.parser import main

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


@pytest.fixture
def autosac(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command: its exit code, what it printed and what it complained of."""

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run

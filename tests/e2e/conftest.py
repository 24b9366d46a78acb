"""Small TorchTitan jobs: captures through one process, and job files for the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process.request import TitanRequest
from autosac.capture.process.server import CaptureServer
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
def capture() -> Iterator[Callable[..., Trace]]:
    """Captures 2 sequences of 128 tokens a rank without checkpointing; the same job is captured once."""
    known: dict[TitanRequest, Trace] = {}
    with CaptureServer() as server:

        def run(model: str, world_size: int, **options: Any) -> Trace:
            request = TitanRequest(
                config_file=None, overrides=arguments(model, options), world_size=world_size, checkpointing="none"
            )
            if request not in known:
                known[request] = server.capture(request)
            return known[request]

        yield run


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., TitanJob]:
    """A job for the public API, on H100s."""

    def make(model: str, world_size: int, **options: Any) -> TitanJob:
        path = tmp_path / "job.toml"
        path.write_text("")
        overrides = arguments(model, {"activation_checkpoint__mode": "none", **options})
        return TitanJob.of(str(path), gpu="h100-sxm-80gb", world_size=world_size, overrides=overrides)

    return make

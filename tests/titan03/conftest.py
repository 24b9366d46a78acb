"""These tests need TorchTitan 0.3 and are skipped with 0.2: ``make test-titan03`` has an environment for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs
from autosac.trace import Trace

HERE = Path(__file__).parent
if not has_python_jobs():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def jobs_on_path() -> Iterator[None]:
    """Processes that are started find the jobs of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        yield


@pytest.fixture(scope="session")
def server(jobs_on_path: None) -> Iterator[CaptureServer]:
    """One capture process for all tests."""
    with CaptureServer() as server:
        yield server


@pytest.fixture(scope="session")
def capture(server: CaptureServer) -> Callable[..., Trace]:
    """Capture a job, by default the tiny one: ``capture("--training.seq_len", "128", world_size=2)``; each only once."""
    known: dict[Any, Trace] = {}

    def run(*overrides: str, job: str = "jobs:tiny", **settings: Any) -> Trace:
        key = (overrides, job, *settings.items())
        if key not in known:
            known[key] = server.capture(TitanRequest(config_file=job, overrides=overrides, **settings))
        return known[key]

    return run

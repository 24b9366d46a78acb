"""Evaluations on a local Ray of two workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.configurations.evaluating.workers import RayWorkers, WorkerLost
from autosac.errors import UsageError

ray = pytest.importorskip("ray")


@dataclass(frozen=True)
class Sum:
    """A task without a capture; `mortal` ends its process."""

    numbers: tuple[int, ...]
    mortal: bool = False
    gpu: None = None

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """The sum, or the process's end."""
        if self.mortal:
            os._exit(1)
        return {"sum": sum(self.numbers)}


def test_tasks_run_on_rays_workers_and_lost_ones_are_told() -> None:
    """Two actors answer; one that dies is a lost worker, and the next task is answered again."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(sys.modules[Sum.__module__])  # the workers do not know the tests
    workers = RayWorkers("auto")
    try:
        assert workers.count == 2
        futures = [workers.submit(Sum((i, 1))) for i in range(2)]
        assert [future.result(timeout=120)["sum"] for future in futures] == [1, 2]
        with pytest.raises(WorkerLost):
            workers.submit(Sum((), mortal=True)).result(timeout=120)
        assert workers.submit(Sum((2, 2))).result(timeout=120) == {"sum": 4}
        workers.close()
    finally:
        ray.shutdown()


def test_no_cluster_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no cluster has been started, that is said in one line."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray notes the running cluster
    with pytest.raises(UsageError, match="no Ray cluster at 'auto'") as error:
        RayWorkers("auto")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_at_once(prefix: str) -> None:
    """Ray itself is never asked: it would try for minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{prefix}127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UsageError) as error:
            RayWorkers(address)
    assert str(error.value).startswith(
        f"no Ray cluster at '{address}': {address} does not answer (Connection refused) ("
    )


def test_a_cluster_that_has_ended_is_told_by_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the cluster that was started last, which may have been killed."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with pytest.raises(UsageError, match=f"no Ray cluster at 'auto': {address} does not answer"):
            RayWorkers("auto")


def test_what_sigterm_does_is_not_rays_decision() -> None:
    """A search over Ray is interrupted as any other, and tells the best so far: its handler is there after Ray has begun."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    address = ray.get_runtime_context().gcs_address
    script = (
        "import signal, sys\n"
        "from autosac.configurations.evaluating.workers import RayWorkers\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"workers = RayWorkers({address!r})\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    try:
        assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 7
    finally:
        ray.shutdown()

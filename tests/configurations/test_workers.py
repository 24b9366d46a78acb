"""Workers whose capture processes are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.configurations.evaluating.workers import Servers, WorkerLost, check_not_starting
from autosac.errors import CaptureError
from autosac.jobs.titan import TitanJob
from autosac.target import TargetGPU


@dataclass(frozen=True)
class Capturing:
    """Captures a job's step and goes on without it if that fails; `kills` its capture process, as Linux does when memory runs
    out.
    """

    job: TitanJob
    kills: bool

    @property
    def gpu(self) -> TargetGPU:
        """That of the job."""
        return self.job.target.gpu

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """How many events the step has, or why there is none."""
        future = server.submit(self.job.request("none"))
        process = server.process_id()
        assert process is not None
        if self.kills:
            os.kill(process, signal.SIGKILL)
        try:
            return {"events": len(future.result().events)}
        except CaptureError as e:
            return {"refused": str(e)}


def test_a_killed_capture_process_is_no_refusal(tmp_path: Path) -> None:
    """Its task is lost, whatever it answers, and may be asked again: the next one has a process of its own."""
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\nseq_len = 64\nlocal_batch_size = 1\n')
    job = TitanJob.of(str(path), gpu="h100-sxm-80gb", world_size=1)
    servers = Servers(use_cache=False)
    try:
        with pytest.raises(WorkerLost, match="the capture process was ended by signal 9"):
            servers.run(Capturing(job, kills=True))
        assert servers.run(Capturing(job, kills=False))["events"] > 100
    finally:
        servers.close()


@dataclass(frozen=True)
class Waiting:
    """Says that it has begun, and waits for word to go on."""

    begun: threading.Event
    ended: threading.Event
    gpu: None = None

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """Nothing is captured, as when the server has ended."""
        self.begun.set()
        self.ended.wait()
        raise CaptureError("the capture process has ended")


def test_a_search_may_end_while_a_task_runs() -> None:
    """Ctrl-C closes what another thread works with: nothing is changed under the one that closes, and nothing starts again."""
    servers, begun, ended = Servers(use_cache=False), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(servers.run, Waiting(begun, ended))
        begun.wait()
        servers.close()
        ended.set()
        with pytest.raises(CaptureError, match="has ended"):
            under_way.result()
        with pytest.raises(WorkerLost, match="the search has ended"):
            servers.run(Waiting(begun, ended))


def test_a_script_without_a_guard_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker imports the script that started it, and ends where that would search again; others go on."""
    check_not_starting()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match='put the search under if __name__ == "__main__"'):
        check_not_starting()

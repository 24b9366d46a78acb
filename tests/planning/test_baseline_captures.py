"""Which captures of a TorchTitan job are asked for, for what its plans are shown beside."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.titan.version import has_python_jobs
from autosac.trace import Trace

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the job is TorchTitan 0.2's")


class _Server:
    """Notes what it is asked for, and never answers."""

    def __init__(self) -> None:
        self.asked: list[TitanRequest] = []

    def submit(self, request: TitanRequest) -> Future[Trace]:
        self.asked.append(request)
        return Future()


@pytest.mark.parametrize(("more", "cuts"), [((), [0, 1]), (("--compile.enable",), [0, 1, 2])])
def test_baselines_are_made_of_two_cuts(tmp_path: Path, more: tuple[str, ...], cuts: list[int]) -> None:
    """If the step without checkpointing can confirm them, which a compiled one cannot. So they need not be worth three."""
    (tmp_path / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    job = TitanJob.of(str(tmp_path / "job.toml"), gpu="h100-sxm-80gb", world_size=1, overrides=more)
    server: Any = _Server()
    TitanCaptures(job, cast(CaptureServer, server), tmp_path).start("none", "full")
    by_name = {
        name: [(r.cut, r.cuts) for r in server.asked if (r.checkpointing, r.observe) == (name, name == "none")]
        for name in ("none", "full")
    }
    assert by_name == {"none": [(cut, 3) for cut in range(3)], "full": [(cut, len(cuts)) for cut in cuts]}

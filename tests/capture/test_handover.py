"""What captures hand to later ones: no byte of a trace differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs

# A process captures the requests one after the other, twice: alone each, then with what those before have found.
PROGRAM = """
import os, sys, torch
from pathlib import Path
from autosac.capture.jobs import handover
from autosac.capture.process import worker
from autosac.capture.request import TitanRequest

requests, folder = [TitanRequest.from_json(text) for text in sys.argv[2:]], Path(sys.argv[1])
torch.set_num_threads(1)  # as the worker does
server = worker.Worker(os.open(os.devnull, os.O_WRONLY), str(folder))
server.preload(requests[0])

for when in ("alone", "after"):
    for number, request in enumerate(requests):
        child = os.fork()
        if not child:
            try:
                server.capture(0, request, str(folder / f"{number}.{when}"))
                server.hand_over()
                (folder / f"{number}.{when}.known").write_text(
                    f"{len(handover.recipes.known)} {len(handover.shardings.decisions)}"
                )
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        if when == "after":
            server.take_over(child)
os._exit(0)
"""


@pytest.mark.skipif(has_python_jobs(), reason="the job is TorchTitan 0.2's")
def test_captures_are_the_same(tmp_path: Path) -> None:
    """A stage with tensor parallelism, observed and under both kinds of checkpointing: no byte of the traces differs, whether
    they know what the one before has found, or nothing.
    """
    degrees = (f"--parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline"))
    overrides = ("--model.flavor", "debugmodel", "--training.seq_len", "256", *(w for d in degrees for w in (d, "2")))
    job = {"config_file": None, "overrides": overrides, "world_size": 8, "layers": 4}
    requests = [
        TitanRequest(**job, checkpointing="none", observe=True),  # type: ignore[arg-type]
        TitanRequest(**job, checkpointing="full"),  # type: ignore[arg-type]
        TitanRequest(**job, checkpointing="selective-op"),  # type: ignore[arg-type]
    ]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *(r.to_json() for r in requests)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for number in range(3):
        assert (tmp_path / f"{number}.after").read_bytes() == (tmp_path / f"{number}.alone").read_bytes()
        counts = [tuple(map(int, (tmp_path / f"{number}.{w}.known").read_text().split())) for w in ("alone", "after")]
        assert counts[0] == (0, 0)
        assert min(counts[1]) >= (30 if number else 0)

"""How many captures run at once."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process import worker
from autosac.capture.process.worker import Worker, available_bytes
from autosac.capture.request import TitanRequest


@pytest.mark.parametrize(
    ("running", "beside", "free_gib", "plan", "full"),
    [
        (0, 0, 0, True, True),
        (1, 0, 100, True, True),
        (2, 2, 100, True, True),
        (3, 0, 100, False, False),
        (3, 1, 100, True, False),
        (5, 3, 100, True, False),
        (5, 2, 100, False, False),
        (1, 0, 3, False, False),
        (1, 0, 4, True, True),
        (1, 0, 1, False, False),
        (1, 1, 1, False, False),
    ],
)
def test_room(
    monkeypatch: pytest.MonkeyPatch, running: int, beside: int, free_gib: int, plan: bool, full: bool
) -> None:
    """One always runs; more as long as there is memory and processors (three here), which captures that a plan is only shown
    beside leave to others.
    """
    monkeypatch.setattr(worker, "available_bytes", lambda: free_gib * 2.0**30)
    server = Worker(-1, "")
    server.processors = 3
    server.children = dict.fromkeys(range(running), 0)
    server.beside = set(range(beside))
    assert server.has_room(_request("plan")) is plan
    assert server.has_room(_request("full")) is full


def test_what_is_planned_with_comes_first() -> None:
    """As long as the compiler is not prepared, a capture without it; then plans and the plain step, in the order asked for."""
    server = Worker(-1, "")
    asked = ("full", "none", "observed", "selective-op", "plan")
    server.pending = [({"id": name}, _request(name)) for name in asked]
    server.compiles = True
    started = [server.pending.pop(server.next())[0]["id"]]
    server.compiles = False
    started += [server.pending.pop(server.next())[0]["id"] for _ in asked[1:]]
    assert started == ["observed", "none", "plan", "full", "selective-op"]


def _request(name: str) -> TitanRequest:
    if name == "observed":
        return TitanRequest(config_file=None, checkpointing="none", observe=True)
    return TitanRequest(config_file=None, checkpointing=name, plan_file="plan.json" if name == "plan" else None)


def test_a_job_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first capture with each kind of checkpointing, and before the first one under a plan."""
    found: list[TitanRequest] = []
    monkeypatch.setattr(worker, "read", found.append)
    server = Worker(-1, "")
    asked = [_request(name) for name in ("observed", "none", "plan", "full", "plan")]
    other = TitanRequest(config_file=None, overrides=("--training.seq_len", "128"), checkpointing="full")
    for request in (*asked, other, *asked):
        server.read_ahead(request)
    assert found == [asked[0], asked[2], asked[3], other]


def test_what_captures_share_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first request; that it has been made is noted, with the request."""
    found: list[TitanRequest] = []
    monkeypatch.setattr(worker, "share_functions", found.append)
    server = Worker(-1, "")
    server.share(request := _request("none"))
    assert (found, server.shares, server.shared) == ([request], False, request)


def test_available_memory() -> None:
    """The system says some memory is left, or does not say."""
    assert 2**20 < available_bytes() <= math.inf


def test_a_capture_that_is_interrupted_ends_with_code_1(tmp_path: Path) -> None:
    """What is no error of the capture ends its process at once; whoever waits for the capture is told the code."""

    class Interrupted(Worker):
        def capture(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with (tmp_path / "answers").open("wb") as answers:
        server = Interrupted(answers.fileno(), str(tmp_path))
        server.start({"id": 7, "trace": ""}, _request("observed"))
        while server.children:
            server.reap()
            time.sleep(0.01)
    (line,) = (tmp_path / "answers").read_bytes().splitlines()
    assert json.loads(line) == {
        "id": 7,
        "error": "the capture process ended early with exit code 1",
        "kind": "CaptureLostError",
    }

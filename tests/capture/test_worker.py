"""How many captures run at once."""

from __future__ import annotations

import math

import pytest

from autosac.capture.process import worker
from autosac.capture.process.worker import Worker, available_bytes
from autosac.capture.request import TitanRequest


@pytest.mark.parametrize(
    ("running", "free_gib", "room"), [(0, 0, True), (1, 100, True), (2, 100, True), (3, 100, False), (1, 1, False)]
)
def test_room(monkeypatch: pytest.MonkeyPatch, running: int, free_gib: int, room: bool) -> None:
    """One always runs; more as long as there are processors (three here) and memory."""
    monkeypatch.setattr(worker, "available_bytes", lambda: free_gib * 2.0**30)
    server = Worker(-1, "")
    server.processors = 3
    server.children = dict.fromkeys(range(running), 0)
    assert server.has_room() is room


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


def test_available_memory() -> None:
    """The system says some memory is left, or does not say."""
    assert 2**20 < available_bytes() <= math.inf

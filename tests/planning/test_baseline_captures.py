"""Which captures of a TorchTitan job are asked for, for what its plans are shown beside."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.induction import Capturing, capturing
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.plans import Plan, Unit
from autosac.titan.version import has_python_jobs
from autosac.trace import Parallelism, Trace
from plans import MADE_FOR
from traces import trace_of

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the job is TorchTitan 0.2's")


class _Server:
    """Notes what it is asked for and what is cancelled, and never answers by itself."""

    def __init__(self) -> None:
        self.asked: list[TitanRequest] = []
        self.cancelled: list[TitanRequest] = []
        self.room = True
        self.compiled = False  # what is not observed
        self._futures: list[Future[Trace]] = []

    def submit(self, request: TitanRequest) -> Future[Trace]:
        self.asked.append(request)
        self._futures.append(Future())
        if request.checkpointing == "none":
            modules, compiled = ("", "layers.0", "layers.1"), self.compiled or request.observe
            self._futures[-1].set_result(trace_of(parallelism=Parallelism(), modules=modules, compiled=compiled))
        return self._futures[-1]

    def cancel(self, future: Future[Trace]) -> None:
        self.cancelled.append(self.asked[self._futures.index(future)])

    def has_room(self) -> bool:
        return self.room

    def plans(self, requests: list[TitanRequest]) -> list[tuple[str, ...]]:
        """The units of the plans of some requests."""
        return [
            tuple(unit.fqn for unit in Plan.load(request.plan_file).units) for request in requests if request.plan_file
        ]


def captures_from(server: _Server, folder: Path, *more: str) -> TitanCaptures:
    """The captures of a small job, with more of TorchTitan's arguments, from this server."""
    (folder / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    job = TitanJob.of(str(folder / "job.toml"), gpu="h100-sxm-80gb", world_size=1, overrides=more)
    return TitanCaptures(job, cast(CaptureServer, server), folder)


def plan(*units: str) -> Plan:
    """A plan for these modules of a job of one GPU."""
    chosen = tuple(Unit(fqn=u, discard_fraction=1.0, kept_bytes=0, recompute_ms=1.0, decisions=()) for u in units)
    return Plan(made_for=replace(MADE_FOR, world_size=1), units=chosen)


@pytest.mark.parametrize(("more", "observed"), [((), {True}), (("--compile.enable",), {True, False})])
def test_a_plain_step_is_captured_where_it_compiles(tmp_path: Path, more: tuple[str, ...], observed: set[bool]) -> None:
    """Modules are observed in an eager step; what the compiler makes of them is in one without observers."""
    server = _Server()
    captures_from(server, tmp_path, *more).start("none")
    assert {request.observe for request in server.asked if request.checkpointing == "none"} == observed


@pytest.mark.parametrize(("more", "cuts"), [((), [0, 1]), (("--compile.enable",), [0, 1, 2])])
def test_baselines_are_made_of_two_cuts(tmp_path: Path, more: tuple[str, ...], cuts: list[int]) -> None:
    """If the step without checkpointing can confirm them, which a compiled one cannot. So they need not be worth three."""
    server: Any = _Server()
    captures_from(server, tmp_path, *more).start("none", "full")
    by_name = {
        name: [(r.cut, r.cuts) for r in server.asked if (r.checkpointing, r.observe) == (name, name == "none")]
        for name in ("none", "full")
    }
    assert by_name == {"none": [(cut, 3) for cut in range(3)], "full": [(cut, len(cuts)) for cut in cuts]}


def test_a_capture_ahead_ends_where_another_plan_is_asked_for(tmp_path: Path) -> None:
    """One is begun only if nothing else is captured; another one, or a step that is asked for, takes its place; a plan that is
    asked for after all keeps its own.
    """
    server: Any = _Server()
    captures = captures_from(server, tmp_path)
    server.room = False
    captures.begin(plan("layers.0"), ahead=True)
    assert server.plans(server.asked) == []
    server.room = True
    captures.begin(plan("layers.0"), ahead=True)
    captures.begin(plan("layers.0"), ahead=True)
    assert (server.plans(server.asked), server.plans(server.cancelled)) == ([("layers.0",)], [])
    captures.begin(plan("layers.1"), ahead=True)
    assert server.plans(server.asked) == [("layers.0",), ("layers.1",)]
    assert server.plans(server.cancelled) == [("layers.0",)]
    captures.begin(plan("layers.1"))
    captures.begin(plan("layers.0"))
    assert server.plans(server.asked) == [("layers.0",), ("layers.1",), ("layers.0",)]
    assert server.plans(server.cancelled) == [("layers.0",)]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_step_that_may_compile_tells_whether_it_does(tmp_path: Path, compiled: bool) -> None:
    """The observed step knows the job's settings only. Where TorchTitan leaves the model as it is, it is the baseline."""
    server: Any = _Server()
    server.compiled = compiled
    captures = captures_from(server, tmp_path, "--compile.enable")
    assert captures.observed().trace.info.compiled is captures.compiled is compiled
    assert (captures.baseline("none") is captures.observed()) is not compiled


def test_all_cuts_are_cancelled() -> None:
    """A capture that is put together from three cuts ends with them."""
    server: Any = _Server()
    capture = capturing(server, TitanRequest(config_file=None))
    assert isinstance(capture, Capturing)
    capture.cancel()
    assert [request.cut for request in server.cancelled] == [0, 1, 2]


def test_stages_that_share_a_folder_have_plans_of_their_own(tmp_path: Path) -> None:
    """Two stages begin to capture plans one after the other; the process that captures reads them later, each its own."""
    server: Any = _Server()
    stages = [captures_from(server, tmp_path) for _ in range(2)]
    for stage, unit in zip(stages, ("layers.0", "layers.1"), strict=True):
        stage.begin(plan(unit))
    requests = [request for request in server.asked if request.plan_file and not request.cut]
    assert server.plans(requests) == [("layers.0",), ("layers.1",)]

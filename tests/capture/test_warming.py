"""Functions that modules compile by themselves are compiled once for all captures, which are the same as without that."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from autosac.capture.compiler.inherited import FirstRun, called, compiling
from autosac.capture.jobs import warming
from autosac.capture.jobs.adapter import TitanAdapter
from autosac.capture.process import worker
from autosac.capture.process.worker import Worker
from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs

# A process that has imported what captures need forks one for each of some jobs. That captures its own job, perhaps another
# one, and both again after it has compiled for its own: (the folder, each job's and the other ones' requests).
PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from autosac.capture.process import worker
from autosac.capture.request import TitanRequest

folder, jobs = Path(sys.argv[1]), [[TitanRequest.from_json(text) for text in job] for job in json.loads(sys.argv[2])]
torch.set_num_threads(1)  # as the worker does
server = worker.Worker(os.open(os.devnull, os.O_WRONLY), str(folder), (str(folder), ""))
server.preload(jobs[0][0])
server.prepare(jobs[0][0])
from autosac.capture.jobs.titan import installed_adapter  # behind the simulated device
assert server.shares

def forked(action):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        action()
        os._exit(0)
    finally:
        os._exit(1)

def capture(request, name):
    before = counters["frames"]["total"]
    server.capture(0, request, str(folder / name))
    (folder / f"{name}.frames").write_text(str(counters["frames"]["total"] - before))

def serve(job):
    assert worker.compiles_functions(jobs[job][0], installed_adapter())
    for when in ("before", "after"):
        for number, request in enumerate(jobs[job]):
            forked(lambda: capture(request, f"{job}.{number}.{when}"))
        if server.shares:
            server.share(jobs[job][0])

for job in range(len(jobs)):
    forked(lambda: serve(job))
os._exit(0)
"""


@pytest.mark.skipif(has_python_jobs(), reason="jobs of TorchTitan 0.3 are not built without parallelism")
def test_captures_with_inherited_code_are_the_same(tmp_path: Path) -> None:
    """Masks of two kinds, or of documents, and attention over them: no byte of the trace differs, and nothing is compiled but
    the loss of one, after which Dynamo collects garbage; another batch size is another job, which compiles what it would have
    compiled.
    """
    pytest.importorskip("triton")
    loss = ("--compile.enable", "--compile.components", "loss")
    wanted: list[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]] = [
        ("gpt_oss", "debugmodel", "full", (), ("2",)),
        ("deepseek_v3", "debugmodel_flex_attn", "none", loss, ("2", "4")),
    ]
    jobs = [
        [
            TitanRequest(
                config_file=None,
                overrides=(
                    *("--model.name", model, "--model.flavor", flavor),
                    *("--training.seq_len", "256", "--training.local_batch_size", size),
                    *more,
                ),
                world_size=2,
                checkpointing=checkpointing,
                layers=2,
            ).to_json()
            for size in sizes
        ]
        for model, flavor, checkpointing, more, sizes in wanted
    ]
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(jobs)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    for job, requests in enumerate(jobs):
        before, after = (
            [int((tmp_path / f"{job}.{number}.{when}.frames").read_text()) for number in range(len(requests))]
            for when in ("before", "after")
        )
        assert min(before) > 1 and after == [int(bool(wanted[job][3])), *before[1:]]
        for number in range(len(requests)):
            names = (f"{job}.{number}.{when}" for when in ("before", "after"))
            assert len({(tmp_path / name).read_bytes() for name in names}) == 1


def _call(given: torch.Tensor, then: Callable[[], object] = lambda: None) -> None:
    """Stands for a compiled function."""
    then()


@pytest.mark.parametrize("keeps", [True, False])
def test_what_inherited_code_is_first_called_with_is_kept(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Dynamo kept what it compiled the function with; not with code of the own process, and not with a second call."""
    monkeypatch.setattr("autosac.capture.compiler.inherited.keeping", set())
    held = []
    with compiling():
        first = torch.ones(1)
        called(_call, first)
        held += [first] if keeps else []
        del first
    own, inherited = FirstRun(), FirstRun()
    monkeypatch.setattr(inherited, "process", os.getpid() + 1)
    for run, kept in ((own, False), (inherited, keeps), (inherited, False)):
        given = torch.ones(1)
        reference = weakref.ref(given)
        called(_call, given, run)
        del given
        gc.collect()
        assert (reference() is not None) is kept


def test_a_function_that_runs_no_inherited_code_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the innermost call does, and code that runs outside of all calls is of no function."""

    def outside(_: torch.Tensor, then: Callable[[], object]) -> None:
        then()

    monkeypatch.setattr("autosac.capture.compiler.inherited.keeping", {_call, outside})
    first, second = FirstRun(), FirstRun()
    for run in (first, second):
        monkeypatch.setattr(run, "process", os.getpid() + 1)
    inner, outer = torch.ones(1), torch.ones(1)
    references = weakref.ref(inner), weakref.ref(outer)
    called(outside, outer, lambda x=inner: called(_call, x, first))
    second()
    del inner, outer
    gc.collect()
    assert references[0]() is not None and references[1]() is None


@pytest.mark.parametrize(
    ("changed", "compiled", "ranks", "expected"),
    [
        ({}, False, 8, True),
        ({}, True, 8, False),
        ({}, False, 1, False),
        ({"tensor_parallel_degree": 2}, False, 8, False),
        ({"context_parallel_degree": 2}, False, 8, False),
        ({"pipeline_parallel_degree": 2}, False, 8, False),
        ({"data_parallel_replicate_degree": 2}, False, 8, False),
    ],
)
def test_layers_run_alone_as_in_the_job(changed: dict[str, int], compiled: bool, ranks: int, expected: bool) -> None:
    """Under FSDP alone a rank's attention has whole sequences and all heads, in the types of mixed precision."""
    names = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
    parallelism = SimpleNamespace(**{f"{name}_degree": 1 for name in names} | changed)
    settings = {"compile.enable": str(compiled), "compile.components": '["model"]'}
    adapter = cast(TitanAdapter, SimpleNamespace(settings=lambda _: settings))
    request = TitanRequest(config_file=None, world_size=ranks)
    assert warming.runs_alone(adapter, SimpleNamespace(parallelism=parallelism), request) is expected


def test_a_process_compiles_for_its_captures_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only if modules call functions that are compiled."""
    done: list[object] = []
    monkeypatch.setattr(worker, "share_functions", done.append)
    monkeypatch.setattr(Worker, "read_ahead", lambda _, request: done.append(request.cut))
    monkeypatch.setattr(worker.os, "fork", lambda: 17)
    server = Worker(-1, "")
    first, second = (TitanRequest(config_file=None, cut=cut) for cut in range(2))
    server.start({"id": 0}, second)
    server.shares = True
    server.start({"id": 1}, first)
    server.start({"id": 2}, second)
    assert done == [1, first, 0, 1] and server.shared is first

"""A capture process that dies, at whatever moment, is an error of one line: nobody waits for it for ever."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autosac.capture.process import server as module
from autosac.capture.process.server import CaptureServer
from autosac.capture.processors import available_processors
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError, UsageError
from autosac.induction import capturing

PATIENCE_S = 60
JOB = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'

# Programs in place of the capture process: what they do after the first line of input. They have the same arguments.
CLOSES_ITS_ANSWERS_FIRST = "os.close(answers); time.sleep(0.3)"
ANSWERS_NONSENSE = "os.write(answers, b'{nonsense\\n'); time.sleep(100)"
ANSWERS_UNKNOWN_KIND = 'os.write(answers, b\'{"id": 0, "error": "no", "kind": "Strange"}\\n\'); time.sleep(100)'
WAITS = "time.sleep(100)"


def program(folder: Path, what: str) -> tuple[str, ...]:
    """The command of a process that reads one request and then does `what`."""
    path = folder / "program.py"
    path.write_text(f"import os, sys, time\nanswers = int(sys.argv[1])\nsys.stdin.readline()\n{what}\n")
    return (sys.executable, str(path))


def within_limit(action: Callable[[], object]) -> str:
    """The error that an action ends with. Fails if it takes for ever."""
    said: list[str] = []

    def run() -> None:
        try:
            action()
        except CaptureError as e:
            said.append(str(e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    (error,) = said
    return error


def capture_twice(job: str, kill: Callable[[CaptureServer], None] = lambda _: None) -> None:
    """Ask for the job's capture, and once more after a failure, as one does who tries the whole job next."""
    with CaptureServer() as server:
        future = capturing(server, TitanRequest(config_file=job))
        kill(server)
        future.result()


@pytest.fixture
def job(tmp_path: Path) -> str:
    """A small job's file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (CLOSES_ITS_ANSWERS_FIRST, "the capture process ended early with exit code 0"),
        ("raise ImportError('no luck')", "the capture process ended early with exit code 1: ImportError: no luck"),
        (ANSWERS_NONSENSE, "the capture process cannot be used: Expecting property name enclosed in double quotes"),
    ],
)
def test_an_early_end_is_told(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, what: str, error: str) -> None:
    """The error is that of the process, also for a request that is written while the process can still be written to."""
    monkeypatch.setattr(module, "PROGRAM", program(tmp_path, what))
    assert within_limit(lambda: capture_twice(job)).startswith(error)


@pytest.mark.parametrize("debug", [False, True])
def test_what_a_job_prints(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], debug: bool
) -> None:
    """Its output is only shown with debug, and then as errors: standard output holds reports."""
    prints = "print('to out', flush=True); print('to err', file=sys.stderr, flush=True)"
    monkeypatch.setattr(module, "PROGRAM", program(tmp_path, prints))

    def ask() -> None:
        with CaptureServer(debug=debug) as server:
            server.capture(TitanRequest(config_file=job))

    assert within_limit(ask).startswith("the capture process ended early")
    shown = capfd.readouterr()
    assert shown.out == "" and sorted(shown.err.split("\n")) == (["", "to err", "to out"] if debug else [""])


def test_what_is_asked_for_after_the_end_is_refused(job: str) -> None:
    """A thread that asks for a capture when nobody needs any more starts no process."""
    with CaptureServer() as server:
        pass
    future = server.submit(TitanRequest(config_file=job))
    assert "not needed any more" in str(future.exception(PATIENCE_S)) and server.process_id() is None


def test_an_error_of_an_unknown_kind(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as a CaptureError; the process is not given up for it."""
    monkeypatch.setattr(module, "PROGRAM", program(tmp_path, ANSWERS_UNKNOWN_KIND))

    def ask() -> None:
        with CaptureServer() as server:
            server.capture(TitanRequest(config_file=job))

    assert within_limit(ask) == "no"


def test_killed_at_many_moments(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty processes, killed at random moments of their first tenth of a second: forty errors."""
    monkeypatch.setattr(module, "PROGRAM", program(tmp_path, WAITS))
    moments = random.Random(0)

    def kill(server: CaptureServer) -> None:
        pid = server.process_id()
        time.sleep(moments.uniform(0, 0.1))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    errors = {within_limit(lambda: capture_twice(job, kill)) for _ in range(40)}
    assert {error.partition(":")[0] for error in errors} == {"the capture process was ended by signal 9 (SIGKILL)"}


def test_killed_while_it_captures(job: str) -> None:
    """The real process is killed beside its captures, which end with it."""
    captures: list[int] = []

    def kill(server: CaptureServer) -> None:
        pid = server.process_id()
        assert pid is not None
        limit = time.monotonic() + PATIENCE_S
        while not captures and time.monotonic() < limit:
            captures.extend(children(pid))
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    assert within_limit(lambda: capture_twice(job, kill)).startswith("the capture process was ended by signal 9")
    assert captures
    limit = time.monotonic() + 10
    while any(map(is_running, captures)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(map(is_running, captures))


def test_a_capture_that_is_killed(job: str) -> None:
    """The process says so, and the next capture runs."""
    with CaptureServer() as server:
        future = server.submit(TitanRequest(config_file=job))
        pid = server.process_id()
        assert pid is not None
        limit = time.monotonic() + PATIENCE_S
        while not (found := children(pid)) and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(found[0], signal.SIGKILL)
        with pytest.raises(
            CaptureError, match=r"^the capture process was ended by signal 9 \(SIGKILL\): Linux does that"
        ):
            future.result(PATIENCE_S)
        assert server.submit(TitanRequest(config_file=job)).result(PATIENCE_S).info.model == "llama3 debugmodel"


def children(process: int) -> list[int]:
    """The processes that this one has forked and that still run; programs that it has started do not count."""
    listed = Path(f"/proc/{process}/task/{process}/children")
    try:
        found = [int(word) for word in listed.read_text().split()]
        program = Path(f"/proc/{process}/cmdline").read_bytes()
        return [child for child in found if Path(f"/proc/{child}/cmdline").read_bytes() == program]
    except FileNotFoundError:
        return []


def is_running(process: int) -> bool:
    """There is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_capture_that_nobody_needs_ends(job: str) -> None:
    """One that runs and one that waits for it fail in one line and leave no process; what is asked for next is captured."""
    with CaptureServer() as server:
        assert server.capture(TitanRequest(config_file=job, checkpointing="full")).events
        process = server.process_id()
        assert process is not None and server.has_room() == (available_processors() > 1)
        futures = [server.submit(TitanRequest(config_file=job, steps=200 + i)) for i in range(4)]
        assert not server.has_room()
        while not children(process):
            time.sleep(0.01)
        for future in futures:
            server.cancel(future)
            assert str(future.exception()) == "the capture is not needed any more"
        server.cancel(futures[0])  # it is over
        assert server.capture(TitanRequest(config_file=job)).events
        assert server.take_lost() is None
        while children(process):
            time.sleep(0.01)


def test_code_beside_the_job(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the current folder never stand for Python's or installed ones; a job's own modules are found there."""
    for name in ("json", "torch", "signal", "torchtitan"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('run by mistake')\n")
    (tmp_path / "mine.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    with CaptureServer() as server:
        request = TitanRequest(config_file=job, overrides=("--experimental.custom_import", "mine"))
        assert server.capture(request).info.model == "llama3 debugmodel"
    assert (tmp_path / "imported").exists()


OWN_MODEL = """
from dataclasses import replace
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

llama3_args["ours"] = replace(llama3_args["debugmodel"], n_layers=1)
register_train_spec("our_llama", get_train_spec("llama3"))
"""


def test_models_of_the_jobs_own_module(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's custom import may register flavors and models, as TorchTitan documents. One that is not there is named."""
    (tmp_path / "our_models.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    own = ("--experimental.custom_import", "our_models")
    with CaptureServer() as server:
        for name in ("llama3", "our_llama"):
            request = TitanRequest(config_file=job, overrides=(*own, "--model.name", name, "--model.flavor", "ours"))
            trace = server.capture(request)
            assert trace.info.model == f"{name} ours"
            assert {m for m in trace.modules if m.startswith("layers.") and m.count(".") == 1} == {"layers.0"}
        with pytest.raises(UsageError, match=r"^experimental\.custom_import = 'nowhere': No module named 'nowhere'"):
            server.capture(TitanRequest(config_file=job, overrides=("--experimental.custom_import", "nowhere")))

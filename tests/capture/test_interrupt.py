"""A command that is interrupted leaves no processes and no temporary files, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pulp
import pytest

from autosac.solvers.backend import leaving_nothing

JOB = """
[model]
name = "llama3"
flavor = "debugmodel"

[activation_checkpoint]
mode = "none"
"""
PATIENCE_S = 120
TAG = "AUTOSAC_TEST_TAG"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


class Command:
    """`autosac` in a process of its own, which has a folder for temporary files; its descendants inherit a tag."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.tag = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        (folder / "job.toml").write_text(JOB)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autosac", arguments[0], str(folder / "job.toml"), "--quiet", *arguments[1:]],
            env={**os.environ, TAG: self.tag, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def family(self) -> set[int]:
        """The process and all its descendants that are still there."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{TAG}={self.tag}".encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
        return found

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait, and fail if the command ends meanwhile."""
        limit = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.01)

    def end_with(self, number: signal.Signals) -> tuple[int, str, str]:
        """Send a signal: exit code, standard output and error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def nobody_left(self) -> bool:
        """All processes have gone, a moment after the first one."""
        limit = time.monotonic() + 10
        while self.family() and time.monotonic() < limit:
            time.sleep(0.05)
        return not self.family()


def simulate(folder: Path) -> Command:
    """A simulation while its step is captured: the command, the capture process and the capture itself."""
    command = Command(folder, "simulate", "--gpu", "h100-sxm-80gb", "--world-size", "8")
    command.wait_until(lambda: len(command.family()) >= 3)
    assert list(command.temporary.iterdir())
    return command


def plan(folder: Path) -> Command:
    """A search for a plan, once the first plan has been solved for and is verified."""
    output = str(folder / "plan.json")
    command = Command(
        folder, "plan", "--gpu", "h100-sxm-80gb", "--world-size", "2", "--budget", "1100MiB", "-o", output
    )
    command.wait_until(lambda: bool(list(command.temporary.glob("autosac-*/plan1.json"))))
    return command


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("started", "number", "code"), [(simulate, signal.SIGINT, 130), (plan, signal.SIGTERM, 143)])
def test_nothing_is_left(tmp_path: Path, started: Callable[[Path], Command], number: signal.Signals, code: int) -> None:
    """One line, the exit code that shells give to a signal, no process, no temporary file, no output."""
    command = started(tmp_path)
    assert command.end_with(number) == (code, "", "autosac: interrupted\n")
    assert command.nobody_left()
    assert list(command.temporary.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "tmp"]


def test_a_command_that_is_killed_leaves_no_processes(tmp_path: Path) -> None:
    """The capture process and its captures end with their input, even if nobody could clean up."""
    command = simulate(tmp_path)
    assert command.end_with(signal.SIGKILL)[0] == -signal.SIGKILL
    assert command.nobody_left()


class Alarm(BaseException):
    """Raised by a timer, wherever the program is."""


def test_an_interrupted_solver_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While PuLP waits for a solver that never ends, an exception ends the solver and removes the problem's files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said, solver = tmp_path / "said", tmp_path / "solver"
    solver.write_text(f'#!/bin/sh\necho "$$ $*" > {said}.new\nmv {said}.new {said}\nexec sleep 100\n')
    solver.chmod(0o755)
    problem = pulp.LpProblem()
    x = pulp.LpVariable("x", 0, 1)
    problem += x
    problem += x >= 0.5

    def ring(*_: object) -> None:
        if not said.exists():
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        backend = pulp.COIN_CMD(path=str(solver), msg=False)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Alarm), leaving_nothing(backend):
            problem.solve(backend)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    number, *words = said.read_text().split()
    assert Path(words[0]).parent.parent == tmp_path and words[0].endswith(".mps")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said", "solver"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)

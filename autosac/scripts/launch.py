"""Starts the process of one rank of a script and brings back its captured step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from autosac.capture.failures import how_it_ended
from autosac.errors import AutosacError, CaptureError, MicrobatchError, UsageError
from autosac.files.temporary import temporary_folder
from autosac.interrupts import interrupts_held
from autosac.scripts.request import OUTCOME, TRACE, ScriptOutcome, ScriptRequest
from autosac.trace import Trace

_WAIT_S = 5.0
MARK = "AUTOSAC_SCRIPT"  # an environment variable of all that a script starts
SAID = "stderr"  # a file in a rank's folder


class ScriptError(AutosacError):
    """The script has ended with an error of its own, which it has shown itself."""

    def __init__(self, exit_code: int) -> None:
        """The script's exit code."""
        super().__init__(f"the script has ended with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """A captured step of a script, and how the script has ended."""

    trace: Trace
    outcome: ScriptOutcome


class RankProcess:
    """A rank of a script that runs. `folder` is its own; what it says on standard error can go to a file there."""

    def __init__(self, request: ScriptRequest, folder: Path, *, silent: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.rank = request.rank
        request.save(folder / "request.json")
        command = [sys.executable, "-m", "autosac.scripts.process", str(folder / "request.json")]
        command += [str(folder), str(os.getpid())]
        self._mark = f"{MARK}={folder}"
        environment = {**os.environ, MARK: str(folder)}
        with interrupts_held():
            if silent:
                with (folder / SAID).open("wb") as errors:
                    self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=errors)
            else:
                self._process = subprocess.Popen(command, env=environment)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Until it has ended. If that is interrupted it has a moment to end by itself."""
        try:
            self._process.wait()
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT_S)  # the terminal has interrupted it, too
            raise

    def end(self) -> None:
        """Nothing that it has started outlives this call."""
        self._process.kill()
        self._process.wait()
        end_marked(self._mark)

    def result(self) -> ScriptResult:
        """After its end. Errors: as `result_in`."""
        return result_in(self.folder, self._process.returncode)

    def trace(self) -> Trace:
        """The step that it has kept."""
        return Trace.load(self.folder / TRACE, trusted=True)

    def said(self) -> str:
        """What it has said on standard error, if it was to be silent."""
        return said_in(self.folder)


def said_in(folder: Path) -> str:
    """What a rank that was to be silent has said on standard error (`SAID`)."""
    path = folder / SAID
    return path.read_text(errors="replace") if path.exists() else ""


def result_in(folder: Path, code: int) -> ScriptResult:
    """What a rank whose process has ended with this exit code has left in its folder.

    ScriptError if the script fails by itself, CaptureError or UsageError if it cannot be captured, MicrobatchError if every
    microbatch has to run.
    """
    outcome_file, trace_file = folder / OUTCOME, folder / TRACE
    if not outcome_file.exists():
        if code == 130:
            raise KeyboardInterrupt
        raise CaptureError(f"the process of the script {how_it_ended(code)}")
    outcome = ScriptOutcome.load(outcome_file)
    if outcome.is_uneven:
        raise MicrobatchError(outcome.error)
    if outcome.error:
        raise (UsageError if outcome.exit_code == UsageError.exit_code else CaptureError)(outcome.error)
    if outcome.exit_code == 130:
        raise KeyboardInterrupt
    if outcome.exit_code or not trace_file.exists():
        raise ScriptError(outcome.exit_code)
    return ScriptResult(trace=Trace.load(trace_file, trusted=True), outcome=outcome)


def run_script(request: ScriptRequest) -> ScriptResult:
    """Run one rank of a script by itself. Errors: as `result_in`."""
    with temporary_folder() as folder:
        process = RankProcess(request, folder / f"rank-{request.rank}")
        try:
            process.wait()
        finally:
            process.end()
        return process.result()


def end_marked(mark: str, *, but: int = 0) -> None:
    """Kill what the script has started and left behind, daemons too: all that have its mark in their environment (Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != but and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)

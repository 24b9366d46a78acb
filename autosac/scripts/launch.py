"""Starts the process of a script and brings back its captured step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from autosac.capture.failures import how_it_ended
from autosac.errors import AutosacError, CaptureError
from autosac.files.temporary import temporary_folder
from autosac.scripts.request import ScriptOutcome, ScriptRequest
from autosac.trace import Trace

_WAIT_S = 5.0
_MARK = "AUTOSAC_SCRIPT"


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


def run_script(request: ScriptRequest) -> ScriptResult:
    """Run one rank of a script.

    ScriptError if the script fails by itself, CaptureError or UsageError if it cannot be captured.
    """
    with temporary_folder() as folder:
        request_file = folder / "request.json"
        request.save(request_file)
        command = [sys.executable, "-m", "autosac.scripts.process", str(request_file), str(folder), str(os.getpid())]
        code = _run(command, str(folder))
        outcome_file, trace_file = folder / "outcome.json", folder / "trace"
        if not outcome_file.exists():
            if code == 130:
                raise KeyboardInterrupt
            raise CaptureError(f"the process of the script {how_it_ended(code)}")
        outcome = ScriptOutcome.load(outcome_file)
        if outcome.error:
            raise CaptureError(outcome.error)
        if outcome.exit_code == 130:
            raise KeyboardInterrupt
        if outcome.exit_code or not trace_file.exists():
            raise ScriptError(outcome.exit_code)
        return ScriptResult(trace=Trace.load(trace_file, trusted=True), outcome=outcome)


def _run(command: list[str], mark: str) -> int:
    """Its exit code (minus the signal that ended it). Nothing that it has started outlives this call."""
    process = subprocess.Popen(command, env={**os.environ, _MARK: mark})
    try:
        return process.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_WAIT_S)  # the terminal has told it, too
        raise
    finally:
        process.kill()
        process.wait()
        _end_descendants(f"{_MARK}={mark}".encode())


def _end_descendants(mark: bytes) -> None:
    """Kill what the script has started and left behind, daemons too: all that have its mark in their environment (Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)

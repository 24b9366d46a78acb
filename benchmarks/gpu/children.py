"""Processes that train one job each: started early, so that they import while another one is measured, and told when to go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import ROOT

_SPARE_S = 20
Result = dict[str, Any]


class Child:
    """``python -m MODULE ARGUMENTS... RESULT`` in a session of its own; it waits for a line before it touches the device."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autosac-")  # removed with the object
        self._file, self._log = Path(self._folder.name) / "result.json", Path(self._folder.name) / "log.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command, str(self._file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=dict(os.environ) | dict(environment or {}),
                start_new_session=True,
            )

    def go(self) -> None:
        """Let it train."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended; `result` says why

    def result(self, longest_s: float) -> Result:
        """What it wrote, with its output as `log` where it failed; it is ended after `longest_s` seconds."""
        try:
            self._process.wait(longest_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return {"error": f"took longer than {longest_s:.0f} s"}
        if self._file.exists():
            found: Result = json.loads(self._file.read_text())
            return found
        return {"error": why_it_ended(self._log.read_text(errors="replace"), self._process.returncode)}


def one_by_one(
    commands: Iterable[Sequence[str]], environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[float], Result]]:
    """For every command a function that lets it train and waits for its result; the next one is being imported by then."""
    waiting: list[Child] = []
    for command in commands:
        waiting.append(Child(command, environment))
        if len(waiting) == 2:
            yield _going(waiting.pop(0))
    for child in waiting:
        yield _going(child)


def _going(child: Child) -> Callable[[float], Result]:
    def go(longest_s: float) -> Result:
        child.go()
        return child.result(longest_s)

    return go


def before(until: float, run: Callable[[float], Result], longest_s: float) -> Result:
    """The result of `run`, which has until then (by `time.monotonic`) and a little longer, but at most `longest_s` seconds."""
    left_s = until - time.monotonic()
    return run(min(longest_s, left_s + _SPARE_S)) if left_s > 0 else {"error": "the time ran out"}


def told() -> None:
    """In the child: wait until it may train."""
    if not sys.stdin.readline():
        sys.exit("the parent has ended")


def why_it_ended(stderr: str, code: int) -> str:
    """Why a run failed, in one line, from what it wrote to standard error."""
    if "OutOfMemoryError" in stderr:
        return "out of memory"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line] or lines
    return said[-1][:300] if said else f"the run ended early with exit code {code}"

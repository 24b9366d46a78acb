"""A process that forks the runs of one script: planning runs it again and again, and half of a small script's time is what
comes before its first line, importing torch and making ``cuda`` the simulated GPU.

``python -m autosac.scripts.template REQUEST.json DESCRIPTOR PARENT``. For each line that it reads, a request's file and a
folder, it forks a process that runs the script (`autosac.scripts.process`), and answers with its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autosac.call_stack import with_room
from autosac.capture import lifeline
from autosac.errors import AutosacError, CaptureError, MicrobatchError
from autosac.files.temporary import temporary_folder
from autosac.interrupts import interrupts_held, take_interrupts
from autosac.scripts import process
from autosac.scripts.launch import MARK, SAID, ScriptError, ScriptResult, end_marked, result_in, said_in
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target

if TYPE_CHECKING:
    from autosac.scripts.clock import SimulatedClock
    from autosac.target import TargetGPU


class Template:
    """Runs ranks of a script, one after the other. It starts with the first of them, and ends with `close` or this object."""

    def __init__(self, *, compiles: bool = False) -> None:
        """`compiles`: the script compiles; its runs begin with a compiler that has compiled before."""
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(temporary_folder())
        self._compiles = compiles
        self._runs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair()
        self.close = weakref.finalize(self, self._stack.close)

    def run(self, request: ScriptRequest) -> ScriptResult:
        """What comes of it. Errors: as `result_in`. What the script says on standard error is shown if it fails."""
        try:
            return self._run(request)
        except MicrobatchError:
            return self._run(replace(request, every_microbatch=True))

    def _run(self, request: ScriptRequest) -> ScriptResult:
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        file = folder / "request.json"
        request.save(file)
        if self._process is None:
            self._process = self._start(file)
        try:
            self._socket.sendall(json.dumps([str(file), str(folder)]).encode() + b"\n")
            answer = self._socket.recv(64)
        except BaseException:
            self.close()
            raise
        if not answer:
            self.close()
            raise CaptureError("the process that runs the script has ended")
        end_marked(self._mark, but=self._process.pid)
        try:
            return result_in(folder, int(answer))
        except ScriptError:
            sys.stderr.write(said_in(folder))
            raise

    @property
    def _mark(self) -> str:
        return f"{MARK}={self._folder}"

    def _start(self, file: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "autosac.scripts.template", str(file), str(self._theirs.fileno())]
        command += [str(os.getpid()), *["compiles"] * self._compiles]
        with interrupts_held():
            started = subprocess.Popen(
                command, env={**os.environ, MARK: str(self._folder)}, pass_fds=(self._theirs.fileno(),)
            )
        self._theirs.close()
        self._stack.callback(_end, started, self._socket, self._mark)
        return started


def _end(started: subprocess.Popen[bytes], connection: socket.socket, mark: str) -> None:
    connection.close()
    started.kill()
    started.wait()
    end_marked(mark)


@with_room
def serve(request_file: str, descriptor: int, *, compiles: bool) -> None:
    """Until the other end is closed."""
    request = ScriptRequest.load(Path(request_file))
    try:
        gpu = script_target(request).gpu
        clock = process.prepare(gpu, request.nproc or 1)
    except AutosacError:  # each run will say so
        clock = None
    else:
        make_ready(gpu, compiles=compiles)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all pages in each fork
    answer(descriptor, clock)


def answer(descriptor: int, clock: SimulatedClock | None) -> None:
    """Fork a run for each line, until the other end is closed. `clock`: that of `process.prepare`."""
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as lines:
        for line in lines:
            file, folder = json.loads(line)
            child = os.fork()
            if not child:
                connection.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(os.open(Path(folder) / SAID, os.O_WRONLY | os.O_CREAT), 2)
                process.main(file, folder, str(os.getppid()), clock)
            connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def make_ready(gpu: TargetGPU, *, compiles: bool) -> None:
    """Import what a run would import before the script's first line, after `process.prepare`; let the compiler compile
    something, if the script will.
    """
    from autosac.capture.patches import installing

    installing.import_patched()
    if compiles:
        _compile(gpu)


def _compile(gpu: TargetGPU) -> None:
    """Let the compiler compile something."""
    from autosac.capture.compiler import inductor
    from autosac.capture.device.device import CUDA
    from autosac.capture.jobs.session import prepare
    from autosac.capture.patches import imports

    prepare(gpu, CUDA)
    imports.import_compiler()
    inductor.make_ready(gpu)


if __name__ == "__main__":
    lifeline.end_with(int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's business
    take_interrupts()
    serve(sys.argv[1], int(sys.argv[2]), compiles=sys.argv[4:] == ["compiles"])

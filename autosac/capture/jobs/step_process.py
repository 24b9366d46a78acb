"""The child processes in which an eager step is captured.

They are forked, so nothing that a step refers to needs to be picklable, and the caller's process keeps its own devices. What
captures find out is handed to later ones (`handover`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch

from autosac.call_stack import with_room
from autosac.capture import lifeline
from autosac.capture.compiler import inductor
from autosac.capture.compiler.programs import Programs
from autosac.capture.failures import how_it_ended
from autosac.capture.jobs import handover
from autosac.capture.jobs.session import prepare
from autosac.capture.patches import imports
from autosac.errors import CaptureError
from autosac.files.temporary import temporary_folder
from autosac.target import TargetGPU

Request = TypeVar("Request")

# How often to look whether a child has ended.
_POLL_S = 0.005


class Files(NamedTuple):
    """What a capture leaves: the trace, or an error, and what later captures can use."""

    trace: Path
    error: Path
    found: Path

    @classmethod
    def below(cls, folder: Path) -> Files:
        """Those in a folder of their own."""
        return cls(folder / "trace", folder / "error", folder / "found")


def run_in_child(action: Callable[[], None]) -> int:
    """Run `action` in a forked child, which does not outlive this call; its exit code (minus the signal that ended it)."""
    child = _fork(action)
    try:
        while (code := _ended(child)) is None:  # a signal just before a call that blocks would wait for its end
            time.sleep(_POLL_S)
    except BaseException:
        _kill(child)
        raise
    return code


class StepProcess(Generic[Request]):
    """A child that forks the captures of one step that compiles something. They begin with a compiler that has compiled a
    graph, and find what it has written for each other, which is most of the time of a small step's capture.

    It stands for one kind of GPU, and sees the caller's objects as they are when it begins. It ends when `close` is called,
    and with this object.
    """

    def __init__(self, capture: Callable[[Files, Request], None], gpu: TargetGPU) -> None:
        """`capture` is called in a process of its own for each request, which has to be picklable."""
        here, there = multiprocessing.Pipe()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())

            def serve() -> None:
                here.close()
                _serve(there, capture, gpu, folder)

            self._pid = _fork(serve)
            there.close()
            self._connection = here
            self.close = weakref.finalize(self, _close, self._pid, here, stack.pop_all())

    def capture(self, files: Files, request: Request) -> int:
        """The exit code of the capture's process. CaptureError if this one has ended, or does so."""
        try:
            self._connection.send((files, request))
            while not self._connection.poll(_POLL_S):
                pass
            code: int = self._connection.recv()
        except (EOFError, OSError):
            why = "has ended"
            with contextlib.suppress(ChildProcessError):  # it was closed
                why = how_it_ended(_waited(self._pid))
            self.close()
            raise CaptureError(f"the capture process {why}") from None
        except BaseException:
            self.close()
            raise
        return code


@with_room
def _serve(connection: Connection, capture: Callable[[Files, Request], None], gpu: TargetGPU, folder: Path) -> None:
    """Until the other end is closed."""
    prepare(gpu)
    torch.set_num_threads(1)
    imports.import_compiler()
    inductor.programs[0] = Programs(folder)
    inductor.make_ready(gpu)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            files, request = connection.recv()
            code = run_in_child(partial(capture, files, request))
            if packed := handover.load(files.found):
                handover.unpack(packed)
            connection.send(code)


def _close(pid: int, connection: Connection, stack: contextlib.ExitStack) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
        _kill(pid)
    stack.close()


def _fork(action: Callable[[], None]) -> int:
    """A child that runs `action` and ends. Its process."""
    sys.stdout.flush()  # or the child would print what waits in the buffers once more
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _run(action, parent)
    return child


def _run(action: Callable[[], None], parent: int) -> NoReturn:
    code = 1
    try:
        lifeline.end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's business
        action()
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def _ended(child: int) -> int | None:
    """Its exit code; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _waited(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

"""The capture process: imports PyTorch and TorchTitan once, then forks one child per capture, as many at once as there are
processors and memory for.

``python -m autosac.capture.worker FD`` reads one JSON request per line from its standard input and writes one JSON answer per
line to the file descriptor FD: ``{"id", "progress"}`` while it works, perhaps ``{"id", "early"}`` with what the captures of
other pipeline stages need, then ``{"id", "done"}`` or ``{"id", "error", "kind"}``.
The first line is the target GPU. A child saves its trace under the name in the request. The process and its
children end with its input.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import select
import signal
import sys
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from autosac.capture import imports
from autosac.capture.failures import explain
from autosac.capture.request import TitanRequest

_SPARE_BYTES = 3 * 2**30  # a capture of a large stage takes half a GiB of its own; those that run still grow


class Worker:
    """See the module's docstring."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.children: dict[int, int] = {}
        self.pending: deque[tuple[dict[str, Any], TitanRequest]] = deque()
        affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
        self.processors = len(affinity(0)) if affinity else os.cpu_count() or 1

    def serve(self) -> None:
        """Answer requests until the input ends; then end the captures that are under way."""
        buffer = b""
        open_input = True
        preloaded = False
        while open_input:
            if select.select([0], [], [], 0.02)[0]:
                chunk = os.read(0, 65536)
                open_input = bool(chunk)
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    request = TitanRequest.from_json(message["request"])
                    if not preloaded:
                        preloaded = self.attempt(message["id"], functools.partial(preload, request))
                    if preloaded:
                        self.pending.append((message, request))
            self.reap()
            while self.pending and self.has_room():
                self.start(*self.pending.popleft())
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def has_room(self) -> bool:
        """Whether another capture may run beside those that do."""
        return not self.children or (len(self.children) < self.processors and available_bytes() > _SPARE_BYTES)

    def attempt(self, identity: int, action: Any) -> bool:
        """Run `action`; answer with its error if it fails."""
        try:
            action()
        except (Exception, SystemExit) as e:
            error = explain(e, "capturing the job")
            self.answer(id=identity, error=str(error), kind=type(error).__name__)
            return False
        return True

    def start(self, message: dict[str, Any], request: TitanRequest) -> None:
        """Fork a child that captures and exits."""
        child = os.fork()
        if child:
            self.children[child] = message["id"]
            return
        identity, code = message["id"], 1
        try:
            if self.attempt(identity, lambda: self.capture(identity, request, message["trace"])):
                self.answer(id=identity, done=True)
            sys.stdout.flush()
            sys.stderr.flush()
            code = 0
        finally:
            os._exit(code)

    def capture(self, identity: int, request: TitanRequest, path: str) -> None:
        """Capture and save."""
        from autosac.capture.titan import capture_titan

        capture_titan(
            request,
            lambda text: self.answer(id=identity, progress=text),
            lambda info: self.answer(id=identity, early=info),
        ).save(path)

    def reap(self) -> None:
        """Answer for children that died without a word."""
        for child, identity in list(self.children.items()):
            finished, status = os.waitpid(child, os.WNOHANG)
            if finished:
                del self.children[child]
                code = os.waitstatus_to_exitcode(status)
                if code:
                    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                    self.answer(id=identity, error=f"the capture process died ({cause})", kind="CaptureError")

    def answer(self, **message: Any) -> None:
        """One line, in one write: children share the descriptor."""
        os.write(self.answers, (json.dumps(message) + "\n").encode())


def available_bytes() -> float:
    """Memory that a new process can have without swapping; infinite where the system does not say (macOS)."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 2**10
    return math.inf


def preload(request: TitanRequest) -> None:
    """Import what every capture of this job needs, after the simulated device has been installed."""
    from autosac.capture import session

    session.prepare(request.gpu)
    from autosac.capture import transforms  # noqa: F401
    from autosac.capture.titan import import_torchtitan, installed_adapter

    with imports.deferred_compilation():
        import_torchtitan()
    installed_adapter()
    gc.freeze()


if __name__ == "__main__":
    if os.environ.get("AUTOSAC_DEBUG") != "1":
        warnings.filterwarnings("ignore")
    gc.disable()  # importing makes no garbage; TorchTitan collects at its own steps
    imports.install()
    with contextlib.suppress(ImportError):  # the first capture says so
        import torch  # noqa: F401 # before the first request comes
    Worker(int(sys.argv[1])).serve()
    os._exit(0)  # unloading PyTorch takes seconds

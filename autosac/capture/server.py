"""The client's side of the capture process (worker.py): start it, send requests, collect traces.

    with CaptureServer() as server:
        traces = [future.result() for future in map(server.submit, requests)]

Leaving the block ends the process with all its children and removes its files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from autosac import errors
from autosac.capture.request import TitanRequest
from autosac.trace import Trace


class CaptureServer:
    """A running capture process. `on_progress` is called with a line of text, from another thread."""

    def __init__(self, *, debug: bool = False, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._debug = debug
        self._on_progress = on_progress
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[Future[Trace], Path]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CaptureServer:
        with contextlib.ExitStack() as undo:  # what interrupts the start leaves nothing either
            folder = tempfile.TemporaryDirectory(prefix="autosac-", ignore_cleanup_errors=True)
            self._folder = Path(undo.enter_context(folder))
            self._start()
            undo.callback(self._end)
            self._reader = threading.Thread(target=self._read, args=(self._answers,), daemon=True)
            self._reader.start()
            self._undo = undo.pop_all()
        return self

    def _start(self) -> None:
        """Start the process."""
        self._answers, write_end = os.pipe()
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # a machine's own GPU stays untouched
            "AUTOSAC_DEBUG": "1" if self._debug else "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),  # torch makes it, used or not
        }
        log = None if self._debug else (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autosac.capture.worker", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=log or sys.stderr,
            stderr=log,
            pass_fds=[write_end],
            env=environment,
            start_new_session=True,
        )
        if log is not None:
            log.close()
        os.close(write_end)

    def submit(self, request: TitanRequest) -> Future[Trace]:
        """Start a capture. The future's exception is an AutosacError if it fails."""
        identity = next(self._ids)
        path = self._folder / f"{identity}.trace"
        future: Future[Trace] = Future()
        future.set_running_or_notify_cancel()  # a capture cannot be cancelled
        with self._lock:
            self._waiting[identity] = (future, path)
        message = json.dumps({"id": identity, "request": request.to_json(), "trace": str(path)})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ended, or left
            self._fail_all()
        return future

    def capture(self, request: TitanRequest) -> Trace:
        """`submit`, and wait."""
        return self.submit(request).result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._undo.close()

    def _end(self) -> None:
        """End the process with all its children, and the thread that reads its answers."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # it ends its children and then itself
        if self._process.returncode != 0:
            with contextlib.suppress(ProcessLookupError):  # of its group nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if hasattr(self, "_reader"):
            self._reader.join()

    def _read(self, answers: int) -> None:
        with os.fdopen(answers, "rb") as lines:
            for line in lines:
                self._handle(json.loads(line))
        self._fail_all()

    def _handle(self, message: dict[str, Any]) -> None:
        if "progress" in message:
            with contextlib.suppress(Exception):  # a broken display shall not lose traces
                self._on_progress(message["progress"])
            return
        with self._lock:
            entry = self._waiting.pop(message["id"], None)
        if entry is None:
            return
        future, path = entry
        if "error" in message:
            future.set_exception(getattr(errors, message["kind"])(message["error"]))
            return
        try:
            future.set_result(Trace.load(path))
        except Exception as e:
            future.set_exception(e)
        path.unlink(missing_ok=True)

    def _fail_all(self) -> None:
        """The process has gone: nothing that is still waited for will come."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future, _ in waiting:
            future.set_exception(errors.CaptureError(f"the capture process ended early{self._last_words()}"))

    def _last_words(self) -> str:
        log = self._folder / "log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f": {lines[-1]}" if lines else ""

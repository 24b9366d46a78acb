"""The client's side of the capture process (worker.py): start it, send requests, collect traces.

    with CaptureServer() as server:
        traces = [future.result() for future in map(server.submit, requests)]

The process is started for the first request whose capture is not kept (store.py). Leaving the block ends the process with
all its children and removes its files.
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
from typing import Any, NamedTuple

from autosac import errors
from autosac.capture.request import TitanRequest
from autosac.capture.store import default_store, fingerprint, surroundings
from autosac.trace import Trace


class _Waiting(NamedTuple):
    """What is being captured: for whom, into which file, and under which key to keep it (None: do not)."""

    future: CaptureFuture
    path: Path
    request: TitanRequest
    key: str | None


class CaptureFuture(Future[Trace]):
    """A capture that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self._early: Future[dict[str, Any]] = Future()
        self.set_running_or_notify_cancel()  # a capture cannot be cancelled

    def early(self) -> dict[str, Any]:
        """What of the trace's info other stages' captures need, as soon as the job tells it; else all of it, in the end.

        "parallelism", "stage_outputs", and "cut" if the job has been cut.
        """
        return self._early.result()

    def announce(self, info: dict[str, Any]) -> None:
        """It is known now."""
        if not self._early.done():
            self._early.set_result(info)

    def set_result(self, result: Trace) -> None:
        """The trace is there."""
        super().set_result(result)
        self.announce(result.info)

    def set_exception(self, exception: BaseException | None) -> None:
        """There will be none."""
        super().set_exception(exception)
        if not self._early.done():
            self._early.set_exception(exception)


class CaptureServer:
    """Answers requests from the user's store or by a capture process. `on_progress` is called from another thread.

    With `debug` everything is captured.
    """

    def __init__(self, *, debug: bool = False, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._debug = debug
        self._on_progress = on_progress
        self._store = None if debug else default_store()
        self._surroundings: dict[str, Any] | None = None
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CaptureServer:
        self._undo = contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="autosac-", ignore_cleanup_errors=True)
        self._folder = Path(self._undo.enter_context(folder))
        return self

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if it is not yet."""
        if self._process is None:
            with contextlib.ExitStack() as undo:  # what interrupts the start leaves nothing either
                self._process = self._start()
                undo.callback(self._end)
                self._reader = threading.Thread(target=self._read, args=(self._answers,), daemon=True)
                self._reader.start()
                self._undo.push(undo.pop_all())
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        self._answers, write_end = os.pipe()
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # a machine's own GPU stays untouched
            "AUTOSAC_DEBUG": "1" if self._debug else os.environ.get("AUTOSAC_DEBUG", "0"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),  # torch makes it, used or not
        }
        log = None if self._debug else (self._folder / "log").open("wb")
        process = subprocess.Popen(
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
        return process

    def submit(self, request: TitanRequest) -> CaptureFuture:
        """Start a capture. The future's exception is an AutosacError if it fails."""
        future = CaptureFuture()
        key = None
        if self._store is not None:
            self._surroundings = self._surroundings or surroundings()
            key = fingerprint(request, self._surroundings)
            if key is not None and (kept := self._store.get(key)) is not None:
                future.set_result(kept)
                return future
        identity = next(self._ids)
        path = self._folder / f"{identity}.trace"
        with self._lock:
            self._waiting[identity] = _Waiting(future, path, request, key)
            process = self._running()
        message = json.dumps({"id": identity, "request": request.to_json(), "trace": str(path)})
        assert process.stdin is not None
        try:
            process.stdin.write(message.encode() + b"\n")
            process.stdin.flush()
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
        assert self._process is not None and self._process.stdin is not None
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
        if "early" in message:
            with self._lock:
                entry = self._waiting.get(message["id"])
            if entry is not None:
                entry.future.announce(message["early"])
            return
        with self._lock:
            entry = self._waiting.pop(message["id"], None)
        if entry is None:
            return
        future, path = entry.future, entry.path
        if "error" in message:
            future.set_exception(getattr(errors, message["kind"])(message["error"]))
            return
        try:
            future.set_result(Trace.load(path))
            self._keep(entry)
        except Exception as e:
            future.set_exception(e)
        path.unlink(missing_ok=True)

    def _keep(self, entry: _Waiting) -> None:
        """Keep a capture, unless a file that it depends on has changed meanwhile."""
        if self._store is None or entry.key is None or fingerprint(entry.request, surroundings()) != entry.key:
            return
        try:
            self._store.put(entry.key, entry.path.read_bytes())
        except OSError as e:
            self._on_progress(f"captures cannot be kept: {e.strerror or e}")

    def _fail_all(self) -> None:
        """The process has gone: nothing that is still waited for will come."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for entry in waiting:
            entry.future.set_exception(errors.CaptureError(f"the capture process ended early{self._last_words()}"))

    def _last_words(self) -> str:
        log = self._folder / "log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f": {lines[-1]}" if lines else ""

"""The client's side of the capture process (worker.py): start it, send requests, collect traces.

    with CaptureServer() as server:
        traces = [future.result() for future in map(server.submit, requests)]

The process is started for the first request whose capture is not kept (store.py). Leaving the block ends the process with
all its children and removes its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from autosac import errors
from autosac.capture.failures import how_it_ended, one_line
from autosac.capture.process.store import default_store, fingerprint, request_fingerprint, surroundings
from autosac.capture.processors import available_processors
from autosac.capture.request import TitanRequest
from autosac.files.temporary import temporary_folder
from autosac.interrupts import signals_later
from autosac.trace import Trace, TraceInfo

PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("start.py")))
_AUTOSAC = Path(__file__).resolve().parents[3]
_PATIENCE_S = 10.0  # a process that has closed its answers is about to end


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
        self._early: Future[TraceInfo] = Future()
        self.set_running_or_notify_cancel()  # a capture cannot be cancelled

    def early(self) -> TraceInfo:
        """What of the trace's info other stages' captures need, as soon as the job tells it; else all of it, in the end.

        That is `parallelism`, `stage_outputs`, and `cut` if the job has been cut.
        """
        return self._early.result()

    def announce(self, info: TraceInfo) -> None:
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

    With `debug`, or without `use_cache`, everything is captured.

    One thread starts the process, reads its answers until there are no more, and then, under the lock, refuses all that is
    still waited for and says that it has ended. `submit` registers a request under the same lock, unless the thread has ended.
    So whatever is registered is answered or refused, at whatever moment the process dies.
    """

    def __init__(
        self, *, debug: bool = False, use_cache: bool = True, on_progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._debug = debug
        self._on_progress = on_progress
        self._store = default_store() if use_cache and not debug else None
        self._surroundings: dict[str, Any] | None = None
        self._undo = contextlib.ExitStack()
        self._folder = Path()  # while the server is entered
        self._asked = 0  # captures, so far
        self._lock = threading.Lock()  # of what is waited for, and of the end
        self._waiting: dict[int, _Waiting] = {}
        self._end: str | None = None  # why the process answers no more
        self._lost: errors.CaptureLostError | None = None  # of the last capture whose process ended
        self._sending = threading.Lock()  # of the requests' pipe, which is made with the thread
        self._requests: BinaryIO | None = None
        self._thread: threading.Thread | None = None
        self._start_is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CaptureServer:
        self._folder = self._undo.enter_context(temporary_folder())
        return self

    def _send(self, message: dict[str, Any]) -> None:
        """Write a request into the process's pipe; with the first one the process is started."""
        with self._sending:
            if self._thread is None:
                with signals_later():
                    read_end, write_end = os.pipe()
                    self._requests = os.fdopen(write_end, "wb")
                    self._thread = threading.Thread(target=self._serve, args=(read_end,), daemon=True)
                    self._undo.callback(self._stop)
                    self._thread.start()
            assert self._requests is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: the thread refuses the request
                self._requests.write(json.dumps(message).encode() + b"\n")
                self._requests.flush()

    def _serve(self, requests: int) -> None:
        """See the class. In a thread, which lives as long as the process: that ends with it (`lifeline`)."""
        reason = ""
        try:
            with os.fdopen(self._start(requests), "rb") as answers:
                for line in answers:
                    self._handle(json.loads(line))
            assert self._process is not None
            reason = f"{how_it_ended(self._process.wait(_PATIENCE_S))}{self._last_words()}"
        except subprocess.TimeoutExpired:
            reason = "no longer answers"
        except Exception as e:
            reason = f"cannot be used: {one_line(e)}"
        finally:
            self._start_is_over.set()
            with self._lock:
                self._end = f"the capture process {reason}"
                waiting, self._waiting = list(self._waiting.values()), {}
            for entry in waiting:
                self._fail(entry.future, errors.CaptureLostError(self._end))

    def _start(self, requests: int) -> int:
        """Start the process, which reads from this descriptor. The descriptor that its answers come from."""
        try:
            answers, write_end = os.pipe()
            try:
                self._process = self._spawn(requests, write_end)
            except BaseException:
                os.close(answers)
                raise
            finally:
                os.close(write_end)
        finally:
            os.close(requests)
        self._start_is_over.set()
        return answers

    def _spawn(self, requests: int, answers: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # a machine's own GPU stays untouched
            "AUTOSAC_DEBUG": "1" if self._debug else os.environ.get("AUTOSAC_DEBUG", "0"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),  # torch makes it, used or not
        }
        with contextlib.ExitStack() as files:
            log = None if self._debug else files.enter_context((self._folder / "log").open("wb"))
            return subprocess.Popen(
                [*PROGRAM, str(answers), str(os.getpid()), *self._folders(), str(_AUTOSAC), str(Path.cwd())],
                stdin=requests,
                stdout=log or sys.stderr,
                stderr=log,
                pass_fds=[answers],
                env=environment,
                start_new_session=True,
            )

    def _folders(self) -> tuple[str, str, str]:
        """For answers and for the compiler's programs, and what these depend on beside their keys."""
        if self._store is not None and self._surroundings is not None:
            with contextlib.suppress(OSError, errors.UsageError):  # then they are kept for this process only
                self._store.make_private()
                return str(self._folder), str(self._store.folder), fingerprint(self._surroundings)
        return str(self._folder), str(self._folder), ""

    def submit(self, request: TitanRequest) -> CaptureFuture:
        """Start a capture. The future's exception is an AutosacError if it fails."""
        future = CaptureFuture()
        key = None
        if self._store is not None:
            self._surroundings = self._surroundings or surroundings()
            key = request_fingerprint(request, self._surroundings)
            if key is not None and (kept := self._store.get(key)) is not None:
                future.set_result(kept)
                return future
        with self._lock:
            identity = self._asked
            self._asked += 1
            path = self._folder / f"{identity}.trace"
            end = self._end
            if end is None:
                self._waiting[identity] = _Waiting(future, path, request, key)
        if end is None:
            self._send({"id": identity, "request": request.to_json(), "trace": str(path)})
        else:
            self._fail(future, errors.CaptureLostError(end))
        return future

    def cancel(self, future: Future[Trace]) -> None:
        """End a capture that nobody needs any more: the future's exception is a CaptureError. Nothing if it is over."""
        with self._lock:
            identity = next((i for i, entry in self._waiting.items() if entry.future is future), None)
            entry = None if identity is None else self._waiting.pop(identity)
        if entry is not None:
            self._send({"cancel": identity})
            entry.future.set_exception(errors.CaptureError("the capture is not needed any more"))

    def has_room(self) -> bool:
        """Whether nothing is being captured and a processor is free for it, beside this process's own."""
        with self._lock:
            return not self._waiting and available_processors() > 1

    def _fail(self, future: CaptureFuture, error: BaseException) -> None:
        if isinstance(error, errors.CaptureLostError):
            self._lost = error
        future.set_exception(error)

    def take_lost(self) -> errors.CaptureLostError | None:
        """The error of the last capture whose process ended before its answer, also if whoever asked for it went on without
        it; None if there is none since the last call.
        """
        lost, self._lost = self._lost, None
        return lost

    def process_id(self) -> int | None:
        """The capture process's id, as soon as it has one; None if no request has needed a process."""
        if self._thread is not None:
            self._start_is_over.wait()
        return None if self._process is None else self._process.pid

    def capture(self, request: TitanRequest) -> Trace:
        """`submit`, and wait."""
        return self.submit(request).result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._lock:  # a thread that still puts captures together may ask for another one
            self._end = self._end or "the capture process is not needed any more"
        self._undo.close()

    def _stop(self) -> None:
        """End the process with all its children, and the thread that reads its answers."""
        assert self._requests is not None and self._thread is not None
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._start_is_over.wait()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2)  # it ends its children and then itself
            if self._process.returncode != 0:
                with contextlib.suppress(ProcessLookupError):  # of its group nobody is left
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._thread.join()

    def _handle(self, message: dict[str, Any]) -> None:
        if "file" in message:
            message = json.loads(Path(message["file"]).read_bytes())
        if "progress" in message:
            with self._lock:
                waiting = len(self._waiting)
            self._say(f"{message['progress']} ({self._asked - waiting} of {self._asked} captures done)")
            return
        if "early" in message:
            with self._lock:
                entry = self._waiting.get(message["id"])
            if entry is not None:
                entry.future.announce(TraceInfo.of(message["early"]))
            return
        with self._lock:
            entry = self._waiting.pop(message["id"], None)
        if entry is None:
            return
        if "error" in message:
            kind = getattr(errors, message["kind"], errors.CaptureError)
            self._fail(entry.future, kind(message["error"]))
            return
        try:
            trace = Trace.load(entry.path, trusted=True)
        except Exception as e:
            entry.future.set_exception(e)
            return
        entry.future.set_result(trace)
        self._keep(entry)
        entry.path.unlink(missing_ok=True)

    def _keep(self, entry: _Waiting) -> None:
        if self._store is None or entry.key is None:
            return
        try:
            self._store.put_unless_changed(entry.key, entry.request, entry.path.read_bytes())
        except (OSError, errors.UsageError) as e:
            self._say(f"captures cannot be cached: {getattr(e, 'strerror', None) or e}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a broken display shall not lose traces
            self._on_progress(text)

    def _last_words(self) -> str:
        log = self._folder / "log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f": {lines[-1]}" if lines else ""

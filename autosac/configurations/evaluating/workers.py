"""Where evaluations run: processes of this machine, a thread of this process, or a Ray cluster.

Each worker keeps a capture process for each kind of GPU (`Servers`) for all its tasks. Workers end with the search, however
that ends: local ones are bound to the life of the process that started them, Ray's actors to the driver.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

from autosac.capture import lifeline
from autosac.capture.process.server import CaptureServer
from autosac.configurations.evaluating.evaluations import Task, checked
from autosac.errors import AutosacError, UsageError
from autosac.target import TargetGPU

_CONNECT_S = 5.0  # within which a Ray cluster has to answer


class Servers:
    """The capture processes of a worker (`autosac.capture.process.server`): one simulates one kind of GPU. One that has ended
    is started anew for the next task. Another thread may `close` them under a task, which fails with WorkerLost then.
    """

    def __init__(self, *, use_cache: bool = True) -> None:
        self._use_cache = use_cache
        self._of: dict[TargetGPU | None, tuple[contextlib.ExitStack, CaptureServer]] = {}
        self._closed = False

    def run(self, task: Task) -> dict[str, Any]:
        """Do a task. WorkerLost if a capture's process ended under it: what the answer lacks is not the job's doing."""
        server = self._server(task.gpu)
        try:
            answer = checked(task.run(server))
        except AutosacError:
            self._check_lost(task.gpu, server)
            raise
        self._check_lost(task.gpu, server)
        return answer

    def _server(self, gpu: TargetGPU | None) -> CaptureServer:
        if gpu not in self._of and not self._closed:
            undo = contextlib.ExitStack()
            self._of[gpu] = undo, undo.enter_context(CaptureServer(use_cache=self._use_cache))
        if self._closed:
            self.close()  # what may just have been started
            raise WorkerLost("the search has ended")
        return self._of[gpu][1]

    def _check_lost(self, gpu: TargetGPU | None, server: CaptureServer) -> None:
        lost = server.take_lost()
        if lost is not None:
            undo, _ = self._of.pop(gpu, (contextlib.ExitStack(), server))
            undo.close()
            raise WorkerLost(str(lost))

    def close(self) -> None:
        """End the processes, for good."""
        self._closed = True
        while self._of:
            _, (undo, _) = self._of.popitem()
            undo.close()


class Workers(Protocol):
    """Who does the work. `count`: how many tasks run at once."""

    count: int

    def submit(self, task: Task) -> Future[dict[str, Any]]:
        """Start a task. The future fails with `WorkerLost` if its worker dies."""


class WorkerLost(Exception):
    """A worker, or what captures for it, has died: its task may be tried again."""


# ---- local processes ------------------------------------------------------------------------------------------------

_servers: list[Servers] = []


def _begin(parent: int, use_cache: bool) -> None:
    """In a new worker process: end with the parent; leave Ctrl-C to it; end cleanly when it says so."""
    lifeline.end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _servers.append(Servers(use_cache=use_cache))
    multiprocessing.util.Finalize(None, _servers[0].close, exitpriority=100)


def _run(task: Task) -> dict[str, Any]:
    return _servers[0].run(task)


def check_not_starting() -> None:
    """End a process that becomes a worker, with the reason, if its search is that of the script which it imports for it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(
            'autosac: a worker imports the script that searches: put the search under if __name__ == "__main__": there, or '
            "give workers=0"
        )


class LocalWorkers:
    """Processes of this machine. One that is killed takes what runs beside it along; all are started anew."""

    def __init__(self, count: int, *, use_cache: bool = True) -> None:
        self.count = count
        self._use_cache = use_cache
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, task: Task) -> Future[dict[str, Any]]:
        """Called by the thread that lives as long as the search: workers end with the thread that started them."""
        for _ in range(2):
            if self._executor is None:
                self._executor = ProcessPoolExecutor(
                    self.count,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_begin,
                    initargs=(os.getpid(), self._use_cache),
                )
            try:
                return _translated(self._executor.submit(_run, task), BrokenProcessPool)
            except BrokenProcessPool:
                self.close()
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(WorkerLost("the processes that evaluate end at once"))
        return failed

    def close(self) -> None:
        """End all workers, what they are doing with them."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _translated(inner: Future[Any], lost: type[BaseException] | tuple[type[BaseException], ...]) -> Future[Any]:
    """The same future, which fails with WorkerLost where `inner` fails with `lost`."""
    outer: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        if done.cancelled():
            outer.set_exception(WorkerLost("it was cancelled"))
            return
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(WorkerLost(str(error)) if isinstance(error, lost) else error)

    inner.add_done_callback(pass_on)
    return outer


# ---- this process ---------------------------------------------------------------------------------------------------


class ThreadWorker:
    """One thread of this process: for programs that cannot be started a second time."""

    count = 1

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._executor = ThreadPoolExecutor(1)

    def submit(self, task: Task) -> Future[dict[str, Any]]:
        """See `Workers`."""
        return self._executor.submit(self._servers.run, task)

    def close(self) -> None:
        """Wait for no task that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)


# ---- Ray ------------------------------------------------------------------------------------------------------------


class _Evaluator:
    """A Ray actor: one task at a time."""

    def __init__(self, use_cache: bool) -> None:
        self._servers = Servers(use_cache=use_cache)

    def run(self, task: Task) -> dict[str, Any]:
        """Do a task."""
        return self._servers.run(task)

    def close(self) -> None:
        """End the capture processes."""
        self._servers.close()


def _check_answers(address: str) -> None:
    """OSError if nobody listens where a cluster should be: Ray itself would ask for minutes."""
    if address == "auto":
        noted = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"  # by ray start
        address = os.environ.get("RAY_ADDRESS") or (noted.read_text().strip() if noted.is_file() else "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # Ray says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as e:
        raise ConnectionError(f"{address} does not answer ({getattr(e, 'strerror', None) or e})") from e


@contextlib.contextmanager
def _kept_handler() -> Iterator[None]:
    """What SIGTERM does stays the program's decision: Ray's handler would end it without a word of the best so far."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


class RayWorkers:
    """One actor for every CPU of a Ray cluster, up to `most`; those that die are replaced."""

    def __init__(self, address: str, *, most: int = 256, use_cache: bool = True) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--ray needs Ray: pip install 'autosac[ray]'") from None
        self._ray: Any = ray
        self._connected = not ray.is_initialized()
        try:
            if self._connected:
                _check_answers(address)
                with _kept_handler():
                    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ray.exceptions.AuthenticationError as e:
            raise UsageError(
                f"the Ray cluster at {address!r} and this process do not agree about a token: set RAY_AUTH_MODE=token "
                "(with a token) or RAY_AUTH_MODE=disabled here, as it was where the cluster was started"
            ) from e
        except (OSError, ValueError, RuntimeError) as e:
            raise UsageError(
                f"no Ray cluster at {address!r}: {str(e).splitlines()[0]} (ray start --head starts one; one that asks for a "
                "token needs RAY_AUTH_MODE=token here)"
            ) from e
        self.count = max(1, min(most, int(ray.cluster_resources().get("CPU", 1))))
        self._lost = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
        self._actor = ray.remote(num_cpus=1)(_Evaluator)
        self._use_cache = use_cache
        self._idle: list[Any] = [None] * self.count  # None: to be made
        self._all: list[Any] = []
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Future[dict[str, Any]]:
        """See `Workers`. There is an idle actor: no more than `count` tasks run at once."""
        with self._lock:
            actor = self._idle.pop()
            if actor is None:
                actor = self._actor.remote(self._use_cache)
                self._all.append(actor)
        inner = actor.run.remote(task).future()
        inner.add_done_callback(lambda done: self._free(actor, done))
        return _translated(inner, self._lost)

    def _free(self, actor: Any, done: Future[Any]) -> None:
        with self._lock:
            self._idle.append(None if isinstance(done.exception(), self._lost) else actor)

    def close(self) -> None:
        """End the actors and leave the cluster as it was."""
        for actor in self._all:
            with contextlib.suppress(Exception):
                if actor in self._idle:
                    self._ray.get(actor.close.remote(), timeout=5)
                self._ray.kill(actor)
        if self._connected:
            self._ray.shutdown()


@contextlib.contextmanager
def workers_of(count: int, ray_address: str | None, *, use_cache: bool) -> Iterator[Workers]:
    """Workers, ended with the block. `count` 0: a thread of this process."""
    if ray_address is not None:
        remote = RayWorkers(ray_address, use_cache=use_cache)
        with contextlib.closing(remote):
            yield remote
    elif count == 0:
        servers = Servers(use_cache=use_cache)
        with contextlib.closing(servers), contextlib.closing(ThreadWorker(servers)) as thread:
            yield thread
    else:
        with contextlib.closing(LocalWorkers(count, use_cache=use_cache)) as local:
            yield local

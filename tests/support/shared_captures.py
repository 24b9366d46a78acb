"""Capture processes that several tests share: starting one takes as long as a small job's captures.

Test modules import this as ``shared_captures`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process.server import CaptureFuture, CaptureServer
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureLostError
from autosac.simulation import Target
from autosac.target import TargetGPU
from autosac.titan.settings import asks_to_compile
from autosac.trace import Trace

USUAL = Target.of("h100-sxm-80gb", 1).gpu
_MOST = 4  # processes at a time: each holds a third of a GB
_USERS = (
    "autosac.jobs.tasks",
    "autosac.jobs.levers",
    "autosac.jobs.batches",
    "autosac.configurations.evaluating.workers",
)


class Pool:
    """Processes by what they are for: a GPU, what is made ready for a job, a folder, a store of captures."""

    def __init__(self) -> None:
        self._servers: dict[Any, CaptureServer] = {}
        self._listener: list[Callable[[str], None]] = [lambda _: None]

    def submit(
        self, request: TitanRequest, options: dict[str, bool], cache: str, listener: Callable[[str], None]
    ) -> CaptureFuture:
        """Start a capture. A process that has ended is not asked again. `cache` is the folder of captures, or "off"."""
        self._listener[0] = listener
        compiles, words = _made_ready(request)
        place = (*sorted(options.items()), cache, Path.cwd(), request.gpu, words)
        # One that can compile serves jobs that do not, too.
        key = (*place, True) if compiles or (*place, True) in self._servers else (*place, False)
        server = self._servers.pop(key, None)
        while server is None and len(self._servers) >= _MOST:
            self._servers.pop(next(iter(self._servers))).__exit__(None, None, None)
        if server is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AUTOSAC_CACHE", cache)
                server = CaptureServer(**options, on_progress=lambda text: self._listener[0](text)).__enter__()
        self._servers[key] = server  # the last that was used
        future = server.submit(request)
        future.add_done_callback(lambda done: self._done(key, done.exception()))
        return future

    def _done(self, key: Any, error: BaseException | None) -> None:
        if str(error).startswith("the capture process") and key in self._servers:
            self._servers[object()] = self._servers.pop(key)  # ends with the others

    def cancel(self, future: Future[Trace]) -> None:
        """See `CaptureServer.cancel`: the process that captures it does so, for the others it is none of theirs."""
        for server in self._servers.values():
            server.cancel(future)

    def has_room(self) -> bool:
        """Whether none of them captures anything, and a processor is free for it."""
        return all(server.has_room() for server in self._servers.values())

    def close(self) -> None:
        """End them all."""
        while self._servers:
            self._servers.popitem()[1].__exit__(None, None, None)


def _made_ready(request: TitanRequest) -> tuple[bool, tuple[str, ...]]:
    """What a process makes ready for its first request: the compiler, if it is used; modules of the job's own."""
    file = Path(request.config_file) if request.config_file else None
    lines = file.read_text(errors="replace").splitlines() if file is not None and file.is_file() else []
    words = [*lines, *request.overrides]
    compiles = _compiles_model(request) or any("flex_attn" in word for word in words)
    return compiles, tuple(word for word in words if "custom" in word or "import" in word)


def _compiles_model(request: TitanRequest) -> bool:
    """A process that does not find this of its first request never makes the compiler ready."""
    words = request.overrides
    asked = asks_to_compile(request.config_file, words)
    if asked is None:  # the arguments decide
        return "--compile.enable" in words and ("--compile.components" not in words or "model" in words)
    return asked


class SharedServer(CaptureServer):
    """Captures in the processes of a pool, and has none of its own. `cache` is where captures are kept; without it, where
    AUTOSAC_CACHE says when one is asked for.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        debug: bool = False,
        use_cache: bool = True,
        cache: Path | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._pool, self._options, self._listener = pool, {"debug": debug, "use_cache": use_cache}, on_progress
        self._cache = cache
        self._lost = None

    def __enter__(self) -> SharedServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, request: TitanRequest) -> CaptureFuture:
        """See `CaptureServer.submit`. A request that names no GPU gets the one that most tests name: a process serves one kind
        of GPU only.
        """
        if request.gpu == TargetGPU():
            request = replace(request, gpu=USUAL)
        cache = os.environ["AUTOSAC_CACHE"] if self._cache is None else str(self._cache)
        future = self._pool.submit(request, self._options, cache, self._listener)
        future.add_done_callback(lambda done: self._note(done.exception()))
        return future

    def cancel(self, future: Future[Trace]) -> None:
        """See `CaptureServer.cancel`."""
        self._pool.cancel(future)

    def has_room(self) -> bool:
        """See `CaptureServer.has_room`."""
        return self._pool.has_room()

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, CaptureLostError):
            self._lost = error


def share(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process capture in the pool's processes from now on."""
    for module in _USERS:
        monkeypatch.setattr(f"{module}.CaptureServer", lambda **options: SharedServer(pool, **options))

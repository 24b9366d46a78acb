"""The clock that a script sees: it stands still but for simulated time.

`time.time`, `perf_counter` and `monotonic`, and what counts in nanoseconds, answer with the moment at which the script began
plus the simulated time, and `time.sleep` in the main thread adds to it. Every reading is a microsecond later than the one
before, so that a loop which waits for a deadline ends. Threads that the script or its libraries start beside the main one (of
progress bars, of loggers) are told what that was told last: the step goes on being recorded while they ask. Modules that wait
for other threads and processes keep the real time (`_WAITING`). The functions are replaced before torch is imported, and with
it whatever takes them by name (tqdm); until `start` they tell the real time.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_READING_S = 1e-6
_LONGEST_SLEEP_S = 0.01
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_WAITING = (
    "asyncio",
    "concurrent.",
    "multiprocessing",
    "queue",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "torch.utils.data",
)


class SimulatedClock:
    """Replaces the functions of the module `time` in this process."""

    def __init__(self) -> None:
        self._elapsed_s: Callable[[], float] | None = None
        self._began_s: dict[str, float] = {}
        self._slept_s = 0.0
        self._readings = itertools.count()
        self._inside = threading.local()
        self._last_s = 0.0
        self._real: dict[str, Callable[..., Any]] = {}
        self._readers: list[Any] = []
        for name in _CLOCKS:
            self._replace(name)
        self._real["sleep"] = time.sleep
        vars(time)["sleep"] = self._sleep

    def start(self, elapsed_s: Callable[[], float]) -> None:
        """From now on time is this moment plus the simulated time, in seconds, that `elapsed_s` tells. Compiled code breaks
        off to read it, as for any clock.
        """
        from autosac.capture.patches.untraced import leave_untraced

        for function in (*self._readers, SimulatedClock.now_s, SimulatedClock._sleep):
            leave_untraced(function)
        self._began_s = {name: self._real[name]() for name in _CLOCKS}
        self._elapsed_s = elapsed_s

    def _replace(self, name: str) -> None:
        real, real_ns = getattr(time, name), getattr(time, f"{name}_ns")
        self._real[name] = real

        def read() -> float:
            return self._began_s[name] + self.now_s() if self._is_asked() else real()

        def read_ns() -> int:
            return round((self._began_s[name] + self.now_s()) * 1e9) if self._is_asked() else real_ns()

        read.__name__, read_ns.__name__ = name, f"{name}_ns"
        setattr(time, name, read)
        setattr(time, f"{name}_ns", read_ns)
        self._readers += [read, read_ns]

    def _is_asked(self) -> bool:
        """Whether the reading, two frames up, is for the simulated time: not while that is being worked out."""
        if self._elapsed_s is None or getattr(self._inside, "busy", False):
            return False
        return not str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_WAITING)

    def now_s(self) -> float:
        """Simulated seconds since the start; never less than before."""
        assert self._elapsed_s is not None
        if _is_beside():
            self._last_s += _READING_S
            return self._last_s
        self._inside.busy = True
        try:
            now_s = self._elapsed_s() + self._slept_s + next(self._readings) * _READING_S
        finally:
            self._inside.busy = False
        self._last_s = max(self._last_s, now_s)
        return self._last_s

    def _sleep(self, seconds: float) -> None:
        if self._elapsed_s is not None and threading.current_thread() is threading.main_thread() and seconds > 0:
            self._slept_s += seconds
            seconds = min(seconds, _LONGEST_SLEEP_S)  # something may be waited for
        self._real["sleep"](seconds)


def _is_beside() -> bool:
    """Whether this thread was started by Python beside the main one. Autograd's, in which hooks run, were not."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)

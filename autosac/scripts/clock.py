"""The clock that a script sees: it stands still but for simulated time.

`time.time`, `perf_counter` and `monotonic`, and what counts in nanoseconds, answer with the moment at which the process
started plus the simulated time, and `time.sleep` in the main thread adds to it. Every reading is a microsecond later than the
one before, so that a loop which waits for a deadline ends. Code that took the functions before the script began (the standard
library's queues and threads) keeps the real ones.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

_READING_S = 1e-6
_LONGEST_SLEEP_S = 0.01


class SimulatedClock:
    """`elapsed_s` tells the simulated time since the start, in seconds; `real` are the functions that were replaced."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._slept_s = 0.0
        self._readings = itertools.count()
        self._inside = threading.local()
        self._last_s = 0.0
        self.real: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Replace the functions of the module `time` in this process."""
        for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time"):
            self._replace(name, getattr(time, name)())
        self.real["sleep"] = time.sleep
        time.sleep = self._sleep

    def _replace(self, name: str, start_s: float) -> None:
        real, real_ns = getattr(time, name), getattr(time, f"{name}_ns")
        self.real[name] = real

        def read() -> float:
            return start_s + self.now_s()

        def read_ns() -> int:
            return round((start_s + self.now_s()) * 1e9)

        read.__name__, read_ns.__name__ = name, f"{name}_ns"
        setattr(time, name, self._unless_inside(read, real))
        setattr(time, f"{name}_ns", self._unless_inside(read_ns, real_ns))

    def _unless_inside(self, simulated: Callable[[], Any], real: Callable[[], Any]) -> Callable[[], Any]:
        """Whoever works out the simulated time sees the real one."""

        def read() -> Any:
            if getattr(self._inside, "busy", False):
                return real()
            self._inside.busy = True
            try:
                return simulated()
            finally:
                self._inside.busy = False

        return read

    def now_s(self) -> float:
        """Simulated seconds since the start; never less than before."""
        now_s = self._elapsed_s() + self._slept_s + next(self._readings) * _READING_S
        self._last_s = max(self._last_s, now_s)
        return self._last_s

    def _sleep(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread() and seconds > 0:
            self._slept_s += seconds
            seconds = min(seconds, _LONGEST_SLEEP_S)  # something may be waited for
        self.real["sleep"](seconds)

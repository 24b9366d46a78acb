"""The clock that a script sees, without a script."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from types import FunctionType

import pytest

from autosac.scripts.clock import SimulatedClock

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedClock]:
    """A clock in the place of this process's, which is put back."""
    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS), "sleep"):
        monkeypatch.setattr(time, name, getattr(time, name))
    yield SimulatedClock()


def test_until_it_starts_time_is_real(clock: SimulatedClock) -> None:
    """Readings are none of ours, and sleeping takes its time."""
    before = time.perf_counter()
    time.sleep(0.02)
    assert time.perf_counter() - before >= 0.02 and time.perf_counter.__name__ == "perf_counter"
    assert abs(time.time_ns() / 1e9 - time.time()) < 10 and time.monotonic_ns.__name__ == "monotonic_ns"


@pytest.mark.parametrize("name", CLOCKS)
def test_simulated_time_goes_on(clock: SimulatedClock, name: str) -> None:
    """By what is simulated and by a microsecond for each reading; in nanoseconds, too; never back."""
    elapsed = [1.0]
    clock.start(lambda: elapsed[0])
    begin = getattr(time, name)()
    elapsed[0] = 3.5
    assert getattr(time, name)() - begin == pytest.approx(2.500001, abs=1e-7)
    assert getattr(time, f"{name}_ns")() - begin * 1e9 == pytest.approx(2.500002e9, abs=1e3)
    elapsed[0] = 0.0
    assert getattr(time, name)() - begin == pytest.approx(2.500002, abs=1e-7)
    assert clock.now_s() == pytest.approx(3.500002, abs=1e-7)


def test_sleeping_takes_simulated_time(clock: SimulatedClock) -> None:
    """In the main thread; a thread that sleeps waits for something real."""
    clock.start(lambda: 0.0)
    begin = time.monotonic()
    time.sleep(100.0)
    assert time.monotonic() - begin == pytest.approx(100.000001, abs=1e-6)
    thread = threading.Thread(target=lambda: time.sleep(0.001))
    thread.start()
    thread.join()
    time.sleep(0)
    assert time.monotonic() - begin == pytest.approx(100.000002, abs=1e-6)


def test_threads_beside_the_main_one_are_told_what_that_was_told(clock: SimulatedClock) -> None:
    """A progress bar's thread asks while the step is recorded: nothing is worked out for it, and its reading counts, too."""
    elapsed = [1.0]
    clock.start(lambda: elapsed[0])
    begin, told = time.monotonic(), []
    elapsed[0] = 3.0
    thread = threading.Thread(target=lambda: told.append(time.monotonic()))
    thread.start()
    thread.join()
    assert told[0] - begin == pytest.approx(1e-6, abs=1e-7)
    assert time.monotonic() - begin == pytest.approx(2.000001, abs=1e-7)


def test_autograds_threads_are_told_the_time(clock: SimulatedClock) -> None:
    """Hooks run in threads that Python did not start."""
    elapsed, told, done = [1.0], [], threading.Event()
    clock.start(lambda: elapsed[0])
    begin = time.monotonic()
    elapsed[0] = 3.0
    _thread.start_new_thread(lambda: (told.append(time.monotonic()), done.set()), ())
    assert done.wait(10)
    assert told[0] - begin == pytest.approx(2.000001, abs=1e-7)


def test_who_waits_for_others_has_the_real_time(clock: SimulatedClock) -> None:
    """Modules such as queue and subprocess, by the name of who asks."""
    real = time.perf_counter()
    clock.start(lambda: 1e6)
    for name, simulated in (("queue", False), ("subprocess", False), ("concurrent.futures", False), ("train", True)):
        ask = FunctionType((lambda: time.perf_counter()).__code__, {"time": time, "__name__": name})
        assert (ask() - real > 1e5) == simulated


def test_what_works_out_the_time_has_the_real_one(clock: SimulatedClock) -> None:
    """Or it would ask itself."""
    seen: list[float] = []
    real = time.time()

    def elapsed() -> float:
        seen.append(time.time())
        return 1e6

    clock.start(elapsed)
    assert time.time() - real > 1e5
    assert len(seen) == 1 and seen[0] - real < 1e5

"""Times calls on a CPU or a CUDA device, and the memory of a CPU.

On a CPU with one thread the clock is the thread's CPU time: other processes then disturb a measurement through caches and
memory only. With several threads it is wall time. On CUDA, calls are queued behind a kernel that only waits for as long as
the host needs to launch them, between two events, so that the time between the events is the device's alone.

Each call is run in blocks; the result is the median over blocks of a block's mean, and its relative standard error. What
only the replay costs, the call through `torch.ops`, is taken off on a CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from autosac.estimator.calibration.calls import ReplayedCall
from autosac.estimator.calibration.host_memory import HostMemory

_BLOCK_S, _BLOCKS, _LIMIT_S = 2.5e-3, 7, 0.4
_WAIT_CYCLES_PER_S = 3e9  # no GPU's clock is faster: the wait is as long as it has to be, or longer
_LAUNCH_MARGIN, _LONGEST_WAIT_S = 1.5, 0.1
_MOST_LAUNCHES = 200
_SPIN_UP_S = 0.5
_LEAST_MS = 1e-4


class Timed(NamedTuple):
    """Milliseconds of one call and their relative standard error."""

    ms: float
    rel_std: float


def cpu_clock() -> Callable[[], float]:
    """Seconds by the clock of the module's docstring, for PyTorch's present number of threads."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, so that no call is timed with page faults in it. Nothing on other systems."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(-4, 0)  # M_MMAP_MAX
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def time_call(call: ReplayedCall, device: torch.device) -> Timed:
    """Time one call. What the call raises is raised."""
    with torch.no_grad():
        if device.type == "cuda":
            return _time_on_cuda(call)
        timed = time_on_cpu(call.run)
    return Timed(max(timed.ms - call_overhead_ms(), _LEAST_MS), timed.rel_std)


@cache
def call_overhead_ms() -> float:
    """What calling an operator through `torch.ops` costs more than calling it as a model does."""
    x = torch.ones(16)
    pairs = ((torch.ops.aten.add.Tensor, torch.add), (torch.ops.aten.mul.Tensor, torch.mul))
    differences = [
        time_on_cpu(lambda f=slow: f(x, x)).ms - time_on_cpu(lambda f=fast: f(x, x)).ms  # type: ignore[misc]
        for _ in range(5)
        for slow, fast in pairs
    ]
    return max(statistics.median(differences), 0.0)


def time_on_cpu(run: Callable[[], Any]) -> Timed:
    """Median over blocks of repeated runs; long calls get fewer blocks, at least three."""
    clock = cpu_clock()
    run()
    begin = clock()
    run()
    once = max(clock() - begin, 1e-7)
    repeats = max(1, min(int(_BLOCK_S / once), 2000))
    blocks = max(3, min(_BLOCKS, int(_LIMIT_S / (once * repeats))))
    times = []
    for _ in range(blocks):
        begin = clock()
        for _ in range(repeats):
            run()
        times.append((clock() - begin) / repeats * 1e3)
    return _summary(times)


def _summary(times_ms: list[float]) -> Timed:
    middle = max(statistics.median(times_ms), 1e-6)
    spread = 1.4826 * statistics.median(abs(t - middle) for t in times_ms)
    return Timed(middle, spread / middle / len(times_ms) ** 0.5)


def _time_on_cuda(call: ReplayedCall) -> Timed:
    for _ in range(2):
        call.run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call.run()
    launch_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    once = max(time.perf_counter() - begin, 5e-6)
    repeats = max(1, min(int(_BLOCK_S / once), _MOST_LAUNCHES))
    wait_s = min(_LAUNCH_MARGIN * launch_s * repeats, _LONGEST_WAIT_S)
    times = []
    for _ in range(max(3, min(_BLOCKS, int(_LIMIT_S / (once * repeats))))):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(wait_s * _WAIT_CYCLES_PER_S))
        first.record()
        for _ in range(repeats):
            call.run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / repeats)
    return _summary(times)


def spin_up(device: torch.device) -> None:
    """Work until a GPU that was idle has its clocks up. Nothing on a CPU."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    end = time.perf_counter() + _SPIN_UP_S
    while time.perf_counter() < end:
        torch.mm(a, a)
        torch.cuda.synchronize()


# ---- the memory of a CPU ---------------------------------------------------------------------------------------


def measure_host_memory(largest_bytes: int = 2**28) -> HostMemory:
    """Cost of a first touch, and the cost of reading by the size of what is read in turn."""
    sizes = [2**n for n in range(16, largest_bytes.bit_length())]
    return HostMemory(
        fault_ns_per_byte=_fault_ns_per_byte(min(2**26, largest_bytes)),
        reuse_bytes=tuple(float(size) for size in sizes),
        read_ns_per_byte=_monotone([_read_ns_per_byte(size) for size in sizes]),
    )


def _monotone(values: list[float]) -> tuple[float, ...]:
    """The closest values that never fall: more distance is never cheaper."""
    from sklearn.isotonic import isotonic_regression

    return tuple(float(v) for v in isotonic_regression(values))


def _fault_ns_per_byte(nbytes: int) -> float:
    """First touch minus second touch of a mapping, a byte for each page that the kernel has to find and clear."""
    clock = cpu_clock()
    times = []
    for _ in range(5):
        with mmap.mmap(-1, nbytes) as region:
            pages = torch.frombuffer(region, dtype=torch.uint8)
            laps = []
            for _ in range(2):
                begin = clock()
                pages.fill_(1)
                laps.append(clock() - begin)
            del pages
        times.append(max(laps[0] - laps[1], 0.0))
    return statistics.median(times) * 1e9 / nbytes


def _read_ns_per_byte(nbytes: int) -> float:
    buffer = torch.ones(nbytes // 4)
    return time_on_cpu(buffer.sum).ms * 1e6 / nbytes

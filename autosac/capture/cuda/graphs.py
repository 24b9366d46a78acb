"""`torch.cuda.CUDAGraph` and `torch.cuda.MemPool` of the simulated GPU.

`torch.cuda.graph` and `make_graphed_callables` are PyTorch's own. While a graph is captured the host may not wait for the
device, as CUDA has it. What is captured is kept by the recorder (`capture.record.graphs`), which hears of each launch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from autosac.capture.device import device as simulated
from autosac.capture.device.device import Pool
from autosac.trace import Event

_pools = itertools.count(1)


class GraphListener(Protocol):
    """Who records graphs, and finds the steps that their launches are."""

    def capture_begun(self, pool: Pool) -> None:
        """A graph is captured from now on."""

    def capture_ended(self) -> tuple[Any, tuple[Event, ...]]:
        """It has been: what its launches mean for steps, and what the device shall do."""

    def graph_launched(self, meaning: Any, captured: tuple[Event, ...], first: int, stream: int) -> None:
        """What was captured on the stream `first` is launched on `stream`."""

    def pool_entered(self, pool: Pool | None) -> Pool | None:
        """Memory comes from this pool from now on, or (None) from none of its own. Returns where it came from until now."""


class _Nobody:
    def capture_begun(self, pool: Pool) -> None:
        pass

    def capture_ended(self) -> tuple[Any, tuple[Event, ...]]:
        return None, ()

    def graph_launched(self, meaning: Any, captured: tuple[Event, ...], first: int, stream: int) -> None:
        pass

    def pool_entered(self, pool: Pool | None) -> Pool | None:
        return None


_listener: list[GraphListener] = [_Nobody()]
_capturing: list[CUDAGraph] = []


def tell(listener: GraphListener) -> None:
    """Set who listens to graphs from now on."""
    _listener[0] = listener


def is_capturing() -> bool:
    """Whether the current stream is being captured."""
    return bool(_capturing)


def new_pool() -> Pool:
    """`torch.cuda.graph_pool_handle`."""
    return next(_pools), 0


class MemPool:
    """`torch.cuda.MemPool`: memory of its own, wherever the allocator that it names would take it from."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator = allocator
        self.id = new_pool()

    def use_count(self) -> int:
        """How many use it."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Memory is shown by --memory-snapshot."""
        return []


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """`torch.cuda.use_mem_pool`."""
    before = _listener[0].pool_entered(pool.id)
    try:
        yield
    finally:
        _listener[0].pool_entered(before)


class CUDAGraph:
    """The part of `torch.cuda.CUDAGraph` that does not inspect a graph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Pool | None = None
        self._first = 0
        self._captured: tuple[Any, tuple[Event, ...]] | None = None

    def capture_begin(
        self,
        pool: Pool | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Begin the capture, on the current stream."""
        if _capturing:
            raise torch.AcceleratorError("CUDA error: a CUDA graph is being captured already")
        self._first = simulated.current_stream().stream_id
        if not self._first:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = pool or new_pool()
        _capturing.append(self)
        _listener[0].capture_begun(self._pool)

    def capture_end(self) -> None:
        """End it."""
        if _capturing != [self]:
            raise RuntimeError("capture_end() called on a CUDA graph that is not being captured")
        _capturing.clear()
        self._captured = _listener[0].capture_ended()

    def instantiate(self) -> None:
        """Nothing is left to do."""

    def replay(self) -> None:
        """Launch what was captured, on the current stream."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        meaning, events = self._captured
        _listener[0].graph_launched(meaning, events, self._first, simulated.current_stream().stream_id)

    def reset(self) -> None:
        """Forget what was captured."""
        self._captured = None

    def pool(self) -> Pool:
        """The handle of its memory."""
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def register_generator_state(self, _: Any) -> None:
        """Random numbers have no values here."""

    def enable_debug_mode(self) -> None:
        """There is no graph of CUDA's that could be shown."""

    def debug_dump(self, _: str) -> None:
        """No file is written."""

"""CUDA graphs: what is captured once, and launched at once again and again.

While a graph is captured, operators run as ever, but for the device: they are taken out of the log when the capture ends,
and what they did to memory stays. Memory that is allocated meanwhile comes from a pool of the graph's own, which other
operators never get (CUDACachingAllocator.cpp, `PrivatePool`). In a trace such a pool is a stream of its own, called ``graph
pool N``; all that is captured with the same pool shares it. A launch puts all that was captured into the log, behind a
`GraphLaunch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autosac.capture.device.device import Pool, new_stream_number
from autosac.capture.record.log import EventLog
from autosac.trace import GRAPH_POOL, Collective, Event, EventRecord, EventWait, GraphLaunch, Op, StreamWait, WorkWait

COMPILED: Pool = (0, 0)  # of the graphs that compiled code makes for itself
_NO_WAITING = "CUDA error: operation not permitted when stream is capturing"
_OF_DEVICE = (Op, Collective, EventRecord, EventWait, StreamWait, WorkWait)


class GraphRecords:
    """The part of a recorder that knows of graphs."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._homes: dict[tuple[Pool, int], int] = {}  # (pool, stream) -> the stream that stands for its memory
        self._pool: Pool | None = None
        self._first = 0
        self._was_recording = False
        self._is_captured = False

    @property
    def is_open(self) -> bool:
        """Whether memory comes from a graph's pool now."""
        return self._pool is not None

    def memory_of(self, stream: int) -> int:
        """Where an allocation on `stream` comes from."""
        if self._pool is None:
            return stream
        key = self._pool, stream
        if key not in self._homes:
            self._homes[key] = new_stream_number()
        return self._homes[key]

    @property
    def pools(self) -> frozenset[int]:
        """The streams that stand for memory of graphs."""
        return frozenset(self._homes.values())

    def name_of(self, stream: int) -> str:
        """A stream's name in a trace."""
        return f"{GRAPH_POOL} {stream}" if stream in self.pools else f"stream {stream}"

    def begin(self, pool: Pool) -> None:
        """A capture begins."""
        self._pool, self._is_captured = pool, True
        self._was_recording, self._log.recording = self._log.recording, True
        self._first = len(self._log.events)

    def end(self) -> tuple[Event, ...]:
        """It has ended: what the device shall do at each launch, without any of it in the log."""
        events = self._log.events
        captured = events[self._first :]
        events[self._first :] = [event for event in captured if type(event) not in _OF_DEVICE]
        self._pool, self._is_captured, self._log.recording = None, False, self._was_recording
        return tuple(_nameless(event) for event in captured if type(event) in _OF_DEVICE)

    def enter_pool(self, pool: Pool | None) -> Pool | None:
        """Memory comes from this pool from now on, or (None) from none of its own. Returns where it came from until now."""
        before, self._pool = self._pool, pool
        return before

    def refuse_waiting(self) -> None:
        """Where the host waits for the device: CUDA allows it nowhere in a capture."""
        if self._is_captured:
            raise torch.AcceleratorError(_NO_WAITING)

    def launch(self, captured: tuple[Event, ...], first: int, stream: int) -> None:
        """Launch on `stream` what was captured on the stream `first`."""
        if self._log.recording and captured:
            self._log.events.append(GraphLaunch(len(captured)))
            self._log.events += [_moved(event, first, stream) for event in captured]

    @contextlib.contextmanager
    def launched(self, pool: Pool) -> Iterator[None]:
        """What happens inside is launched at once, and has its memory in this pool."""
        if self._pool is not None or not self._log.recording:
            with self._inside(self._pool or pool):
                yield
            return
        events, first = self._log.events, len(self._log.events)
        events.append(GraphLaunch(0))
        try:
            with self._inside(pool):
                yield
        finally:
            if self._log.events is events:
                events[first] = GraphLaunch(len(events) - first - 1)

    @contextlib.contextmanager
    def _inside(self, pool: Pool) -> Iterator[None]:
        before = self.enter_pool(pool)
        try:
            yield
        finally:
            self.enter_pool(before)


def _nameless(event: Event) -> Event:
    """Without the storages, which may be gone at the next launch."""
    if type(event) is Op or type(event) is Collective:
        return event._replace(inputs=(-1,) * len(event.inputs), outputs=(-1,) * len(event.outputs))
    return event


def _moved(event: Event, first: int, stream: int) -> Event:
    """On `stream`, if it was on `first`."""
    changes = {name: stream for name in ("stream", "other") if getattr(event, name, None) == first}
    return event._replace(**changes) if changes else event  # type: ignore[arg-type]

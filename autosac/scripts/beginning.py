"""Simulated time of what a script does before its first step: it builds a model, reads a batch, plays or generates.

It is executed piece by piece, as far as somebody asks for the time. A piece ends where the host has waited for all that it
had issued to a stream: what comes later begins with a device that is idle. Very long pieces end without.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from autosac.scripts.executed import Mark, Times, alone
from autosac.simulation import Simulation
from autosac.trace import Event, EventRecord, EventWait, HostWait, StreamWait, Trace, WorkWait

_MOST_EVENTS = 20_000


@dataclass(frozen=True, slots=True)
class _Piece:
    first: int
    begin_ms: float
    times: Times


class Beginning:
    """`simulation` simulates what has been recorded before the first step, of which it takes a part."""

    def __init__(self, simulation: Callable[[Callable[[Trace], Trace]], Simulation]) -> None:
        self._simulation = simulation
        self._pieces: list[_Piece] = []
        self._first, self._begin_ms, self._priced = 0, 0.0, 0

    def host_ms(self, events: int) -> float:
        """When the host has issued so many events."""
        self._price(events)
        piece = self._at(events)
        return piece.begin_ms + piece.times.host_at(events - piece.first) if piece else 0.0

    def device_ms(self, mark: Mark) -> float:
        """When a stream has done what was issued to it before a place; stream -1: when all have."""
        self._price(mark.events)
        piece = self._at(mark.events)
        if piece is None:
            return 0.0
        return piece.begin_ms + piece.times.device_at(mark._replace(events=mark.events - piece.first))

    def total_ms(self, events: int) -> float:
        """When all has been done."""
        return max(self.host_ms(events), self.device_ms(Mark(0, events, -1)))

    def _at(self, events: int) -> _Piece | None:
        place = bisect_right(self._pieces, max(0, events - 1), key=lambda piece: piece.first)
        return self._pieces[place - 1] if place else None

    def _price(self, events: int) -> None:
        """Execute what has come since the last question."""
        if events <= self._priced:
            return
        first, self._priced = self._first, events
        simulation = self._simulation(lambda trace: _part(trace, first))
        issued = simulation.trace.events
        times = alone(simulation)
        if self._pieces and self._pieces[-1].first == first:
            self._pieces.pop()
        self._pieces.append(_Piece(first, self._begin_ms, times))
        waited = [i for i, event in enumerate(issued) if type(event) is HostWait and event.event < 0]
        length = waited[-1] + 1 if waited else len(issued) if len(issued) > _MOST_EVENTS else 0
        if length:
            self._first, self._begin_ms = first + length, self._begin_ms + times.host_at(length)
            self._priced = self._first


def _part(trace: Trace, first: int) -> Trace:
    """The events from this one on; waits for what came before are over at once."""
    events = trace.events[first:]
    marks = {event.event for event in events if type(event) is EventRecord}
    works = {
        work for event in events if (work := getattr(event, "work", None)) is not None and type(event) is not WorkWait
    }
    return replace(trace, prologue=(), events=tuple(_settled(event, marks, works) for event in events), regions=())


def _settled(event: Event, marks: set[int], works: set[int]) -> Event:
    if type(event) is EventWait and event.event not in marks:
        return StreamWait(event.stream, event.stream)
    if type(event) is HostWait and event.event >= 0 and event.event not in marks:
        return StreamWait(0, 0)
    if type(event) is WorkWait and event.work not in works:
        return StreamWait(event.stream, event.stream)
    return event

"""The events of a capture in host order: first those of the prologue, then those of the recorded step.

Frees of the prologue with nothing between them are put in the order of their allocations (`in_order`). An autograd graph that
is dropped without a backward (the shape inference of a pipeline stage) is destroyed by recursion, which CPython cuts into
pieces of a fixed depth: which of its tensors dies first depends on how deep the graph is, and layers would not repeat. An
allocator ends up in the same state in whatever order they come.

A step may wait for an event that the step before has recorded, or for a collective that it has started:
FullyShardedDataParallel lets the host wait for gathers of the step before. All steps are alike, so that it waits for what
stands in the same place of its own repetition (`Repeated`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from autosac.trace import (
    Alloc,
    EmptyCache,
    Event,
    EventRecord,
    EventWait,
    Free,
    HostWait,
    RecordStream,
    StepBegin,
    StreamWait,
    WorkWait,
)

_OF_MEMORY = (Alloc, Free, RecordStream, EmptyCache)


class EventLog:
    """`events` is the list that grows now: the prologue's until `begin`, then the step's.

    Every step may be recorded: when the next one begins, what it did to memory becomes a part of the prologue.
    """

    def __init__(self) -> None:
        self.prologue: list[Event] = []
        self.events: list[Event] = self.prologue
        self.recording = False
        self.marks = Repeated()
        self.works = Repeated()
        self._step = 0

    def begin_step(self, step: int) -> None:
        """A step begins that only counts for the prologue."""
        self._begin_numbers()
        self.prologue.append(StepBegin(step))

    def begin(self, step: int = 0) -> None:
        """The step to keep begins; `step` is its number, if another one may be kept in its place. 0: what comes before."""
        self._begin_numbers()
        if self.has_begun:
            if self._step:
                self.prologue.append(StepBegin(self._step))
            self.prologue += [event for event in self.events if type(event) in _OF_MEMORY]
        self._step = step
        self.events = []
        self.recording = True

    @property
    def has_begun(self) -> bool:
        """Whether `events` are other than the prologue."""
        return self.events is not self.prologue

    def end(self) -> None:
        """The step to keep has ended."""
        self.recording = False

    def add(self, event: Event) -> None:
        """Log an event that only the recorded step has; allocations and frees are appended to `events` in any case."""
        if self.recording:
            self.events.append(event)

    def finished(self) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """The prologue, and the step that is kept, as far as it has come."""
        prologue = in_order(self.prologue)
        if not self.marks.before and not self.works.before:
            return prologue, tuple(self.events)
        events = tuple(map(self._of_this_step, self.events))
        waits = {event.event for event in events if type(event) is EventWait or type(event) is HostWait}
        return (*prologue, *(EventRecord(event, 0) for event in sorted(filter(self.marks.is_old, waits)))), events

    def _begin_numbers(self) -> None:
        self.marks.begin()
        self.works.begin()

    def _of_this_step(self, event: Event) -> Event:
        if (type(event) is EventWait or type(event) is HostWait) and self.marks.is_old(event.event):
            place = self._place(self.marks, event.event)
            return event if place is None else event._replace(event=self.marks.made[place])
        if type(event) is WorkWait and self.works.is_old(event.work):
            place = self._place(self.works, event.work)
            if place is None:
                return StreamWait(event.stream, event.stream)  # over long ago
            return event._replace(work=self.works.made[place])
        return event

    def _place(self, numbers: Repeated, number: int) -> int | None:
        return None if self.recording else numbers.place(number)


class Repeated:
    """Numbers of what steps make and wait for: `made` in this step, `before` in the one before, `earlier` in any before."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.before: list[int] = []
        self.earlier: set[int] = set()
        self._now: set[int] = set()

    def begin(self) -> None:
        """A step begins."""
        self.earlier |= self._now
        self.before, self.made, self._now = self.made, [], set()

    def add(self, number: int) -> None:
        """Made now."""
        self.made.append(number)
        self._now.add(number)

    def is_old(self, number: int) -> bool:
        """Whether only earlier steps have made it."""
        return number in self.earlier and number not in self._now

    def place(self, number: int) -> int | None:
        """Where this step makes what the step before made last under an old number, counted from the end (below 0)."""
        if number not in self.before:
            return None
        place = -1 - self.before[::-1].index(number)
        return place if -place <= len(self.made) else None


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, each run of consecutive frees by the storages' numbers."""
    found: list[Event] = []
    for are_frees, run in groupby(events, lambda event: type(event) is Free):
        together = list(run)
        found += sorted(together) if are_frees else together
    return tuple(found)

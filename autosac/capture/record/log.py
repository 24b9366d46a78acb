"""The events of a capture in host order: first those of the prologue, then those of the recorded step.

Frees of the prologue with nothing between them are put in the order of their allocations (`in_order`). An autograd graph that
is dropped without a backward (the shape inference of a pipeline stage) is destroyed by recursion, which CPython cuts into
pieces of a fixed depth: which of its tensors dies first depends on how deep the graph is, and layers would not repeat. An
allocator ends up in the same state in whatever order it is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from autosac.trace import Alloc, Event, Free, RecordStream, StepBegin

_OF_MEMORY = (Alloc, Free, RecordStream)


class EventLog:
    """`events` is the list that grows now: the prologue's until `begin`, then the step's.

    Every step may be recorded: when the next one begins, what it did to memory becomes a part of the prologue.
    """

    def __init__(self) -> None:
        self.prologue: list[Event] = []
        self.events: list[Event] = self.prologue
        self.recording = False
        self._step = 0

    def begin_step(self, step: int) -> None:
        """A step begins that only counts for the prologue."""
        self.prologue.append(StepBegin(step))

    def begin(self, step: int = 0) -> None:
        """The step to keep begins; `step` is its number, if another one may be kept in its place."""
        if self.events is not self.prologue:
            self.begin_step(self._step)
            self.prologue += [event for event in self.events if type(event) in _OF_MEMORY]
        self._step = step
        self.events = []
        self.recording = True

    def end(self) -> None:
        """The step to keep has ended."""
        self.recording = False

    def add(self, event: Event) -> None:
        """Log an event that only the recorded step has; allocations and frees are appended to `events` in any case."""
        if self.recording:
            self.events.append(event)


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, each run of consecutive frees by the storages' numbers."""
    found: list[Event] = []
    for are_frees, run in groupby(events, lambda event: type(event) is Free):
        together = list(run)
        found += sorted(together) if are_frees else together
    return tuple(found)

"""The events of a capture in host order: first those of the prologue, then those of the recorded step."""

from __future__ import annotations

from autosac.trace import Event, StepBegin


class EventLog:
    """`events` is the list that grows now: the prologue's until `begin`, then the step's."""

    def __init__(self) -> None:
        self.prologue: list[Event] = []
        self.events: list[Event] = self.prologue
        self.recording = False

    def begin_step(self, step: int) -> None:
        """A step begins that only counts for the prologue."""
        self.prologue.append(StepBegin(step))

    def begin(self) -> None:
        """The step to keep begins."""
        self.events = []
        self.recording = True

    def end(self) -> None:
        """The step to keep has ended."""
        self.recording = False

    def add(self, event: Event) -> None:
        """Log an event that only the recorded step has; allocations and frees are appended to `events` in any case."""
        if self.recording:
            self.events.append(event)

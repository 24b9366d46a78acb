"""The order of events."""

from __future__ import annotations

from autosac.capture.record.log import EventLog, in_order
from autosac.trace import Alloc, EventRecord, EventWait, Free, HostWait, StepBegin, StreamWait, WorkWait


def test_frees_with_nothing_between_them_are_in_the_order_of_their_allocations() -> None:
    """Frees do not move past anything else."""
    events = [Alloc(0), Alloc(1), Alloc(2), Free(2), Free(0), Alloc(3), Free(3), StepBegin(1), Free(1)]
    expected = [Alloc(0), Alloc(1), Alloc(2), Free(0), Free(2), Alloc(3), Free(3), StepBegin(1), Free(1)]
    assert in_order(events) == tuple(expected)


def _two_steps() -> EventLog:
    """Each step waits for the last event and the last collective of the one before; the second also for what is older."""
    log = EventLog()
    for step, events, works in ((1, (0, 1, 2), (10, 11)), (2, (3, 4), (12,)), (3, (5, 6), (13,))):
        log.begin(step)
        log.add(HostWait(-1, events[0] - 1, "event"))
        log.add(EventWait(0, 0))
        log.add(WorkWait(works[0] - 1, 0))
        log.add(WorkWait(10, 0))
        for event in events:
            log.marks.add(event)
            log.add(EventRecord(event, 0))
        for work in works:
            log.works.add(work)
    return log


def test_a_step_waits_for_its_own_repetition() -> None:
    """What the step before made last becomes what this one makes last; what is older is over."""
    log = _two_steps()
    log.end()
    prologue, events = log.finished()
    assert events[:4] == (HostWait(-1, 6, "event"), EventWait(0, 0), WorkWait(13, 0), StreamWait(0, 0))
    assert prologue[-1] == EventRecord(0, 0)


def test_a_step_under_way_waits_for_nothing_before_it() -> None:
    """Its own last event is not known yet."""
    prologue, events = _two_steps().finished()
    assert events[:4] == (HostWait(-1, 4, "event"), EventWait(0, 0), StreamWait(0, 0), StreamWait(0, 0))
    assert prologue[-2:] == (EventRecord(0, 0), EventRecord(4, 0))

"""The order of events."""

from __future__ import annotations

from autosac.capture.record.log import in_order
from autosac.trace import Alloc, Free, StepBegin


def test_frees_with_nothing_between_them_are_in_the_order_of_their_allocations() -> None:
    """Frees do not move past anything else."""
    events = [Alloc(0), Alloc(1), Alloc(2), Free(2), Free(0), Alloc(3), Free(3), StepBegin(1), Free(1)]
    expected = [Alloc(0), Alloc(1), Alloc(2), Free(0), Free(2), Alloc(3), Free(3), StepBegin(1), Free(1)]
    assert in_order(events) == tuple(expected)

"""When what a region made is held and used again, event by event."""

from __future__ import annotations

from autosac.memory_sim.spans import Span, StorageEvents, region_spans
from autosac.trace import Phase
from traces import TraceBuilder


def test_spans_of_two_layers() -> None:
    """The first layer holds a from its end (event 8) to its backward (10), which ends after a is freed (11). Its temporary
    and its output are not implicit, and its input, which dies at 8, would have to be held. The backward uses nothing of the
    second layer.
    """
    b = TraceBuilder(("", "layers.0", "layers.1"))
    x = b.alloc(1000)
    b.module = "layers.0"
    a = b.alloc(100)
    b.op("aten.mm.default", (x,), (a,))
    temporary = b.alloc(513)
    b.op("aten.mul.Tensor", (a,), (temporary,))
    b.free(temporary)
    out = b.alloc(512)
    b.op("aten.mm.default", (a,), (out,))
    b.region("layers.0", 1, (x,), (out,))
    b.free(x)
    b.phase = Phase.BACKWARD
    gradient = b.alloc(100)
    b.op("aten.mm.default", (out, a), (gradient,))
    b.free(a)
    b.module, b.phase = "layers.1", Phase.FORWARD
    unused = b.alloc(100)
    b.op("aten.mm.default", (out,), (unused,))
    b.region("layers.1", 12, (out,), ())
    trace = b.build()
    events = StorageEvents(trace)
    first = Span(region=0, held_first=8, active_first=10, active_last=12, implicit=(a,), boundary=(x,))
    assert region_spans(trace, events) == (first, None)
    assert events.bytes_of((x, a, temporary, out)) == 1024 + 512 + 1024 + 512
    assert events.allocated_between(1, 6) == [a, temporary] and events.allocated_between(2, 7) == [temporary, out]
    assert (events.free_of(a), events.free_of(out)) == (11, len(trace.events))

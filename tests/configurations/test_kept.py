"""What a layer's backward needs at once, on traces made by hand."""

from __future__ import annotations

from traces import TraceBuilder

from autosac.configurations.bounds.kept import working_bytes
from autosac.trace import Label, Phase

NO_LAYER = -1
LAYER_OF = [NO_LAYER, NO_LAYER, 0, 0, 1, NO_LAYER]  # of the builder's modules


def test_a_backward_needs_what_its_hungriest_operator_reads_and_writes() -> None:
    """A product's gradient (16 bytes) from a saved tensor (8) and the incoming gradient (4), beside a gradient that is read
    later (2): 30. What nobody reads any more (1), parameters, and what is behind the layers do not count.
    """
    trace = TraceBuilder()
    trace.module = "layers.0"
    weight, saved = trace.alloc(1000, Label.UNSHARDED_PARAMETER), trace.alloc(8)
    trace.phase, trace.module = Phase.BACKWARD, "head"
    incoming = trace.alloc(4)
    trace.op("aten.mm.default", (weight,), (incoming,))
    trace.module = "layers.0"
    later, unread = trace.alloc(2), trace.alloc(1)
    trace.op("aten.mul.Tensor", (incoming,), (later, unread))
    gradient = trace.alloc(16)
    trace.op("aten.mm.default", (saved, incoming, weight), (gradient,))
    trace.free(saved)
    last = trace.alloc(1)
    trace.op("aten.add.Tensor", (gradient, later), (last,))
    assert working_bytes(trace.build(), LAYER_OF) == {0: 8 + 4 + 16 + 2}


def test_each_layer_has_its_own() -> None:
    """Layer 1 runs backward first; a gradient of it that layer 0 reads counts where it is read."""
    trace = TraceBuilder()
    trace.phase, trace.module = Phase.BACKWARD, "layers.1"
    between, wide = trace.alloc(4), trace.alloc(32)
    trace.op("aten.mm.default", (), (between, wide))
    trace.free(wide)
    trace.module = "layers.0"
    first = trace.alloc(2)
    trace.op("aten.mm.default", (), (first,))
    trace.op("aten.add.Tensor", (first, between), (first,))
    assert working_bytes(trace.build(), LAYER_OF) == {1: 36, 0: 6}

"""What a layer's backward needs at once, on traces made by hand, and the bounds that follow."""

from __future__ import annotations

import math

import pytest

from autosac.configurations.bounds.bounds import memory_bound_bytes, recompute_bound_ms
from autosac.configurations.bounds.kept import working_bytes
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.space.layout import Layout
from autosac.trace import Label, Phase
from traces import TraceBuilder

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


def test_what_a_backward_needs_while_its_experts_are_gathered() -> None:
    """Of layer 0, whose part is gathered for an operator that writes 8 bytes, between operators that write 32 and 64; of layer
    1, which has no part of its own, nothing.
    """
    trace = TraceBuilder(("", "layers", "layers.0", "layers.0.moe", "layers.1", "head"))
    trace.phase, trace.module = Phase.BACKWARD, "layers.1"
    trace.op("aten.mm.default", (), (trace.alloc(16),))
    trace.module = "layers.0"
    whole = trace.alloc(1000, Label.UNSHARDED_PARAMETER)  # of the layer's own unit
    trace.op("aten.mm.default", (whole,), (trace.alloc(32),))
    trace.module = "layers.0.moe"
    part = trace.alloc(500, Label.UNSHARDED_PARAMETER)
    trace.op("aten.mm.default", (part,), (trace.alloc(8),))
    trace.free(part)
    trace.op("aten.mm.default", (), (trace.alloc(64),))
    built = trace.build()
    assert working_bytes(built, LAYER_OF, beside_parts=True) == {0: 8}
    assert working_bytes(built, LAYER_OF) == {0: 64, 1: 16}


def test_a_layers_backward_needs_memory_beside_the_other_layers() -> None:
    """Two layers keep 10 bytes each, half of which nothing frees: while one runs backward, of which an operator needs 50, the
    other one's 5 are there. With 57.5 bytes it has to free half of what it can, which takes 0.5 ms. In a pipeline of two
    stages of one layer, the first holds that layer's 5 bytes of its second microbatch.
    """
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((5, math.inf), (5, 1.0)), working_bytes=50)
    model = ModelCosts(
        layers=2, layer=layer, first=LayerCosts(), last=LayerCosts(), layer_parameters=0, outside_parameters=0
    )
    assert memory_bound_bytes(Layout(gpu="any"), model) == 5 + 50
    assert recompute_bound_ms(Layout(gpu="any"), model, 0, 57.5) == pytest.approx(0.5)
    stages = Layout(gpu="any", pipeline=2, schedule="1F1B", global_batch=2)
    assert memory_bound_bytes(stages, model) == 5 + 50

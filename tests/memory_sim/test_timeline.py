"""Allocated bytes over a step: the series, the peak, ranges, modules' states, workspaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import SimulationError
from autosac.memory_sim import Category, ModuleShare, WorkspaceModel, simulate_memory
from autosac.trace import Label, Phase

CUBLAS_ONLY = WorkspaceModel(cublas_bytes=4096, operator_temporaries=False)


def training_step(builder: Any) -> Any:
    """A step of two blocks with a saved activation each, a recomputation, gradients and an optimizer's."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.SETUP
    b.module = "layers.0"
    weight = b.alloc(1024, Label.PARAMETER)
    b.module = ""
    table = b.alloc(100)
    b.in_prologue, b.phase = False, Phase.FORWARD
    batch = b.alloc(1, Label.INPUT)  # 0
    b.enter("")  # 1
    b.enter("layers.0")  # 2
    saved = b.alloc(2048, op="aten.mm.default")  # 3
    b.op("aten.mm.default", [batch, weight], [saved])  # 4
    local = b.alloc(512)  # 5
    b.op("aten.relu.default", [saved], [local])  # 6
    b.leave("layers.0")  # 7
    b.free(local)  # 8
    b.leave("")  # 9
    b.phase = Phase.RECOMPUTE
    b.enter("layers.1")  # 10
    again = b.alloc(1536)  # 11
    scratch = b.alloc(512)  # 12
    b.leave("layers.1")  # 13
    b.free(scratch)  # 14
    b.phase = Phase.BACKWARD
    b.enter("layers.0")  # 15
    flowing = b.alloc(3072, op="aten.mm.default")  # 16
    b.op("aten.mm.default", [saved], [flowing])  # 17
    gradient = b.alloc(1024, Label.GRADIENT, op="aten.mul.Tensor")  # 18
    b.op("aten.mul.Tensor", [flowing, again], [gradient])  # 19
    unread = b.alloc(512)  # 20
    b.free(unread, flowing, saved, again)  # 21 to 24
    b.leave("layers.0")  # 25
    b.phase, b.module = Phase.OPTIMIZER, ""
    temporary = b.alloc(1024, op="aten._foreach_sqrt.default")  # 26
    b.free(temporary, gradient, batch)  # 27 to 29
    names = (
        "weight",
        "table",
        "batch",
        "saved",
        "local",
        "again",
        "scratch",
        "flowing",
        "gradient",
        "unread",
    )
    ids = (weight, table, batch, saved, local, again, scratch, flowing, gradient, unread)
    return b.build(), dict(zip((*names, "temporary"), (*ids, temporary), strict=True))


def test_series_by_hand(builder: Any) -> None:
    """Residents 1024 + 512; then all allocations and frees in turn, rounded to 512 bytes."""
    trace, _ = training_step(builder)
    expected = [2048] * 3 + [4096] * 2 + [4608] * 3 + [4096] * 3 + [5632, 6144, 6144, 5632, 5632]
    expected += [8704, 8704, 9728, 9728, 10240, 9728, 6656, 4608, 3072, 3072, 4096, 3072, 2048, 1536]
    assert simulate_memory(trace).live_bytes.tolist() == expected


def test_exact_bytes_without_rounding(builder: Any) -> None:
    """With a granularity of one byte, the 100-byte table and the 1-byte batch count as they are."""
    trace, _ = training_step(builder)
    assert simulate_memory(trace, round_to_bytes=1).live_bytes[0] == 1024 + 100 + 1


def test_peak_report(builder: Any) -> None:
    """At event 20 live weight, table, batch, saved, again, flowing, gradient and unread."""
    trace, ids = training_step(builder)
    timeline = simulate_memory(trace)
    peak = timeline.peak(largest=3)
    assert (peak.nbytes, peak.event, timeline.peak_bytes) == (10240, 20, 10240)
    assert (peak.op, peak.module, peak.phase, peak.source) == (
        "aten.empty.default",
        "layers.0",
        Phase.BACKWARD,
        "model.py:9",
    )
    assert peak.by_category == {
        Category.PARAMETER: 1024,
        Category.BUFFER: 512,
        Category.GRADIENT: 1024,
        Category.ACTIVATION: 2048 + 1536,
        Category.ACTIVATION_GRADIENT: 3072,
        Category.TEMPORARY: 512,
        Category.INPUT: 512,
    }
    assert [(s.storage, s.nbytes, s.category, s.source) for s in peak.largest] == [
        (ids["flowing"], 3072, Category.ACTIVATION_GRADIENT, "model.py:7"),
        (ids["saved"], 2048, Category.ACTIVATION, "model.py:3"),
        (ids["again"], 1536, Category.ACTIVATION, "model.py:5"),
    ]
    assert peak.by_module == (
        ModuleShare("", 1024, 10240),
        ModuleShare("layers", 0, 9216),
        ModuleShare("layers.0", 7680, 7680),
        ModuleShare("layers.1", 1536, 1536),
    )


def test_categories_of_every_storage(builder: Any) -> None:
    """What a backward operator finds alive is an activation; locals that outlive their hook are not."""
    trace, ids = training_step(builder)
    timeline = simulate_memory(trace)
    rows = timeline.lifetimes.storage.tolist()
    found = {name: Category(int(timeline.categories[rows.index(i)])) for name, i in ids.items()}
    assert found == {
        "weight": Category.PARAMETER,
        "table": Category.BUFFER,
        "batch": Category.INPUT,
        "saved": Category.ACTIVATION,
        "local": Category.TEMPORARY,
        "again": Category.ACTIVATION,
        "scratch": Category.TEMPORARY,
        "flowing": Category.ACTIVATION_GRADIENT,
        "gradient": Category.GRADIENT,
        "unread": Category.TEMPORARY,
        "temporary": Category.TEMPORARY,
    }


def test_only_what_was_there_before_the_step_is_a_buffer(builder: Any) -> None:
    """Memory without a label that the step's first event allocates is a temporary, though it stays to the end."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.SETUP
    before = b.alloc(512)
    b.in_prologue, b.phase = False, Phase.FORWARD
    first = b.alloc(512)
    timeline = simulate_memory(b.build())
    rows = timeline.lifetimes.storage.tolist()
    found = [Category(int(timeline.categories[rows.index(storage)])) for storage in (before, first)]
    assert found == [Category.BUFFER, Category.TEMPORARY]


def test_only_what_a_forward_leaves_for_a_backward_is_an_activation(builder: Any) -> None:
    """What a backward or an optimizer makes and nothing reads is a temporary, though a later backward finds it alive."""
    b = builder()
    made = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        b.phase = phase
        made.append(b.alloc(512))
    b.phase = Phase.BACKWARD
    last = b.alloc(512)
    b.op("aten.relu.default", [], [last])
    b.free(*made, last)
    timeline = simulate_memory(b.build())
    rows = timeline.lifetimes.storage.tolist()
    found = [Category(int(timeline.categories[rows.index(storage)])) for storage in made]
    assert found == [Category.ACTIVATION, Category.TEMPORARY, Category.TEMPORARY]


def test_categories_sum_to_the_total(builder: Any) -> None:
    """Whatever the workspaces, the categories' series add up to the highest bytes of each event."""
    trace, _ = training_step(builder)
    for workspaces in (None, CUBLAS_ONLY):
        timeline = simulate_memory(trace, workspaces=workspaces)
        total = sum(timeline.category_bytes(category) for category in Category)
        assert np.array_equal(total, timeline.high_bytes)


def test_module_spans(builder: Any) -> None:
    """Block 0's forward goes from 2048 to 4096 with a peak of 4608: its dying local is not counted after."""
    trace, _ = training_step(builder)
    spans = simulate_memory(trace).module_spans
    names = {(trace.modules[s.module], s.phase): tuple(s)[2:] for s in spans}
    assert names == {
        ("", Phase.FORWARD): (0, 1, 9, 2048, 4096, 4608),
        ("layers.0", Phase.FORWARD): (0, 2, 7, 2048, 4096, 4608),
        ("layers.1", Phase.RECOMPUTE): (0, 10, 13, 4096, 5632, 6144),
        ("layers.0", Phase.BACKWARD): (0, 15, 25, 5632, 3072, 10240),
    }


def test_microbatches_are_occurrences(builder: Any) -> None:
    """Two forwards of one module are its executions 0 and 1; an enter without an exit is no execution."""
    b = builder()
    for _ in range(2):
        b.enter("head")
        b.alloc(512)
        b.leave("head")
    b.enter("head")
    spans = simulate_memory(b.build()).module_spans
    assert [(s.occurrence, s.before_bytes, s.after_bytes) for s in spans] == [(0, 0, 512), (1, 512, 1024)]


def test_cublas_workspace_of_each_thread_and_stream(builder: Any) -> None:
    """Forward and backward on stream 0, forward on stream 1: three, each from its first matmul on."""
    b = builder()
    b.op("aten.relu.default")
    b.op("aten.mm.default")
    b.stream = 1
    b.op("aten.bmm.default")
    b.stream, b.phase = 0, Phase.BACKWARD
    b.op("aten.addmm.default")
    b.phase = Phase.RECOMPUTE
    b.op("aten.mm.default")
    b.phase = Phase.OPTIMIZER
    b.op("aten.mm.default")
    timeline = simulate_memory(b.build(), workspaces=CUBLAS_ONLY)
    assert timeline.live_bytes.tolist() == [0, 4096, 8192, 12288, 12288, 12288]
    assert timeline.breakdown_at(5) == {Category.WORKSPACE: 12288}


def test_cublas_workspaces_of_an_earlier_step_are_found(builder: Any) -> None:
    """If the recorded step is not the first, its workspaces are there from the beginning."""
    b = builder()
    b.step(0)
    b.op("aten.relu.default")
    b.op("aten.mm.default")
    assert simulate_memory(b.build(), workspaces=CUBLAS_ONLY).live_bytes.tolist() == [4096, 4096]


def test_default_cublas_sizes() -> None:
    """32 MiB on Hopper, ":4096:2:16:8" (8 MiB and 128 KiB) elsewhere."""
    assert WorkspaceModel.for_gpu((9, 0), 132).cublas_bytes == 33554432
    assert WorkspaceModel.for_gpu((8, 0), 108).cublas_bytes == 8519680


def test_storage_that_is_allocated_twice(builder: Any) -> None:
    """A resized storage has two lives, and both count."""
    b = builder()
    again = b.alloc(512)
    b.free(again)
    b.add(type(b.events[0])(again))
    timeline = simulate_memory(b.build())
    assert timeline.live_bytes.tolist() == [512, 0, 512]
    assert timeline.lifetimes.storage.tolist() == [again, again]


def test_contradictory_traces(builder: Any) -> None:
    """Freeing what is dead and allocating what is alive are errors that name the event."""
    b = builder()
    storage = b.alloc(512)
    b.free(storage, storage)
    with pytest.raises(SimulationError, match="event 2 of the trace frees storage 0"):
        simulate_memory(b.build())
    b = builder()
    b.alloc(512)
    b.add(b.events[0])
    with pytest.raises(SimulationError, match="event 1 of the trace allocates storage 0"):
        simulate_memory(b.build())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.data())
def test_peak_between_equals_brute_force(builder: Any, sizes: list[int], data: st.DataObject) -> None:
    """The maximum over any range of events is that of a plain search, as is the event where it is reached."""
    b = builder()
    alive: list[int] = []
    for nbytes in sizes:
        alive.append(b.alloc(nbytes))
        if data.draw(st.booleans()):
            b.free(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
    timeline = simulate_memory(b.build())
    first = data.draw(st.integers(0, len(timeline.live_bytes) - 1))
    last = data.draw(st.integers(first + 1, len(timeline.live_bytes)))
    expected = max(timeline.high_bytes[first:last].tolist())
    assert timeline.peak_between(first, last) == expected
    assert timeline.peaks_between([first, 0], [last, 1]).tolist() == [expected, timeline.high_bytes[0]]
    assert timeline.peak_event_between(first, last) == first + timeline.high_bytes[first:last].tolist().index(expected)

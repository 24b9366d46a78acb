"""Exports: PyTorch's memory viewer and pictures."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autosac.errors import UsageError
from autosac.memory_sim import AllocatorConfig, WorkspaceModel, replay_allocator, simulate_memory
from autosac.memory_sim.pictures import (
    budget_limit,
    gpu_limit,
    html_figure,
    peak_text,
    png_figure,
    timeline_html,
    timeline_png,
)
from autosac.memory_sim.series import timeline_series
from autosac.memory_sim.viewer import memory_snapshot, write_memory_snapshot
from autosac.trace import Label, Phase

MIB = 1 << 20

VIEWER_OPCODES = {
    *(
        "APPEND",
        "APPENDS",
        "BINFLOAT",
        "BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "BINPUT",
        "BINUNICODE",
        "DICT",
    ),
    *(
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "FRAME",
        "LIST",
        "LONG1",
        "LONG_BINGET",
        "LONG_BINPUT",
        "MARK",
    ),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the `unpickle` function of PyTorch's MemoryViz.js knows."""


@pytest.fixture(scope="module")
def trace(builder: Any) -> Any:
    """A parameter, a saved activation with a temporary, a gradient, and a buffer used on another stream."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.SETUP
    b.alloc(30 * MIB, Label.PARAMETER)
    b.step(0)
    b.in_prologue, b.phase = False, Phase.FORWARD
    b.enter("layers.0")
    activation = b.alloc(40 * MIB, op="aten.mm.default")
    b.op("aten.mm.default", [], [activation])
    b.free(b.alloc(3 * MIB))
    b.leave("layers.0")
    b.phase = Phase.BACKWARD
    gradient = b.alloc(30 * MIB, Label.GRADIENT, op="aten.mul.Tensor")
    b.op("aten.mul.Tensor", [activation], [gradient])
    buffer = b.alloc(25 * MIB, Label.COMMUNICATION)
    b.record_stream(buffer, 1)
    b.free(buffer, activation, gradient)
    return b.build()


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_snapshot_is_consistent(trace: Any, config: str) -> None:
    """Blocks fill their segments, parameter and workspace are live, allocations and frees pair up."""
    snapshot = memory_snapshot(
        trace,
        config=AllocatorConfig.parse(config),
        workspaces=WorkspaceModel(cublas_bytes=32 * MIB, operator_temporaries=False),
    )
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        assert [block["address"] for block in segment["blocks"]] == [segment["address"], *ends[:-1]]
    live = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sorted((b["requested_size"], b["category"]) for b in live) == [
        (30 * MIB, "parameter"),
        (32 * MIB, "workspace"),
    ]
    (actions,) = snapshot["device_traces"]
    kinds = [a["action"] for a in actions]
    assert kinds.count("alloc") == kinds.count("free_requested") == 4
    assert kinds.count("free_completed") == 4
    allocated = next(a for a in actions if a["action"] == "alloc" and a["size"] == 40 * MIB)
    assert allocated["category"] == "activation"
    assert allocated["frames"] == [
        {"name": "aten.mm.default", "filename": "model.py", "line": 1},
        {"name": "layers.0 (forward)", "filename": "Block", "line": 0},
    ]


def test_snapshot_of_a_job_that_does_not_fit(trace: Any) -> None:
    """Its last action is the failed request, with what the device had left."""
    snapshot = memory_snapshot(trace, capacity_bytes=60 * MIB)
    last = snapshot["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 40 * MIB, 30 * MIB)


def test_pytorch_reads_the_snapshot(trace: Any, tmp_path: Path) -> None:
    """PyTorch's own tools print it, and the file has only what the viewer's JavaScript decodes."""
    from torch.cuda import _memory_viz

    path = tmp_path / "snapshot.pickle"
    write_memory_snapshot(path, memory_snapshot(trace))
    content = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= VIEWER_OPCODES
    snapshot = pickle.loads(content)
    assert "30.0MiB" in _memory_viz.segsum(snapshot)
    assert "free completed for a 40.0MiB" in _memory_viz.trace(snapshot)
    categories = [action["category"] for action in snapshot["device_traces"][0]]
    assert "unknown" in categories, "the viewer's legend breaks without it"


def test_series_keeps_the_peak(builder: Any) -> None:
    """Of 4,002 events with one spike, at most 50 are drawn, the spike among them; the stack adds up to the total."""
    b = builder()
    for i in range(1000):
        small = b.alloc(512)
        b.free(small)
        if i == 617:
            b.free(b.alloc(MIB))
        b.op("aten.relu.default")
        b.op("aten.relu.default")
    series = timeline_series(simulate_memory(b.build()), points=50)
    assert 10 < len(series.event) <= 50
    assert series.total_gib.max() == MIB / 2**30
    assert np.allclose(sum(series.gib.values()), series.total_gib)
    assert series.peak_x == 617 * 4 + 2
    assert series.phases == ((Phase.FORWARD, 2.0, 4001.0),)
    assert series.unit == "event of the step"


def test_what_lasts_is_drawn_for_as_long(builder: Any) -> None:
    """A thousand events in the first ms, then one of 99 ms with 1 MiB more, which is drawn from 1 to 100 ms."""
    b = builder()
    for _ in range(500):
        b.free(b.alloc(512))
    big = b.alloc(MIB)
    b.op("aten.relu.default")
    b.free(big)
    times = [*np.linspace(0, 1, 1000), 1.0, 1.0, 100.0]
    series = timeline_series(simulate_memory(b.build()), event_ms=times, points=40)
    high = np.flatnonzero(series.total_gib >= MIB / 2**30)
    assert series.x[high[0]] == 1.0 and series.x[high[-1] + 1] == 100.0
    assert series.unit == "time in the simulated step (ms)"


def test_times_must_match(trace: Any) -> None:
    """An axis of times has one time for every event."""
    with pytest.raises(UsageError, match="1 times for"):
        timeline_series(simulate_memory(trace), event_ms=[0.0])


def test_series_knows_what_ran(trace: Any) -> None:
    """At the peak the buffer is allocated, outside of all modules, in the backward."""
    series = timeline_series(simulate_memory(trace))
    assert series.what[series.peak] == ("aten.empty.default", "layers", "backward")
    assert ("aten.mm.default", "layers.0", "forward") in series.what


LIMITS = (gpu_limit(500 * MIB), budget_limit(300 * MIB, "reserved"))


def test_the_page_has_lines_phases_and_what_ran(trace: Any) -> None:
    """A line and a name for each limit, every phase once in the legend, a dot at the peak, what ran for whoever hovers."""
    timeline = simulate_memory(trace)
    series = timeline_series(timeline, event_ms=np.arange(len(trace.events)) / 10)
    figure = html_figure(series, peak_text(timeline), LIMITS)
    shapes, notes = figure.layout.shapes, [note.text for note in figure.layout.annotations]
    assert [shape.y0 for shape in shapes if shape.line.dash] == [500 / 1024, 300 / 1024]
    assert [shape.name for shape in shapes if shape.showlegend] == ["forward", "backward"]
    assert notes[:2] == ["GPU memory for PyTorch: 0.49 GiB", "budget for reserved memory: 0.29 GiB"]
    (every,) = [row for row in figure.data if row.name == "all"]
    assert list(every.customdata[series.peak]) == ["aten.empty.default", "layers", "backward"]
    (dot,) = [row for row in figure.data if row.mode == "markers"]
    assert (dot.x[0], dot.y[0]) == (series.peak_x, timeline.peak_bytes / 2**30)
    assert figure.layout.annotations[-1].x == dot.x[0] and figure.layout.annotations[-1].y == dot.y[0]
    assert figure.layout.yaxis.range[1] > 500 / 1024
    assert figure.layout.xaxis.title.text == "time in the simulated step (ms)"


def test_the_picture_has_the_same(trace: Any) -> None:
    """Lines, a legend of phases, and the dot where the arrow points."""
    timeline = simulate_memory(trace)
    series = timeline_series(timeline, event_ms=np.arange(len(trace.events)) / 10)
    figure = png_figure(series, peak_text(timeline), LIMITS)
    (axes,) = figure.axes
    memory, phases = figure.legends
    assert [text.get_text() for text in phases.get_texts()] == ["forward", "backward"]
    assert "activation" in [text.get_text() for text in memory.get_texts()]
    peak = (series.peak_x, timeline.peak_bytes / 2**30)
    assert any((line.get_xdata()[0], line.get_ydata()[0]) == peak for line in axes.lines if line.get_marker() == "o")
    assert [note.xy[1] for note in axes.texts] == [500 / 1024, 300 / 1024, peak[1]]
    assert axes.get_xlim() == (series.x[0], series.x[-1]) == (0, (len(trace.events) - 1) / 10)


@pytest.mark.parametrize(("before", "after", "side"), [(1, 6, "left"), (3, 3, "left"), (6, 1, "right")])
def test_what_is_known_of_the_peak_stands_where_there_is_room(builder: Any, before: int, after: int, side: str) -> None:
    """On the right of a peak (its text begins there) in the first half of the step, else on its left."""
    b = builder()
    for position in range(before + 1 + after):
        storage = b.alloc(MIB * (100 if position == before else 1))
        b.free(storage)
    timeline = simulate_memory(b.build())
    series = timeline_series(timeline)
    middle = (series.x[0] + series.x[-1]) / 2
    (note,) = png_figure(series, peak_text(timeline), ()).axes[0].texts
    assert note.get_horizontalalignment() == ("right" if series.peak_x > middle else "left") == side


def test_a_limit_far_above_does_not_flatten_the_memory(trace: Any) -> None:
    """A GPU of 80 GiB over a peak of 0.12: named at the top edge of an axis that ends 15 % above the peak."""
    timeline = simulate_memory(trace)
    series, limits = timeline_series(timeline), (gpu_limit(80 * 1024 * MIB),)
    top = timeline.peak_bytes / 2**30 * 1.15
    page, picture = html_figure(series, "", limits), png_figure(series, "", limits)
    assert page.layout.yaxis.range[1] == picture.axes[0].get_ylim()[1] == pytest.approx(top)
    assert page.layout.annotations[0].text == "GPU memory for PyTorch: 80.00 GiB (above the picture)"
    assert picture.axes[0].texts[0].get_text() == page.layout.annotations[0].text


def test_pictures(trace: Any, tmp_path: Path) -> None:
    """A PNG, and a page that needs no network and names the peak, its module and the device's limit."""
    timeline = simulate_memory(trace)
    report = replay_allocator(trace, capacity_bytes=500 * MIB)
    times = np.arange(len(trace.events)) / 10
    timeline_png(tmp_path / "memory.png", timeline, report=report, event_ms=times, limits=LIMITS)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    timeline_html(tmp_path / "memory.html", timeline, report=report, limits=LIMITS)
    page = (tmp_path / "memory.html").read_text()
    for text in ("peak 0.12 GiB", "GPU memory for PyTorch", "activation", "communication"):
        assert text in page
    assert 'src="http' not in page

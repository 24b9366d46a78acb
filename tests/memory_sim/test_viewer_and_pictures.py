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
from autosac.memory_sim.pictures import timeline_html, timeline_png, timeline_series
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
    """Of 4,002 events with one spike, 50 are drawn, the spike among them; the stack adds up to the total."""
    b = builder()
    for i in range(1000):
        small = b.alloc(512)
        b.free(small)
        if i == 617:
            b.free(b.alloc(MIB))
        b.op("aten.relu.default")
        b.op("aten.relu.default")
    series = timeline_series(simulate_memory(b.build()), points=50)
    assert len(series.event) == 50
    assert series.total_gib.max() == MIB / 2**30
    assert np.allclose(sum(series.gib.values()), series.total_gib)
    assert series.peak_x == 617 * 4 + 2
    assert series.phases == ((Phase.FORWARD, 2.0, 4001.0),)


def test_times_must_match(trace: Any) -> None:
    """An axis of times has one time for every event."""
    with pytest.raises(UsageError, match="1 times for"):
        timeline_series(simulate_memory(trace), event_ms=[0.0])


def test_pictures(trace: Any, tmp_path: Path) -> None:
    """A PNG, and a page that needs no network and names the peak, its module and the device's limit."""
    timeline = simulate_memory(trace)
    report = replay_allocator(trace, capacity_bytes=500 * MIB)
    times = np.arange(len(trace.events)) / 10
    timeline_png(tmp_path / "memory.png", timeline, report=report, event_ms=times)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    timeline_html(tmp_path / "memory.html", timeline, report=report)
    page = (tmp_path / "memory.html").read_text()
    for text in ("peak 0.12 GiB", "device memory for PyTorch", "activation", "communication"):
        assert text in page
    assert 'src="http' not in page

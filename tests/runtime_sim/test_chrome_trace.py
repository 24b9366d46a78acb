"""The exported Chrome trace: well-formed, nothing lost, arrows that begin and end in slices."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from autosac.runtime_sim import INSTANT_HOST, chrome_trace, write_chrome_trace

HOST = replace(INSTANT_HOST, eager_op_us=100.1, collective_us=100.7, sync_us=50.3, module_us=10.9)


@pytest.fixture
def timeline(job, run):
    """Two ranks with modules, copies, an asynchronous gather and events between streams."""
    ranks = []
    for rank in (0, 1):
        step = job(rank=rank).enter(0).enter(1).op(1 + rank, module=1).exit(1).exit(0)
        step.collective(2, work=1).op(1).record(1, 0).wait(1, 3).op(0.5, stream=3, kind="d2h")
        ranks.append(step.wait_work(1).op(1).sync())
    return run(*ranks, host=HOST, steps=2)


def slices(document, category):
    """The complete events of a category."""
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


def test_every_kernel_is_a_slice(timeline):
    """3 kernels, 1 gather and 1 copy per rank, with the simulated durations in microseconds."""
    document = chrome_trace(timeline)
    kernels = slices(document, "kernel")
    assert Counter(e["name"] for e in kernels) == {"aten.mm.default": 6, "ncclDevKernel_AllGather (dp)": 2}
    assert [e["name"] for e in slices(document, "gpu_memcpy")] == ["Memcpy DtoH (aten.copy_.default)"] * 2
    first = [e for e in kernels if e["args"].get("module") == "a"]
    assert sorted(e["dur"] for e in first) == [1000, 2000]
    gathers = [e for e in kernels if e["name"].startswith("nccl")]
    assert sorted(e["args"]["waited for peers (us)"] for e in gathers) == [0, 1000]


def test_the_host_and_the_modules_have_rows(timeline):
    """The host's slices are its operators and waits; a is nested in the model."""
    document = chrome_trace(timeline)
    host = Counter(e["name"] for e in slices(document, "cpu_op") if e["pid"] == 0)
    assert host == {"aten.mm.default": 3, "aten.copy_.default": 1, "nccl:all_gather": 1, "HostWait": 1}
    modules = {e["name"]: e for e in slices(document, "user_annotation") if e["pid"] == 1}
    for outer, inner in ((modules["ProfilerStep#0"], modules["(model)"]), (modules["(model)"], modules["a"])):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"]


def test_rows_are_named(timeline):
    """Every row that has slices has a name, and streams carry theirs."""
    events = chrome_trace(timeline)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= names.keys()
    assert names[0, 1] == "host"
    assert names[0, 2] == "stream 0 (compute)"
    assert "stream 4 (group dp)" in names.values()


def test_slices_of_a_row_do_not_overlap(timeline):
    """Kernels on a stream, and operators on a host, follow each other, to the last bit; times are not negative."""
    rows = defaultdict(list)
    for event in chrome_trace(timeline)["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "user_annotation":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert row[0][0] >= 0
        assert all(first[1] <= second[0] for first, second in pairwise(row))


def test_slices_that_touch_do_not_overlap(job, run):
    """400 operators of the host, each 1.4 us right after the one before: begin plus duration is never past the next begin."""
    step = job()
    for _ in range(400):
        step.op(0, kind="view")
    timeline = run(step.op(1), host=replace(HOST, view_op_us=1.4))
    row = [(e["ts"], e["ts"] + e["dur"]) for e in slices(chrome_trace(timeline), "cpu_op")]
    assert len(row) == 401
    assert all(first[1] <= second[0] for first, second in pairwise(row))


def test_arrows_connect_slices(timeline):
    """Each arrow has one begin and one end, each within a slice of its row; there are arrows of all three
    kinds.
    """
    events = chrome_trace(timeline)["traceEvents"]
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["cat"], event["id"]].append(event)
    assert {category for category, _ in arrows} == {"ac2g", "synchronisation", "collective"}
    for ends in arrows.values():
        assert sorted(e["ph"] for e in ends) == ["f", "s"]
        for end in ends:
            inside = [
                e
                for e in events
                if e["ph"] == "X"
                and (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] <= end["ts"] < e["ts"] + e["dur"]
            ]
            assert inside, end


def test_the_file_is_json_gzipped_or_not(timeline, tmp_path):
    """Both spellings hold the same document."""
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    write_chrome_trace(timeline, plain)
    write_chrome_trace(timeline, packed)
    document = json.loads(plain.read_text())
    assert document == json.loads(gzip.decompress(packed.read_bytes()))
    assert document["otherData"]["step_ms"] == timeline.makespan_ms


def test_an_unwritable_path(timeline, tmp_path):
    """A folder that does not exist is an OSError and leaves nothing behind."""
    with pytest.raises(OSError, match="missing"):
        write_chrome_trace(timeline, tmp_path / "missing" / "trace.json")
    assert list(tmp_path.iterdir()) == []

"""Reading profiler traces: streaming, what is kept, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.errors import UsageError
from autosac.files.documents import DocumentError
from autosac.kineto import read_profile, stream

DOCUMENT = {"a": [1.5, "x\u00e9"], "events": [{"n": 12345678}, {"s": "}]{["}, {}, 7], "z": {"b": None}, "empty": []}


@pytest.mark.parametrize("chunk", [1, 3, 7, 2**20])
def test_members_are_those_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """However the file is cut into chunks, the same members come out as from Python's parser."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    path = tmp_path / "d.json"
    path.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    found = list(stream.members(path, "events"))
    assert [value for key, value in found if key == "events"] == DOCUMENT["events"]
    assert {key: value for key, value in found if key != "events"} == {
        key: value for key, value in DOCUMENT.items() if key != "events"
    }


def test_memory_is_bounded_by_one_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is longer than the limit is refused, a long list of short ones is not."""
    monkeypatch.setattr(stream, "MOST_MEMBER_CHARACTERS", 1000)
    monkeypatch.setattr(stream, "CHUNK_BYTES", 64)
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"events": [{"n": i} for i in range(2000)]}), encoding="utf-8")
    assert len(list(stream.members(path, "events"))) == 2000
    path.write_text(json.dumps({"events": [{"n": "x" * 5000}]}), encoding="utf-8")
    with pytest.raises(DocumentError, match="longer than"):
        list(stream.members(path, "events"))


WHOLE = json.dumps({"traceEvents": [{"ph": "X"}]}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin"),
        (b"PK\x03\x04", "does not begin|not UTF-8"),
        (b"\xff\xfe{", "not UTF-8"),
        (b"{", "key and a colon|truncated"),
        (b'{"traceEvents": [', "truncated"),
        (b'{"traceEvents": [{"ph": "X"}', "truncated"),
        (b'{"traceEvents": [{"ph": "X",]}', "truncated or not valid JSON"),
        (b'{"traceEvents": [1 2]}', "comma"),
        (b'{"traceEvents": {}}', "not a list"),
        (b'{"traceEvents" [', "colon"),
        (WHOLE + b"x", "follows its end"),
        (b'{"traceEvents": []}', "no traceEvents"),
        (b'{"other": 1}', "no traceEvents"),
        (b"[" * 100_000, "nested|truncated"),
        (WHOLE, "no kernels"),
        (gzip.compress(WHOLE, mtime=0)[:-6], "truncated or damaged"),
        (gzip.compress(WHOLE, mtime=0)[:12] + b"\x00" * 30, "truncated or damaged|does not begin|not UTF-8"),
    ],
)
def test_a_malformed_file_gets_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    """What is no trace is refused on one line that names the file and says why."""
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        read_profile(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """The message says that the file cannot be read."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_profile(path)


def test_damaged_events_are_counted_and_the_rest_is_read(tmp_path: Path, trace_file: Callable[..., Any]) -> None:
    """An event without a time, with a time that is no number, or that is no object does not stop the reader."""
    trace = trace_file()
    trace.op("aten::relu", 0, 10, [((4,), "float")])
    trace.kernel("k", 1, 20, 5)
    trace.events += [
        7,
        {"ph": "X", "cat": "kernel", "name": "k"},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "x", "dur": 1, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "o", "ts": 1, "dur": -5, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "o", "ts": 1, "dur": 5, "args": [1]},
    ]
    profile = read_profile(trace.save(tmp_path / "t.json.gz"))
    assert (len(profile.operators), len(profile.kernels), profile.damaged) == (1, 1, 5)


def test_categories_of_old_versions_are_read(tmp_path: Path, trace_file: Callable[..., Any]) -> None:
    """Profilers once wrote Operator, Runtime and Kernel."""
    trace = trace_file()
    trace.op("aten::relu", 0, 10, [((4,), "float")], category="Operator")
    trace.kernel("k", 1, 20, 5, category="Kernel")
    trace.events[1]["cat"] = "Runtime"
    profile = read_profile(trace.save(tmp_path / "t.json"))
    assert [op.name for op in profile.operators] == ["aten::relu"]
    assert [(k.name, k.kind, k.us) for k in profile.kernels] == [("k", "kernel", 5.0)]
    assert len(profile.launches) == 1


@pytest.mark.parametrize(("us", "damaged"), [(0, 0), (0.0, 0), (-0.001, 1), (float("inf"), 1), (float("nan"), 1)])
def test_durations(us: float, damaged: int, tmp_path: Path, trace_file: Callable[..., Any]) -> None:
    """None at all is one, none below and no infinite one."""
    trace = trace_file()
    trace.kernel("k", 1, 20, us)
    trace.kernel("other", 2, 30, 5)
    profile = read_profile(trace.save(tmp_path / "t.json"))
    assert profile.damaged == damaged
    assert [kernel.us for kernel in profile.kernels if kernel.name == "k"] == ([] if damaged else [us])

"""What is said of a trace file with one wrong value, for every place in it; pinned in ``traces.txt``.

``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/bad_input/test_trace_messages.py`` writes the file anew; look at what changed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pinned import check

from autosac.errors import TraceError
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    EmptyCache,
    Event,
    EventRecord,
    EventWait,
    Free,
    GraphLaunch,
    Group,
    HostWait,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Region,
    Signature,
    StepBegin,
    Storage,
    StreamWait,
    TensorMeta,
    Trace,
    TraceInfo,
    WorkWait,
)
from autosac.trace.checks import check_document
from autosac.trace.info import Cut, LoadDraw, Parallelism

META = TensorMeta((2, 3), (3, 1), "float32")
INFO = TraceInfo(
    model="tiny",
    job_fingerprint="abc",
    job_settings={"training.steps": "3"},
    gpu="h100",
    torch_version="2.13",
    torchtitan_version="0.2",
    world_size=4,
    rank=1,
    local_batch_size=2,
    seq_len=8,
    tokens_per_step=16,
    flops_per_token=1.5,
    parallelism=Parallelism(dp_shard=4),
    parameter_shapes={"w": (2, 3)},
    fsdp_units=("a",),
    checkpointing="none",
    selective_modules=("a",),
    stage_outputs=(((2,), (1,), "float32"),),
    cut=Cut(2, 1, 4),
    moe_load=LoadDraw(draw=1),
    traced={"a": (("mm", (((2, 3), "float32"),)),)},
    notes=("a note",),
)
TRACE = Trace(
    info=INFO,
    signatures=(
        Signature("aten.mm.default", (META, META), (META,), (("scale", 1.5),), mutates=(1,)),
        Signature("aten.view.default", (META,), (), is_view=True),
    ),
    storages=(
        Storage(24, 0, Label.PARAMETER, Phase.SETUP, 0, 0, "aten.mm.default"),
        Storage(24, 1, Label.NONE, Phase.FORWARD, 1, 0, "x"),
    ),
    modules=("", "a"),
    module_parents=(-1, 0),
    module_classes=("Model", "Linear"),
    sources=("a.py:1",),
    groups=(Group("dp", 0, ((2, 2), (2, 1))), Group("odd", 0, (), (0, 3))),
    prologue=(StepBegin(0), Alloc(0)),
    events=(
        ModuleEnter(1, Phase.FORWARD),
        Alloc(1),
        Op(0, 0, 1, Phase.FORWARD, 0, (0, -1), (1,)),
        Collective("all_reduce", 24, 0, 0, True, 0, -1, -1, 0, 1, Phase.FORWARD, 0, (0,), (1,)),
        WorkWait(0, 0),
        RecordStream(1, 1),
        EventRecord(0, 1),
        EventWait(0, 0),
        StreamWait(0, 1),
        HostWait(0, -1, "item"),
        GraphLaunch(0),
        EmptyCache(),
        Free(1),
        ModuleExit(1, Phase.FORWARD),
    ),
    regions=(Region(1, 0, 12, (Call("mm", 0, (META,), 1, 3, False, False, False, (1,), (0,), (), (1,)),), (0,), (1,)),),
    streams=("compute", "other"),
)
KINDS = (*get_args(Event), Signature, Storage, Group, Call, Region)
FIELDS = {kind.__name__: kind._fields for kind in KINDS}
VALUES = (
    *(-(2**62) - 1, -2, -1, 0, 1, 2, 4, 5, 12, 13, 4096, 4097, 2**17 - 1, 2**17, 2**17 + 1, 2**50, 2**50 + 1, 2**62),
    *(2**62 + 1, 1.5, 1e31, True, None, "cpu", "recv", "item", [], [1], [[]], [0, 12], [2, 1, 0], [1] * 65),
    *([2**30, 2**30], ["a", 1, 2], {}, {"draw": 1.5}, {"a": 1}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document; of lists of numbers and of texts the last one."""
    if path:
        yield path
    if isinstance(value, list):
        alike = all(isinstance(item, int | str) for item in value)
        items = [(i, item) for i, item in enumerate(value) if not alike or i == len(value) - 1]
    else:
        items = list(value.items()) if isinstance(value, dict) else []
    for key, item in items:
        yield from places(item, (*path, key))


def name(value: Any) -> str:
    """A value in a few letters."""
    text = json.dumps(value)
    return text if len(text) <= 20 else f"{text[:8]}...{text[-8:]}"


def test_what_is_said_of_traces(tmp_path: Path) -> None:
    """Every place with those of some values that are taken there, and what is said of the others."""
    path = tmp_path / "one.trace"
    TRACE.save(path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    lines: list[str] = []
    for place in places(document):
        if place in {("format",), ("schema",)}:
            continue
        said = [(answer(document, place, value), name(value)) for value in VALUES]
        lines.append(f"{'.'.join(map(str, place))} {' '.join(value for text, value in said if not text)}")
        lines += [f"    {text}" for text in dict.fromkeys(text for text, _ in said) if text]
    check(Path(__file__).with_name("traces.txt"), "\n".join(lines))


def answer(document: Any, place: tuple[Any, ...], value: Any) -> str:
    """What is said of a document with this value there, and a word for it; nothing if it is taken."""
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    before, inner[place[-1]] = inner[place[-1]], value
    try:
        check_document(document, FIELDS, len(Phase), len(Label))
    except (KeyError, TypeError, IndexError, ValueError) as e:
        return re.sub(" is .*: expected", " is VALUE: expected", str(e))
    finally:
        inner[place[-1]] = before
    return ""


@pytest.mark.parametrize(
    "part", ["info", "signatures", "storages", "modules", "groups", "prologue", "events", "regions"]
)
def test_a_part_is_missing(part: str, tmp_path: Path) -> None:
    """The error says that the file is no whole trace, and a trace comes back as it was saved."""
    path = tmp_path / "one.trace"
    TRACE.save(path)
    assert Trace.load(path) == TRACE
    document = json.loads(gzip.decompress(path.read_bytes()))
    del document[part]
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(TraceError):
        Trace.load(path)

"""The Trace as a value: saving and loading, the structure of process groups, what is resident."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import TraceError
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    Cut,
    EmptyCache,
    Event,
    EventRecord,
    EventWait,
    Free,
    GraphLaunch,
    Group,
    HostWait,
    Label,
    LoadDraw,
    ModuleEnter,
    ModuleExit,
    Op,
    Parallelism,
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

META = TensorMeta((2, 3), (3, 1), "bfloat16")
ON_HOST = TensorMeta((), (), "int64", "cpu")
EVENTS: tuple[Event, ...] = (
    ModuleEnter(1, Phase.FORWARD),
    Alloc(1),
    Op(0, 0, 1, Phase.FORWARD, 1, (0, -1), (1,)),
    Collective("all_gather", 96, 0, 1, True, 7, -1, -1, 1, 1, Phase.RECOMPUTE, 1, (0,), (1,)),
    RecordStream(1, 1),
    EventRecord(5, 1),
    EventWait(5, 0),
    StreamWait(0, 1),
    WorkWait(7, 0),
    HostWait(-1, -1, "device"),
    GraphLaunch(0),
    EmptyCache(),
    Free(1),
    ModuleExit(1, Phase.FORWARD),
)
CALL = Call("aten.mm.default", 0, (META,), 2, 3, False, True, False, (1,), (0,), (), (1,))


def trace_of(prologue: tuple[Event, ...] = (StepBegin(1), Alloc(0)), events: tuple[Event, ...] = EVENTS) -> Trace:
    """A small trace with everything in it."""
    arguments = (("beta", 0.5), ("dims", (1, 2)), ("flag", True), ("dtype", "float32"), ("fill", float("-inf")))
    return Trace(
        info=TraceInfo(
            model="toy",
            job_settings={"model.name": "toy"},
            world_size=4,
            rank=3,
            flops_per_token=0.5,
            parallelism=Parallelism(tp=2),
            parameter_shapes={"w": (2, 3)},
            fsdp_units=("layers.0",),
            stage_outputs=(((2, 3), (3, 1), "bfloat16"),),
            cut=Cut(3, 1, 40),
            moe_load=LoadDraw(kind="uniform", draw=2),
            early_stop=False,
            matmul_allows_tf32=True,
        ),
        signatures=(
            Signature("aten.mm.default", (META, ON_HOST), (META,), arguments, False, True, (0,)),
            Signature("c10d._allgather_base_.default", (META,), (META,), is_view=True),
        ),
        storages=(
            Storage(12, 0, Label.PARAMETER, Phase.SETUP, 0, 0, "aten.empty.memory_format"),
            Storage(96, 1, Label.NONE, Phase.FORWARD, 1, 1, "aten.mm.default"),
        ),
        modules=("", "layers.0"),
        module_parents=(-1, 0),
        module_classes=("Model", "Block"),
        sources=("", "model.py:3"),
        groups=(Group.of("tp", (0, 1)), Group.of("odd", (0, 1, 5))),
        prologue=prologue,
        events=events,
        regions=(Region(1, 0, 12, (CALL,), (0,), (1,)), Region(1, 1, 2, (), (), ())),
        streams=("compute", "stream 1"),
    )


def test_hand_made_trace_has_every_kind_of_event() -> None:
    """The trace that the round trip is tried with leaves out no event type."""
    trace = trace_of()
    assert {type(event) for event in (*trace.prologue, *trace.events)} == set(get_args(Event))


def test_degrees_of_parallelism() -> None:
    """Two replicas of three shards are six parts of the batch; 5 x 7 x 11 ranks work on each; experts change neither."""
    degrees = Parallelism(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11, ep=13, etp=17)
    assert (degrees.data_parallel, degrees.sharing) == (6, 385)
    assert (Parallelism().data_parallel, Parallelism().sharing) == (1, 1)


def test_round_trip(tmp_path: Path) -> None:
    """A loaded trace equals the saved one, enums and nested tuples included."""
    trace = trace_of()
    trace.save(tmp_path / "trace")
    loaded = Trace.load(tmp_path / "trace")
    assert repr(loaded) == repr(trace)  # named tuples of different types may be equal, their representations are not
    assert type(loaded.storages[0].label) is Label and type(loaded.events[0].phase) is Phase  # type: ignore[union-attr]
    assert type(loaded.signatures[0].inputs[0]) is TensorMeta and type(loaded.regions[0].calls[0]) is Call
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_saving_is_reproducible(tmp_path: Path) -> None:
    """The same trace gives the same bytes."""
    trace_of().save(tmp_path / "a")
    trace_of().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.lists(st.sampled_from((*EVENTS, StepBegin(2))), max_size=10))
def test_round_trip_of_any_order(tmp_path_factory: Any, events: list[Event], prologue: list[Event]) -> None:
    """Columns by type and the order between them give back any sequence of events."""
    path = tmp_path_factory.mktemp("traces") / "trace"
    trace = replace(
        trace_of(tuple(prologue), tuple(events)), regions=()
    )  # which refer to the events of the hand-made trace
    trace.save(path)
    assert repr(Trace.load(path)) == repr(trace)


def damaged(path: Path, change: Any) -> None:
    """Save a trace whose JSON document `change` has altered."""
    trace_of().save(path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    change(document)
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


def complaint(path: Path) -> str:
    """The one line that loading a bad file ends with."""
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    "content",
    [b"", b"no trace", b"\x1f\x8b", gzip.compress(b"{", mtime=0), gzip.compress(b"\xff\xfe", mtime=0)],
    ids=["empty", "text", "cut", "no JSON", "no text"],
)
def test_not_a_trace(tmp_path: Path, content: bytes) -> None:
    """Files that are no gzipped JSON are no traces."""
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert "is not an AutoSAC trace" in complaint(path)


@pytest.mark.parametrize("document", [[], 3, {}, {"format": "other"}])
def test_other_documents(tmp_path: Path, document: Any) -> None:
    """JSON documents of another kind are no traces."""
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert complaint(path).endswith("is not an AutoSAC trace")


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 1, exclude_max=True))
def test_truncated(tmp_path_factory: Any, share: float) -> None:
    """A trace that was cut off anywhere is recognised."""
    path = tmp_path_factory.mktemp("traces") / "trace"
    trace_of().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    complaint(path)


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_flipped_bits(tmp_path_factory: Any, share: float, mask: int) -> None:
    """A damaged byte is recognised, or does not matter (gzip's header has unused ones)."""
    path = tmp_path_factory.mktemp("traces") / "trace"
    trace_of().save(path)
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= mask
    path.write_bytes(content)
    try:
        assert repr(Trace.load(path)) == repr(trace_of())
    except TraceError as e:
        assert "\n" not in str(e)


def test_other_schema(tmp_path: Path) -> None:
    """Another schema version is refused with what to do."""
    path = tmp_path / "trace"
    damaged(path, lambda document: document.update(schema=99))
    message = complaint(path)
    assert "schema 99" in message and message.endswith("capture the job again")


def test_the_schema_before(tmp_path: Path) -> None:
    """A trace of the schema that did not tell wrapped calls is read as if there were none."""
    path = tmp_path / "trace"

    def as_before(document: Any) -> None:
        document.update(schema=2)
        document["signatures"].pop()

    damaged(path, as_before)
    assert Trace.load(path).signatures == trace_of().signatures


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("events"),
        lambda document: document["events"]["order"].append(0),
        lambda document: document["events"]["order"].append(99),
        lambda document: document["events"]["columns"].pop("Op"),
        lambda document: document["storages"].pop(),
        lambda document: document["storages"][2].__setitem__(0, 77),
        lambda document: document["modules"].pop(),
        lambda document: document.update(regions=[1]),
        lambda document: document.update(signatures=None),
        lambda document: document.update(events=[]),
    ],
)
def test_damaged_documents(tmp_path: Path, change: Any) -> None:
    """A document of the right kind with something missing or wrong in it is damaged."""
    path = tmp_path / "trace"
    damaged(path, change)
    assert "is damaged" in complaint(path)


def test_an_unknown_entry_is_named(tmp_path: Path) -> None:
    """What a trace is of has the entries of its type, and no other; markup and control characters are shown, not obeyed."""
    path = tmp_path / "trace"
    damaged(path, lambda document: document["info"].update({"odd\0 [/bold]": [None]}))
    assert "info.odd\\x00 [/bold] is not a known key" in complaint(path)


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    """A trace that cannot be written leaves no file behind."""
    (tmp_path / "trace").mkdir()
    with pytest.raises(OSError):
        trace_of().save(tmp_path / "trace")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize(
    ("ranks", "offset", "dims", "explicit"),
    [
        ((3,), 3, (), ()),
        ((0, 1, 2, 3), 0, ((4, 1),), ()),
        ((2, 6, 10), 2, ((3, 4),), ()),
        ((0, 1, 8, 9), 0, ((2, 8), (2, 1)), ()),
        ((1, 3, 9, 11, 17, 19), 1, ((3, 8), (2, 2)), ()),
        ((0, 1, 4, 5, 16, 17, 20, 21), 0, ((2, 16), (2, 4), (2, 1)), ()),
        ((0, 1, 3), 0, (), (0, 1, 3)),
        ((0, 1, 2, 4, 5, 7), 0, (), (0, 1, 2, 4, 5, 7)),
    ],
)
def test_group_structure(ranks: Any, offset: int, dims: Any, explicit: Any) -> None:
    """Regular lists of ranks are strides and sizes, slowest first; others are lists."""
    group = Group.of("g", ranks)
    assert group == Group("g", offset, dims, explicit)
    assert group.size == len(ranks) and group.ranks() == ranks


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
def test_group_gives_back_its_ranks(ranks: list[int]) -> None:
    """Whatever the list, the group has its ranks, in its order."""
    group = Group.of("g", ranks)
    assert group.ranks() == tuple(ranks) and group.size == len(ranks)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 9), st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_meshes_have_structure(offset: int, sizes: list[int], data: Any) -> None:
    """Any slice of a row-major device mesh is regular: it needs no explicit list."""
    stride, ranks = 1, [offset]
    for size in reversed(sizes):
        if data.draw(st.booleans()):
            ranks = [i * stride + rank for i in range(size) for rank in ranks]
        stride *= size
    group = Group.of("g", ranks)
    assert group.explicit == () and group.ranks() == tuple(ranks)


def test_residents() -> None:
    """Resident is what the prologue allocates and does not free, in order of allocation."""
    prologue = (Alloc(3), Alloc(1), StepBegin(1), Alloc(2), Free(1), Free(9), Alloc(4), Free(4))
    assert trace_of(prologue).residents() == (3, 2)
    assert trace_of(()).residents() == ()


def test_operators() -> None:
    """Operators come with their index; collectives are none."""
    assert [(i, event.signature) for i, event in trace_of().operators()] == [(2, 0)]

"""Chakra execution traces: what is written of a step, and that it takes the same time when it is read back."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import proto

from autosac.chakra import read_chakra, replay, schema, write_chakra
from autosac.cli.parser import main
from autosac.errors import TraceError, UsageError
from autosac.runtime_sim import ConstantOverlap, HostModel, Timeline
from autosac.trace import Group, Parallelism

TP, DP = Group.of("tp", (0, 1)), Group.of("dp", (0, 2))


def nodes_of(path: Path) -> list[Any]:
    """The nodes of a file."""
    return list(schema.unpacked(path.read_bytes()))[1:]


def by_name(path: Path) -> dict[str, Any]:
    """The nodes of the device by name, the newest of each."""
    return {node.name: node for node in nodes_of(path) if not schema.attributes(node).get("is_cpu_op")}


def mixed(job: Any, rank: int = 0, **info: Any) -> Any:
    """Operators on two streams, a gather beside them, a copy, and a wait of the host."""
    made = job(rank=rank, groups=(TP, DP), world_size=4, parallelism=Parallelism(dp_shard=2, tp=2), **info)
    made.op(1.2504).collective(2.5, work=1, group=1).op(3.0, stream=1).op(0.7, kind="h2d").wait_work(1, 0)
    made.op(1.0).wait_stream(0, 1).op(0.3003).sync().op(2.0)
    return made.collective(1.0, kind="all_reduce", group=0, asynchronous=False).op(0.1)


@pytest.fixture
def exported(job: Any, run: Callable[..., Timeline], tmp_path: Path) -> Path:
    """The traces of four ranks, of which one was simulated."""
    timeline = run(mixed(job), host=HostModel(), overlap=ConstantOverlap(), steps=2)
    written = write_chakra(timeline, tmp_path, prefix="job")
    alone = run(mixed(job), host=HostModel(), overlap=ConstantOverlap())
    assert (written.ranks, written.step_ms) == (4, alone.makespan_ms)
    return tmp_path


def test_one_file_for_each_rank_of_the_job(exported: Path) -> None:
    """Each with six operators, a copy and two collectives; a rank's groups are its own, and the file lists their ranks."""
    groups = json.loads((exported / "comm_group.json").read_text())
    assert sorted(map(tuple, groups.values())) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    for rank in range(4):
        nodes = nodes_of(exported / f"job.{rank}.et")
        device = [node for node in nodes if not schema.attributes(node).get("is_cpu_op")]
        assert Counter(node.type for node in device) == {schema.COMPUTE: 7, schema.COLLECTIVE: 2}
        for node in device:
            if node.type == schema.COLLECTIVE:
                assert rank in groups[schema.attributes(node)["pg_name"]]


def test_what_a_node_says(exported: Path) -> None:
    """FLOPs and bytes of an addition-free product, type and size of a gather: the 64 bytes of two ranks, half of them each."""
    nodes = by_name(exported / "job.0.et")
    product, gather, reduced = (nodes[name] for name in ("aten.mm.default", "all_gather", "all_reduce"))
    assert schema.attributes(product)["tensor_size"] == 48
    assert schema.attributes(product)["phase"] == "forward"
    assert product.inputs.shapes == "[[4],[4]]" and product.outputs.types == '["Tensor(float32)"]'
    said = schema.attributes(gather)
    assert (said["comm_type"], said["comm_size"]) == (schema.COLLECTIVES["all_gather"], 32)
    assert schema.attributes(reduced)["comm_size"] == 64
    assert (gather.duration_micros, reduced.duration_micros) == (2500, 1000)


def test_dependencies_point_back_and_durations_add_up(exported: Path) -> None:
    """Whatever a node waits for stands before it; the whole microseconds of computation sum up to those that were priced."""
    nodes = nodes_of(exported / "job.3.et")
    assert [node.id for node in nodes] == list(range(1, len(nodes) + 1))
    assert all(other < node.id for node in nodes for other in (*node.data_deps, *node.ctrl_deps))
    computing = [n for n in nodes if n.type == schema.COMPUTE]
    exact = sum(schema.attributes(node)["duration_us"] for node in computing)
    assert abs(sum(node.duration_micros for node in computing) - exact) <= 0.5
    waiting = next(node for node in nodes if node.name == "wait")
    assert len(waiting.data_deps) > 2  # the host's node before, and what is on every stream


def test_read_back_it_takes_the_same_time(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit, for all four ranks together; the command prints it."""
    found = replay(read_chakra(exported))
    (metadata, *_) = schema.unpacked((exported / "job.0.et").read_bytes())
    assert found.step_ms * 1e3 == schema.attributes(metadata)["step_us"]
    assert main(["chakra", str(exported), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step_ms"] == found.step_ms and document["nodes"]["collective"] == 8
    assert main(["chakra", str(exported)]) == 0
    assert "Step time" in capsys.readouterr().out


def test_a_pipeline_of_replicas(job: Any, run: Callable[..., Timeline], tmp_path: Path) -> None:
    """Ranks 0 and 2 are simulated of two stages of two; ranks 1 and 3 send and receive like them."""
    pair = Group.of("pp", (0, 2))
    info = {"world_size": 4, "parallelism": Parallelism(pp=2, dp_shard=2), "groups": (pair,)}
    first = job(rank=0, **info).op(1).collective(0.5, kind="send", peer=2).collective(0.5, kind="send", peer=2)
    last = job(rank=2, **info)
    for number in range(2):
        last.collective(0.5, kind="recv", peer=0, work=number, batch=number).wait_work(number).op(2.0)
    timeline = run(first, last)
    write_chakra(timeline, tmp_path)
    sent = [schema.attributes(n) for n in nodes_of(tmp_path / "autosac.1.et") if n.type == schema.SEND]
    got = [schema.attributes(n) for n in nodes_of(tmp_path / "autosac.3.et") if n.type == schema.RECV]
    ends = [[(n["comm_src"], n["comm_dst"], n["comm_tag"]) for n in rows] for rows in (sent, got)]
    assert ends == [[(1, 3, 1), (1, 3, 2)]] * 2
    assert replay(read_chakra(tmp_path)).step_ms == timeline.makespan_ms == 6


@pytest.mark.parametrize("seed", range(8))
def test_any_step_takes_the_same_time(job: Any, run: Callable[..., Timeline], tmp_path: Path, seed: int) -> None:
    """Two ranks of random operators, streams, batches and waits, with a host, interference and a short launch queue."""
    source = random.Random(seed)
    jobs = [job(rank=r, groups=(Group.of("dp", (0, 1)),), world_size=2) for r in (0, 1)]
    for step in range(40):
        kind, stream = source.choice(("op", "op", "gather", "pair", "event", "sync", "copy")), source.randrange(3)
        for rank, made in enumerate(jobs):
            ms = source.random() / 50
            if kind == "op":
                made.op(ms, stream=stream)
            elif kind == "copy":
                made.op(ms, stream=stream, kind=source.choice(("h2d", "d2h", "cpu", "view")))
            elif kind == "gather":
                made.collective(ms, stream=stream, work=step).wait_work(step, source.randrange(3))
            elif kind == "pair":
                direction = "send" if rank == 0 else "recv"
                made.collective(ms, kind=direction, peer=1 - rank, batch=step, stream=stream, work=step)
                made.wait_work(step, 0)
            elif kind == "event":
                made.record(step, stream).wait(step, 0)
            else:
                made.sync(stream=stream)
    host = replace(HostModel(), queue_depth=4)
    timeline = run(*jobs, host=host, overlap=ConstantOverlap())
    write_chakra(timeline, tmp_path)
    assert replay(read_chakra(tmp_path)).step_ms == pytest.approx(timeline.makespan_ms, rel=1e-12)


def test_ranks_alone(job: Any, run: Callable[..., Timeline], tmp_path: Path) -> None:
    """If one rank is asked for, there is one file."""
    assert write_chakra(run(mixed(job)), tmp_path, only_simulated=True).ranks == 1
    assert [path.name for path in sorted(tmp_path.glob("*.et"))] == ["autosac.0.et"]


def test_groups_that_cannot_be_told(job: Any, run: Callable[..., Timeline], tmp_path: Path) -> None:
    """Irregular groups say nothing of the other ranks."""
    odd = Group.of("odd", (0, 1, 3))
    made = job(groups=(odd,), world_size=4).collective(1.0)
    with pytest.raises(UsageError, match=r"rank 2 is not in group 'odd'.*--rank"):
        write_chakra(run(made), tmp_path)


def test_traces_of_others(tmp_path: Path) -> None:
    """Whole microseconds, no host, no groups: two ranks compute for 5 and 9, then reduce for 4."""
    for rank, us in ((0, 5), (1, 9)):
        kinds = schema.messages()
        compute = kinds.Node(id=0, name="x", type=schema.COMPUTE, duration_micros=us)
        reduce = kinds.Node(id=1, name="y", type=schema.COLLECTIVE, duration_micros=4, data_deps=[0])
        parts = (kinds.GlobalMetadata(version="0.0.4"), compute, reduce)
        (tmp_path / f"t.{rank}.et").write_bytes(b"".join(map(schema.packed, parts)))
    assert replay(read_chakra(tmp_path)).step_ms == pytest.approx(0.013)


def node(**fields: Any) -> bytes:
    """A file with one node after the metadata."""
    kinds = schema.messages()
    return schema.packed(kinds.GlobalMetadata()) + schema.packed(kinds.Node(**{"id": 1, "type": 4, **fields}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\xff" * 40, "damaged"),
        (b"no trace at all, only words", "damaged"),
        (lambda: node(data_deps=[7]), "waits for node 7"),
        (lambda: node(ctrl_deps=[1]), "wait for each other"),
        (lambda: node() + node()[1:], "same number"),
        (lambda: node(type=77), "type 77"),
        (lambda: node(name="x" * 99)[:-20], "damaged"),
        (lambda: node(attr=[schema.attribute("duration_us", float("nan"))]), "takes nan us"),
        (lambda: node(attr=[schema.attribute("duration_us", "long")]), "takes 'long' us"),
    ],
)
def test_damaged_files(tmp_path: Path, content: Any, message: str) -> None:
    """Each is named, with what is wrong."""
    (tmp_path / "x.0.et").write_bytes(content if isinstance(content, bytes) else content())
    with pytest.raises(TraceError, match=rf"x\.0\.et is not a Chakra trace, or it is damaged.*{message}|{message}"):
        read_chakra(tmp_path)


def test_any_damage_is_a_trace_error(exported: Path) -> None:
    """A byte changed or the end cut off at random places: read, or refused as damaged; never another error."""
    path = exported / "job.0.et"
    content, source = path.read_bytes(), random.Random(1)
    for _ in range(60):
        place = source.randrange(len(content))
        changed = content[:place] + bytes([source.randrange(256)]) + content[place + 1 :]
        path.write_bytes(changed if source.random() < 0.7 else content[:place])
        try:
            found = replay(read_chakra(exported))
        except TraceError:
            continue
        assert np.isfinite(found.step_ms)


def test_traces_that_do_not_fit_together(tmp_path: Path, exported: Path) -> None:
    """A send without its receive never ends; a folder without traces, and one with two of a rank, are wrong usage."""
    attributes = [schema.attribute(f"comm_{name}", number, "int32") for name, number in (("src", 0), ("dst", 1))]
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    with pytest.raises(UsageError, match="no Chakra traces"):
        read_chakra(lonely)
    (lonely / "x.0.et").write_bytes(node(type=schema.SEND, attr=attributes))
    assert replay(read_chakra(lonely)).step_ms == 0  # nobody waits for a rank that is not there
    (lonely / "x.1.et").write_bytes(node())
    with pytest.raises(TraceError, match="never comes"):
        replay(read_chakra(lonely))
    (lonely / "y.0.et").write_bytes(node())
    with pytest.raises(UsageError, match="two traces of rank 0"):
        read_chakra(lonely)
    (exported / "comm_group.json").write_text('{"1": "all"}')
    with pytest.raises(TraceError, match=r"comm_group.json is damaged: 1 is 'all': expected a list"):
        read_chakra(exported)


def test_the_wire_format_is_protobufs() -> None:
    """A node's bytes, field by field: id 3, type 4, data_deps packed [1, 2], duration 150 (a varint of two bytes)."""
    made = schema.messages().Node(id=3, type=4, data_deps=[1, 2], duration_micros=150)
    assert schema.packed(made) == bytes.fromhex("0b" + "0803" + "1804" + "2a020102" + "389601")
    assert proto.parse_length_prefixed(schema.messages().Node, io.BytesIO(schema.packed(made))) == made


def test_mlcommons_own_tools_read_the_traces(exported: Path) -> None:
    """Where MLCommons' package is installed: its reader knows every field of every node, and all dependencies are nodes."""
    messages = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    reader = pytest.importorskip("chakra.src.third_party.utils.protolib")
    unknown = pytest.importorskip("google.protobuf.unknown_fields")
    found = []
    with reader.openFileRd(str(exported / "job.0.et")) as file:
        about, node = messages.GlobalMetadata(), messages.Node()
        assert reader.decodeMessage(file, about)
        while reader.decodeMessage(file, node):
            found.append(node)
            node = messages.Node()
    mine = nodes_of(exported / "job.0.et")
    assert about.version == schema.VERSION
    assert [(n.id, n.name, n.type, list(n.data_deps)) for n in found] == [
        (n.id, n.name, n.type, list(n.data_deps)) for n in mine
    ]
    assert not any(len(unknown.UnknownFieldSet(n)) for n in found)
    assert {d for n in found for d in (*n.data_deps, *n.ctrl_deps)} <= {n.id for n in found}

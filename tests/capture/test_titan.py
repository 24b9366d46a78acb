"""TorchTitan's llama3 debug model captured through a CaptureServer, against what follows from its parameters' shapes."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.capture.jobs.notes import WITHOUT_VALIDATION
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError, UsageError
from autosac.trace import Alloc, Collective, Label, Op, Phase, Trace

JOB = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size", "2")
JOB += ("--training.seq_len", "128")
LAYERS = 4
Capture = Callable[..., Any]


def request(*overrides: str, **arguments: Any) -> TitanRequest:
    """The debug model with four layers and 2 sequences of 128 tokens on 8 ranks, without checkpointing unless asked for."""
    usual = {"world_size": 8, "checkpointing": "none", "layers": LAYERS}
    return TitanRequest(config_file=None, overrides=(*JOB, *overrides), **{**usual, **arguments})


@pytest.fixture(scope="module")
def progress() -> list[str]:
    """What the server has said."""
    return []


@pytest.fixture(scope="module")
def titan(progress: list[str]) -> Iterator[Capture]:
    """Captures through one server; the same request is captured once."""
    known: dict[TitanRequest, Trace] = {}
    with CaptureServer(on_progress=progress.append) as server:

        def run(*overrides: str, **arguments: Any) -> Trace:
            wanted = request(*overrides, **arguments)
            if wanted not in known:
                known[wanted] = server.capture(wanted)
            return known[wanted]

        yield run


def shapes(trace: Trace, prefix: str = "") -> list[list[int]]:
    """Shapes of the parameters in a module."""
    found = trace.info.parameter_shapes
    return [shape for name, shape in found.items() if name.startswith(f"{prefix}." if prefix else "")]


def gathered_elements(trace: Trace, ranks: int, *prefixes: str) -> int:
    """Elements of the parameters in these modules with their first dimension padded to a multiple of `ranks`."""
    return sum(
        -(-shape[0] // ranks) * ranks * prod(shape[1:]) for prefix in prefixes for shape in shapes(trace, prefix)
    )


def bytes_of(trace: Trace, label: Label) -> list[int]:
    """Sizes of the resident storages with a label."""
    return [trace.storages[s].nbytes for s in trace.residents() if trace.storages[s].label is label]


def launched(trace: Trace, phase: Phase, within: str = "") -> Counter[str]:
    """Operators of a phase that launch something, in modules below a name, without FSDP's own."""
    return Counter(
        trace.signatures[event.signature].name
        for _, event in trace.operators()
        if event.phase is phase
        and trace.modules[event.module].startswith(within)
        and not trace.signatures[event.signature].is_view
        and not trace.signatures[event.signature].name.startswith(("fsdp.", "aten._foreach_copy_"))
    )


def collectives(trace: Trace, kind: str, phase: Phase) -> list[Collective]:
    """The collectives of a kind in a phase."""
    return [e for e in trace.events if type(e) is Collective and e.kind == kind and e.phase is phase]


def own_rows(rows: int, ranks: int, rank: int) -> int:
    """Rows that a rank holds when FSDP2 cuts `rows` into chunks of equal size, the last ones smaller."""
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - rank * chunk))


@pytest.mark.parametrize(("ranks", "rank"), [(8, 0), (6, 5)])
def test_sharded_totals(titan: Capture, ranks: int, rank: int) -> None:
    """Parameters and gradients are float32 shards padded to equal sizes; Adam's two states have the rank's own rows."""
    trace = titan(world_size=ranks, rank=rank)
    padded_bytes = 4 * gathered_elements(trace, ranks, "") // ranks
    own = sum(own_rows(shape[0], ranks, rank) * prod(shape[1:]) for shape in shapes(trace))
    assert sum(bytes_of(trace, Label.PARAMETER)) == padded_bytes
    assert sum(bytes_of(trace, Label.GRADIENT)) == padded_bytes
    states = bytes_of(trace, Label.OPTIMIZER_STATE)
    assert len(states) == 3 * len(shapes(trace))
    assert sum(states) == 2 * 4 * own + 4 * len(shapes(trace))  # and a step counter each


def test_fsdp_transfers(titan: Capture) -> None:
    """Each unit is gathered once in the forward and, but for the last and with one transfer ahead, in the backward, in
    bfloat16; its gradients are reduced once, in float32. The sizes are those of all ranks' padded shards.
    """
    trace = titan()
    names = [["tok_embeddings"], *([f"layers.{i}"] for i in range(LAYERS)), ["norm", "output"]]
    elements = [gathered_elements(trace, 8, *unit) for unit in names]
    assert len(set(elements)) == 3
    forward = collectives(trace, "all_gather", Phase.FORWARD)
    assert [c.nbytes for c in forward] == [2 * n for n in elements]
    assert [trace.modules[c.module] for c in forward] == [unit[0] for unit in names]
    gathered_again = collectives(trace, "all_gather", Phase.BACKWARD)
    assert [c.nbytes for c in gathered_again] == [2 * n for n in elements[-2::-1]]
    # The next unit's transfer is issued while this one's backward begins.
    assert [trace.modules[c.module] for c in gathered_again] == [
        "output",
        *(f"layers.{i}" for i in reversed(range(LAYERS))),
    ]
    reduced = collectives(trace, "reduce_scatter", Phase.BACKWARD)
    assert [c.nbytes for c in reduced] == [4 * n for n in elements[::-1]]
    assert {trace.groups[c.group].ranks() for c in (*forward, *gathered_again, *reduced)} == {tuple(range(8))}


def test_streams_of_fsdp(titan: Capture) -> None:
    """Gathers and reductions have a stream each, all compute is on the first one, and every stream has a name."""
    trace = titan()
    gathers = {c.stream for c in collectives(trace, "all_gather", Phase.FORWARD)}
    reductions = {c.stream for c in collectives(trace, "reduce_scatter", Phase.BACKWARD)}
    assert len(gathers) == len(reductions) == 1 and gathers.isdisjoint(reductions | {0})
    assert trace.streams == ("compute", *(f"stream {i}" for i in range(1, len(trace.streams))))
    products = {e.stream for _, e in trace.operators() if trace.signatures[e.signature].name == "aten.mm.default"}
    assert products == {0}


def test_modules_of_operators(titan: Capture) -> None:
    """Matrix products belong to the linear layers: one each in the forward and two in the backward."""
    trace = titan()
    linear = {name.removesuffix(".weight") for name, shape in trace.info.parameter_shapes.items() if len(shape) == 2}
    linear.remove("tok_embeddings")
    for phase, each in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        products = Counter(
            trace.modules[event.module]
            for _, event in trace.operators()
            if event.phase is phase and trace.signatures[event.signature].name == "aten.mm.default"
        )
        assert products == dict.fromkeys(linear, each)


def test_what_the_trace_is_of(titan: Capture) -> None:
    """The trace says what it is of."""
    info = titan().info
    assert (info.world_size, info.rank, info.local_batch_size, info.seq_len, info.tokens_per_step) == (
        8,
        0,
        2,
        128,
        256,
    )
    assert info.fsdp_units == ("", *(f"layers.{i}" for i in range(LAYERS)), "norm", "output", "tok_embeddings")
    assert info.parallelism.dp_shard == 8 and not info.compiled and info.selective_modules == ()


def test_checkpointing_modes(titan: Capture) -> None:
    """Full checkpointing repeats all operators of all layers, every second layer half of them; selective checkpointing
    all but attention and the products that it keeps. Forward and backward stay the same.
    """
    none = titan()
    layers = launched(none, Phase.FORWARD, "layers.")
    assert not launched(none, Phase.RECOMPUTE)
    repeated = {mode: titan(checkpointing=mode) for mode in ("full", "selective-2", "selective-op")}
    assert launched(repeated["full"], Phase.RECOMPUTE) == layers
    half = launched(repeated["selective-2"], Phase.RECOMPUTE)
    assert Counter({name: 2 * count for name, count in half.items()}) == layers
    kept = layers - launched(repeated["selective-op"], Phase.RECOMPUTE)
    # Of the seven products of a layer, the second, fourth and sixth are repeated.
    assert kept == {"aten.mm.default": 4 * LAYERS, "aten._scaled_dot_product_cudnn_attention.default": LAYERS}
    for trace in repeated.values():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert launched(trace, phase) == launched(none, phase)


def test_observed_regions(titan: Capture) -> None:
    """There is a region for each layer, its attention and its feed-forward; regions nest as the modules do, and the
    calls of a region cover all operators in it but FSDP's.
    """
    trace = titan(observe=True)
    names = [trace.modules[region.module] for region in trace.regions]
    assert names == [f"layers.{i}{part}" for i in range(LAYERS) for part in ("", ".attention", ".feed_forward")]
    assert launched(trace, Phase.FORWARD) == launched(titan(), Phase.FORWARD)
    for outer in range(0, len(names), 3):
        layer, attention, feed_forward = trace.regions[outer : outer + 3]
        assert layer.first < attention.first < attention.last <= feed_forward.first < feed_forward.last <= layer.last
    for region in trace.regions:
        position, covered = region.first, set()
        for call in region.calls:
            assert position <= call.first <= call.last <= region.last
            position = call.last
            covered.update(range(call.first, call.last))
            assert set(call.created) <= {e.storage for e in trace.events[call.first : call.last] if type(e) is Alloc}
        missed = [trace.events[i] for i in set(range(region.first, region.last)) - covered]
        assert not [
            e
            for e in missed
            if type(e) is Op
            and not trace.signatures[e.signature].is_view
            and not trace.signatures[e.signature].name.startswith(("fsdp.", "aten._foreach_copy_"))
        ]


def group_shapes(trace: Trace, kind: str) -> set[tuple[tuple[int, int], ...]]:
    """The (size, stride) structures of the groups that a kind of collective runs over."""
    found = [e for e in trace.events if type(e) is Collective and e.kind == kind]
    return {trace.groups[e.group].dims for e in found}


def test_hybrid_sharding(titan: Capture) -> None:
    """HSDP gathers and reduces within shards of 4 neighbours and all-reduces each unit's shard over 2 replicas."""
    trace = titan("--parallelism.data_parallel_replicate_degree", "2")
    assert group_shapes(trace, "all_gather") == group_shapes(trace, "reduce_scatter") == {((4, 1),)}
    reductions = collectives(trace, "all_reduce", Phase.BACKWARD)
    assert [c.nbytes for c in reductions] == [
        c.nbytes // 4 for c in collectives(trace, "reduce_scatter", Phase.BACKWARD)
    ]
    assert {trace.groups[c.group].dims for c in reductions} == {((2, 4),)}


def test_tensor_parallelism(titan: Capture) -> None:
    """TP runs over neighbours, FSDP over every second rank; products are half as wide; all collectives are waited for."""
    trace = titan("--parallelism.tensor_parallel_degree", "2")
    assert group_shapes(trace, "all_gather") == {((2, 1),), ((4, 2),)}
    widths = {
        trace.signatures[event.signature].outputs[0].shape[-1]
        for _, event in trace.operators()
        if trace.modules[event.module].endswith("feed_forward.w1")
        and event.phase is Phase.FORWARD
        and trace.signatures[event.signature].name == "aten.mm.default"
    }
    assert widths == {768 // 2}
    assert not any(storage.op.startswith("_c10d_functional.wait_tensor") for storage in trace.storages)


def test_an_observed_step_leaves_asynchronous_tensor_parallelism_to_the_compiler(titan: Capture) -> None:
    """TorchTitan refuses it without compilation, and an observed model is not compiled: it runs the same operators."""
    parallel = ("--parallelism.tensor_parallel_degree", "2", "--compile.enable")
    observed = titan(*parallel, "--parallelism.enable_async_tensor_parallel", observe=True)
    assert observed.info.compiled and observed.events == titan(*parallel, observe=True).events


def test_context_parallelism(titan: Capture) -> None:
    """CP halves the sequence that a rank sees and keeps FSDP over all 8 ranks."""
    trace = titan("--parallelism.context_parallel_degree", "2")
    tokens = {
        prod(trace.signatures[event.signature].outputs[0].shape[:-1])
        for _, event in trace.operators()
        if trace.modules[event.module].endswith("feed_forward.w1")
        and event.phase is Phase.FORWARD
        and trace.signatures[event.signature].name == "aten.mm.default"
    }
    assert tokens == {2 * 128 // 2}
    assert ((8, 1),) in group_shapes(trace, "reduce_scatter")
    assert ((2, 1),) in group_shapes(trace, "all_gather") | group_shapes(trace, "all_to_all")


# ---- the server -----------------------------------------------------------------------------------------------------


def test_progress(titan: Capture, progress: list[str]) -> None:
    """The server tells what a capture is doing."""
    progress.clear()
    titan("--training.seq_len", "64")
    assert [text.partition(" (")[0] for text in progress] == ["building the model", "step 1 of 2", "step 2 of 2"]


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (("--model.flavor", "giant"), UsageError, "unknown flavor 'giant'"),
        (("--model.name", "gpt_oss", "--validation.enable"), UsageError, "no validation for gpt_oss"),
        (("--no.such", "1"), UsageError, "TorchTitan rejects the job's arguments"),
        (("--parallelism.tensor_parallel_degree", "3"), CaptureError, "building the job"),
    ],
)
def test_errors_of_jobs(titan: Capture, overrides: tuple[str, ...], kind: Any, words: str) -> None:
    """A job that cannot run is one line, and the server goes on."""
    with pytest.raises(kind) as caught:
        titan(*overrides)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert titan().events


def test_a_model_that_torchtitan_does_not_compile(titan: Capture) -> None:
    """With compile.enable it computes what it does without; only the observed step, which has not seen it, says that it is
    compiled. The report says so.
    """
    gpt_oss = ("--model.name", "gpt_oss", "--model.flavor", "debugmodel", "--training.seq_len", "64")
    plain = titan(*gpt_oss)
    asking, observed = (
        titan(*gpt_oss, "--compile.enable", "--compile.components", "model", observe=observe)
        for observe in (False, True)
    )
    assert asking.events == plain.events and not asking.info.compiled and observed.info.compiled
    note = "compile.enable does not compile the model, which TorchTitan's code leaves as it is"
    assert asking.info.notes == (note, *plain.info.notes)


def test_validation_is_left_out(titan: Capture) -> None:
    """No data set is read for it, the step is the same, and the report says so."""
    plain, validating = titan(), titan("--validation.enable", "--validation.dataset", "c4_validation")
    assert validating.info.notes == (*plain.info.notes, WITHOUT_VALIDATION)
    assert validating.events == plain.events


def processes_of(session: int) -> set[int]:
    """The processes of a session."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.add(int(entry.name))
    return found


def pid_of(server: CaptureServer) -> int:
    """The capture process, which a thread starts."""
    pid = server.process_id()
    assert pid is not None
    return pid


def test_dying_processes_and_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed capture is an error with its signal, the server goes on; leaving it leaves no processes and no files, and
    captures that were under way fail.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = threading.Semaphore(0)
    with CaptureServer(on_progress=lambda _: started.release()) as server:
        future = server.submit(request())
        worker = pid_of(server)
        started.acquire()
        (child,) = processes_of(worker) - {worker}
        os.kill(child, signal.SIGKILL)
        with pytest.raises(CaptureError, match=r"^the capture process was ended by signal 9 \(SIGKILL\)"):
            future.result()
        assert server.capture(request()).events
        unfinished = server.submit(request(checkpointing="full"))
        assert list(tmp_path.glob("autosac-*"))
    with pytest.raises(CaptureError, match="ended early"):
        unfinished.result()
    with pytest.raises(CaptureError, match="ended early"):
        server.capture(request())
    assert processes_of(worker) == set()
    assert list(tmp_path.glob("autosac-*")) == []


def test_a_worker_that_dies() -> None:
    """If the process itself is killed, what was waited for fails instead of hanging."""
    with CaptureServer() as server:
        future = server.submit(request())
        os.killpg(pid_of(server), signal.SIGKILL)
        with pytest.raises(CaptureError, match=r"ended by signal 9 \(SIGKILL\)"):
            future.result()


def test_requests_survive_the_way() -> None:
    """A request comes back from its JSON unchanged."""
    sent = request(stage_inputs=(((2, 3), (3, 1), "bfloat16"),), observe=True)
    assert TitanRequest.from_json(sent.to_json()) == sent


@pytest.mark.parametrize("mode", ["half", "selective", "selective-", "selective-0", "selective-x"])
def test_unknown_checkpointing(mode: str) -> None:
    """Unknown modes are refused with those that exist."""
    with pytest.raises(UsageError, match="expected none, full, selective-op or selective-N"):
        request(checkpointing=mode).checkpointing_mode()


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"rank": 8}, {"rank": -1}, {"steps": 1}])
def test_requests_check_themselves(wrong: dict[str, int]) -> None:
    """Ranks are within the world, and there are two steps at least."""
    with pytest.raises(UsageError):
        request(**wrong)


@pytest.mark.parametrize("own", [False, True])
def test_a_model_may_have_its_own_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """The Trainer in the module ``train`` beside the model is taken, else TorchTitan's."""
    general = pytest.importorskip("torchtitan.train")
    from autosac.capture.jobs.titan_v02 import trainer_class

    package = tmp_path / f"models_{own}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text("class Model: pass\n")
    if own:
        (package / "train.py").write_text("from torchtitan.train import Trainer\nclass Own(Trainer): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = SimpleNamespace(model_cls=importlib.import_module(f"models_{own}.model").Model)
    found = trainer_class(spec)
    assert found.__name__ == ("Own" if own else "Trainer") and issubclass(found, general.Trainer)


def test_a_job_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read it before gets a configuration of its own, checkpointed as he asks for; another file is read anew."""
    from torchtitan.config import ConfigManager

    from autosac.capture.jobs.titan_v02 import TitanV02

    read: list[list[str]] = []
    original = ConfigManager.parse_args
    monkeypatch.setattr(ConfigManager, "parse_args", lambda self, args: (read.append(args), original(self, args))[1])
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\n[training]\nseq_len = 128')
    job, adapter = TitanRequest(config_file=str(file), checkpointing="none"), TitanV02()
    adapter.parse(job).training.seq_len = 1
    assert adapter.parse(job).training.seq_len == 128 and len(read) == 1
    assert adapter.parse(replace(job, checkpointing="full")).activation_checkpoint.mode == "full"
    section = adapter.parse(replace(job, checkpointing="selective-3")).activation_checkpoint
    assert (section.mode, section.selective_ac_option) == ("selective", "3") and len(read) == 1
    file.write_text('[model]\nname = "llama3"\n[training]\nseq_len = 256')
    assert adapter.parse(job).training.seq_len == 256 and len(read) == 2


def test_the_jobs_own_checkpointing_is_known_under_every_other(tmp_path: Path) -> None:
    """A job that asks for selective checkpointing is described so, whatever is captured."""
    from autosac.capture.jobs.titan_v02 import TitanV02

    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\n[activation_checkpoint]\nmode = "selective"')
    adapter = TitanV02()
    for asked, found in (("job", "selective-2"), ("full", "full"), ("none", "none")):
        described = adapter.describe(adapter.parse(TitanRequest(config_file=str(file), checkpointing=asked)))
        assert (described.checkpointing, described.own) == (found, "selective")


def test_batches_of_flux() -> None:
    """Images of the job's size with the tokens of two encoders, each with the axis that TorchTitan removes."""
    from autosac.capture.jobs.titan_flux import FluxBatches

    tokens, images = next(iter(FluxBatches(3, 64, 32, ("clip_tokens", "t5_tokens"))))
    assert {name: tuple(t.shape) for name, t in tokens.items()} == {"clip_tokens": (3, 1, 77), "t5_tokens": (3, 1, 32)}
    assert tuple(images.shape) == (3, 3, 64, 64)

"""Pipeline parallelism: every stage's forward and backward are captured whole, under every kind of schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.trace import Alloc, Collective, Free, Op, Phase, StreamWait, Trace, WorkWait

LAYERS, MICROBATCHES, STAGES = 4, 4, 2  # of llama3's debug model with fewer layers
MATMULS = 7  # linear layers of a block: q, k, v, output, gate, up, down


@pytest.fixture
def server(capture_server: CaptureServer) -> CaptureServer:
    return capture_server


def captured(
    server: CaptureServer, schedule: str, checkpointing: str = "none", sharding: int = 1, more: tuple[str, ...] = ()
) -> list[Trace]:
    """The traces of a rank of each stage, in fp32 or (with FSDP) bf16; every mm is a linear layer's."""
    traces: list[Trace] = []
    for rank in range(0, STAGES * sharding, sharding):
        shapes = traces[0].info.stage_outputs if traces else None
        request = TitanRequest(
            config_file=None,
            overrides=(
                *("--model.name", "llama3", "--model.flavor", "debugmodel"),
                *("--training.local_batch_size", str(MICROBATCHES), "--training.seq_len", "64"),
                *("--parallelism.pipeline_parallel_degree", str(STAGES)),
                *("--parallelism.pipeline_parallel_schedule", schedule),
                *more,
            ),
            world_size=STAGES * sharding,
            rank=rank,
            checkpointing=checkpointing,
            stage_inputs=tuple(shapes) if shapes else None,
            layers=LAYERS,
        )
        traces.append(server.capture(request))
    return traces


def matmuls(trace: Trace) -> Counter[Phase]:
    return Counter(op.phase for _, op in trace.operators() if trace.signatures[op.signature].name == "aten.mm.default")


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_runs_forward_and_backward_of_every_microbatch(server: CaptureServer, schedule: str) -> None:
    """A linear layer has one product in the forward and two in the backward (of its input and of its weight).

    Over the ranks: 4 blocks of 7 layers and the output layer, for each of 4 microbatches. Nothing is recomputed.
    """
    traces = captured(server, schedule)
    counts = [matmuls(trace) for trace in traces]
    for count in counts:
        assert count[Phase.BACKWARD] == 2 * count[Phase.FORWARD]
        assert count[Phase.RECOMPUTE] == 0
    assert sum(count[Phase.FORWARD] for count in counts) == MICROBATCHES * (LAYERS * MATMULS + 1)


@pytest.mark.parametrize("schedule", ("1F1B", "DualPipeV"))
def test_what_one_stage_sends_the_other_receives(server: CaptureServer, schedule: str) -> None:
    """Two ranks: as many transfers of as many bytes leave the one as arrive at the other."""
    first, second = captured(server, schedule)

    def transfers(trace: Trace, kind: str) -> list[int]:
        return sorted(e.nbytes for e in trace.events if type(e) is Collective and e.kind == kind)

    assert transfers(first, "send") == transfers(second, "recv") != []
    assert transfers(second, "send") == transfers(first, "recv") != []


def test_full_checkpointing_repeats_each_forward_once(server: CaptureServer) -> None:
    """Each block's 7 products run again in the backward (TorchTitan does not stop early), the output layer's does not."""
    for trace in captured(server, "1F1B", "full"):
        count = matmuls(trace)
        outputs = sum(
            type(e) is Op
            and e.phase is Phase.FORWARD
            and trace.modules[e.module] == "output"
            and trace.signatures[e.signature].name == "aten.mm.default"
            for e in trace.events
        )
        assert count[Phase.RECOMPUTE] == count[Phase.FORWARD] - outputs


@pytest.mark.parametrize("schedule", ("ZBVZeroBubble", "DualPipeV"))
def test_schedules_run_with_fsdp(server: CaptureServer, schedule: str) -> None:
    """Two ranks a stage: gradients of every stage are reduced, and no product is lost."""
    traces = captured(server, schedule, sharding=2)
    counts = [matmuls(trace) for trace in traces]
    assert sum(count[Phase.FORWARD] for count in counts) == MICROBATCHES * (LAYERS * MATMULS + 1)
    for trace, count in zip(traces, counts, strict=True):
        assert count[Phase.BACKWARD] == 2 * count[Phase.FORWARD]
        assert any(type(e) is Collective and e.kind == "reduce_scatter" for e in trace.events)


def test_captures_repeat(server: CaptureServer) -> None:
    """Two captures of DualPipeV, whose forward and backward TorchTitan runs in two threads, are the same. That the second job
    prints less often makes no difference to it, but it has to be captured, too.
    """
    first, again = (captured(server, "DualPipeV", more=("--metrics.log_freq", often)) for often in ("10", "20"))
    assert [trace.events for trace in first] == [trace.events for trace in again]


# ---- what bounds of a pipeline's step take for granted (`autosac.configurations.bounds`) ---------------------------------

INPUT_BYTES = 64 * 256 * 2  # of a stage: 64 tokens of 256 numbers in 16 bits
RESHARDED = ("--parallelism.fsdp_reshard_after_forward", "always")


def always_there(trace: Trace) -> list[int]:
    """Storages that are allocated before the step and not freed in it."""
    allocated = {event.storage for event in trace.prologue if type(event) is Alloc}
    ended = {event.storage for part in (trace.prologue, trace.events) for event in part if type(event) is Free}
    return sorted(allocated - ended)


@pytest.mark.parametrize("schedule", ("GPipe", "1F1B", "Interleaved1F1B"))
def test_a_stage_holds_what_it_receives_of_every_microbatch(server: CaptureServer, schedule: str) -> None:
    """A buffer for each microbatch of each stage and neighbour, during the whole step: one neighbour of a single stage; three
    of the two stages of a rank.
    """
    for trace in captured(server, schedule, sharding=2):
        buffers = [
            trace.storages[s] for s in always_there(trace) if trace.storages[s].op == "aten.empty_strided.default"
        ]
        neighbours = 3 if schedule == "Interleaved1F1B" else 1
        assert [row.nbytes for row in buffers].count(INPUT_BYTES) == neighbours * MICROBATCHES


@pytest.mark.parametrize(("schedule", "stage", "count"), [("GPipe", 1, 4), ("1F1B", 1, 1), ("Interleaved1F1B", 1, 2)])
def test_gathers_of_a_forward_wait_for_the_stream_of_the_model(
    server: CaptureServer, schedule: str, stage: int, count: int
) -> None:
    """Forwards that follow a forward of their stage gather their first layer, and wait for all that the compute stream has
    been given before, what is received among it. 1F1B's alternate with backwards; the runtime of schedules with several stages
    on a rank gathers each stage once in advance.
    """
    trace = captured(server, schedule, sharding=2, more=RESHARDED)[stage]
    received = {e.work for e in trace.events if type(e) is Collective and e.kind == "recv"}
    first = min(layers_of(trace))
    waiting: set[int] = set()  # streams that have waited for all that is on the compute stream
    gathered = 0
    for event in trace.events:
        if (type(event) is Op and event.stream == 0) or (type(event) is WorkWait and event.work in received):
            waiting.clear()
        elif type(event) is StreamWait and event.other == 0:
            waiting.add(event.stream)
        elif type(event) is Collective and is_gather_of(trace, event, first):
            assert event.stream in waiting
            gathered += 1
    assert gathered == count


def is_gather_of(trace: Trace, event: Collective, layer: int) -> bool:
    """Whether a forward gathers a layer's parameters."""
    made = (event.kind, event.phase, trace.modules[event.module])
    return event.stream != 0 and made == ("all_gather", Phase.FORWARD, f"layers.{layer}")


def layers_of(trace: Trace) -> set[int]:
    """The numbers of its layers."""
    return {int(name.split(".")[1]) for name in trace.info.parameter_shapes if name.startswith("layers.")}


@pytest.mark.parametrize(("schedule", "layers"), [("GPipe", 2), ("1F1B", 2), ("Interleaved1F1B", 1)])
def test_gradients_of_the_first_stage_are_reduced_after_its_last_backward(
    server: CaptureServer, schedule: str, layers: int
) -> None:
    """Those of its layers, and of the embedding."""
    trace, _ = captured(server, schedule, sharding=2)
    last = max(i for i, e in enumerate(trace.events) if type(e) is Op and e.phase is Phase.BACKWARD)
    reduced = [i for i, e in enumerate(trace.events) if type(e) is Collective and e.kind == "reduce_scatter"]
    assert sum(i > last for i in reduced) >= layers + 1

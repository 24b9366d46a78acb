"""Stages of which few microbatches run: no byte of the trace differs from that of a step in which all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosac.capture.jobs.copied_parts import BACKWARD, FORWARD
from autosac.capture.jobs.microbatches import PartKind, kinds_of, orders_of, running_in
from autosac.capture.process.server import CaptureServer
from autosac.capture.process.worker import AGAIN
from autosac.capture.record.repeats import Numbering
from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs
from autosac.trace import Free, Trace
from tests.capture.copies import Both, capturing_both, requests_under_plans

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the jobs are TorchTitan 0.2's")

MICROBATCHES, STEPS = 6, 2
RUN = 3 + 4  # of both steps: the first two and the last, then the first three and the last
ALWAYS = ("--parallelism.fsdp_reshard_after_forward", "always")
DEEPSEEK = ("--model.name", "deepseek_v3")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Captures each request whole, and with microbatches copied, counting forwards of stages."""
    owner, method = "torch.distributed.pipelining.stage:_PipelineStageBase", "forward_maybe_with_nosync"
    with capturing_both(tmp_path_factory.mktemp("worker"), request("1F1B"), owner, method) as both:
        yield both


def request(
    schedule: str,
    rank: int = 0,
    *,
    sharding: int = 1,
    tensor: int = 1,
    context: int = 1,
    checkpointing: str = "none",
    observe: bool = False,
    more: Sequence[str] = (),
    layers: int | None = 4,
    count: int = MICROBATCHES,
) -> TitanRequest:
    """A rank of one of two stages of a debug model; of four if it has all its layers (None), two a rank. A step has `count`
    microbatches.
    """
    degrees = {"pipeline": 2, "tensor": tensor, "data_parallel_shard": sharding}
    names = {"data_parallel_shard": "data_parallel_shard_degree"}
    arguments = [
        word
        for name, degree in degrees.items()
        for word in (f"--parallelism.{names.get(name, f'{name}_parallel_degree')}", str(degree))
    ]
    return TitanRequest(
        config_file=None,
        overrides=(
            *("--model.name", "llama3", "--model.flavor", "debugmodel"),
            *("--training.local_batch_size", str(count), "--training.seq_len", "64"),
            *("--parallelism.pipeline_parallel_schedule", schedule),
            *arguments,
            *more,
        ),
        world_size=2 * sharding * tensor * context,
        rank=rank * sharding * tensor * context,
        checkpointing=checkpointing,
        observe=observe,
        stage_inputs=(
            ((1, 64 // tensor, 256), (64 // tensor * 256, 256, 1), "float32" if sharding == 1 else "bfloat16"),
        )
        if rank
        else None,
        layers=layers,
    )


REQUESTS = {
    "1F1B, first stage": request("1F1B", 0),
    "1F1B, last stage": request("1F1B", 1),
    "1F1B, FSDP, observed": request("1F1B", 0, sharding=2, observe=True),
    "1F1B, FSDP, selective": request("1F1B", 1, sharding=2, checkpointing="selective-op"),
    "1F1B, loss parallel, full": request("1F1B", 1, tensor=2, checkpointing="full"),
    "GPipe, FSDP and TP": request("GPipe", 1, sharding=2, tensor=2, checkpointing="selective-op"),
    "Interleaved1F1B, FSDP": request("Interleaved1F1B", 0, sharding=2, checkpointing="full", layers=None),
    "Interleaved1F1B, last": request("Interleaved1F1B", 1, observe=True, layers=None),
    "1F1B, accumulated": request("1F1B", 1, sharding=2, more=("--training.global_batch_size", "24")),
    "1F1B, CP": request("1F1B", 0, more=("--parallelism.context_parallel_degree", "2"), context=2),
    "1F1B, experts": request("1F1B", 0, more=DEEPSEEK),
}
# With parameters that forwards free: how many of 12 microbatches run in the first step, and in the recorded one. Beside the
# first and the last there is one, in the recorded step there are two, of each kind of forward (after a forward, after a
# backward) and of backward (after either, of either kind of forward):
# - 1F1B, of two stages: F0 F1 B0 F2 B1 ... F11 B10 B11. One forward comes after another one, F1; then F2 and F3, of which the
#   backwards come after forwards. Of the last stage, F0 B0 F1 B1 ..., all are alike.
# - GPipe: all forwards are alike, and all backwards.
# - LoopedBFS, two stages a rank: as GPipe, but backwards come last microbatch first, so 10 and 9 are compared.
# - Interleaved1F1B: both stages of a rank have parts of most kinds; the first rank one kind of which there is a single part.
FREED = {
    "1F1B, first": (request("1F1B", 0, sharding=2, more=ALWAYS, count=12), 4 + 5),
    "1F1B, last, selective": (
        request("1F1B", 1, sharding=2, more=ALWAYS, count=12, checkpointing="selective-op"),
        3 + 4,
    ),
    "1F1B, TP, full": (request("1F1B", 0, sharding=2, tensor=2, more=ALWAYS, count=12, checkpointing="full"), 4 + 5),
    "GPipe, observed": (request("GPipe", 0, sharding=2, more=ALWAYS, count=12, observe=True), 3 + 4),
    "Interleaved1F1B": (request("Interleaved1F1B", 0, sharding=2, more=ALWAYS, layers=None, count=12), 10 + 14),
    "Interleaved1F1B, last, full": (
        request("Interleaved1F1B", 1, sharding=2, more=ALWAYS, layers=None, count=12, checkpointing="full"),
        8 + 11,
    ),
    "LoopedBFS": (request("LoopedBFS", 0, sharding=2, more=ALWAYS, layers=None, count=12), 8 + 12),
    "1F1B, accumulated": (
        request("1F1B", 0, sharding=2, more=(*ALWAYS, "--training.global_batch_size", "48"), count=12),
        8 + 10,
    ),
}
WHOLE = {
    "ZBVZeroBubble": request("ZBVZeroBubble", layers=None),
    "InterleavedZeroBubble": request("InterleavedZeroBubble", layers=None),
    "DualPipeV": request("DualPipeV", layers=None),
}


def test_copied_microbatches_change_nothing(tmp_path: Path, captured: Both) -> None:
    """Under every schedule that runs a backward in one go, of both stages, with FSDP, TP, loss parallelism and experts, and
    under all ways of checkpointing: the traces are the same, and 3 of 6 microbatches have run, then 4.
    """
    for name, (whole, copied) in zip(REQUESTS, captured(tmp_path, tuple(REQUESTS.values())), strict=True):
        assert (name, whole.code, copied.code) == (name, 0, 0)
        assert whole.trace == copied.trace, name
        stages = whole.runs // (STEPS * MICROBATCHES)
        assert copied.runs == stages * RUN, name


def test_copies_of_microbatches_that_free_parameters_change_nothing(tmp_path: Path, captured: Both) -> None:
    """Under schedules with whole backwards, with parameters that forwards free and backwards gather: the traces are the same,
    and few microbatches of each kind have run.
    """
    requests = tuple(asked for asked, _ in FREED.values())
    for (name, (_, count)), (whole, copied) in zip(FREED.items(), captured(tmp_path, requests), strict=True):
        assert (name, whole.code, copied.code) == (name, 0, 0)
        assert whole.trace == copied.trace, name
        assert copied.runs == count, name


def test_what_is_not_alike_runs_whole(tmp_path: Path, captured: Both) -> None:
    """Backwards in two parts: the traces are the same, and all microbatches have run."""
    for name, (whole, copied) in zip(WHOLE, captured(tmp_path, tuple(WHOLE.values())), strict=True):
        assert (name, whole.code, copied.code) == (name, 0, 0)
        assert whole.trace == copied.trace, name
        assert copied.runs == whole.runs, name


def test_models_that_count_run_whole(tmp_path: Path, captured: Both) -> None:
    """A model that counts its forwards, of which each fifth does more: the second and the third microbatch leave other numbers
    behind, so all run, and the trace is that of the whole step.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["1F1B, first stage"]], "counting")
    assert (whole.code, copied.code) == (0, 0)
    assert whole.trace == copied.trace
    assert copied.runs == whole.runs


def test_models_that_remember_a_graph_run_whole(tmp_path: Path, captured: Both) -> None:
    """A model that keeps a result with its graph: a copy would have none, so all microbatches run."""
    ((whole, copied),) = captured(tmp_path, [REQUESTS["1F1B, first stage"]], "remembering")
    assert (whole.code, copied.code) == (0, 0)
    assert whole.trace == copied.trace
    assert copied.runs == whole.runs


def test_the_last_microbatch_is_compared(tmp_path: Path, captured: Both) -> None:
    """A model that does more from its fourth forward on, the third microbatch's: the last one is not as the copied ones are,
    and the capture has to be made anew.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["1F1B, first stage"]], "growing from 4")
    assert (whole.code, copied.code) == (0, AGAIN)


def test_microbatches_of_the_recorded_step_are_compared(tmp_path: Path, captured: Both) -> None:
    """A model that does more in one backward, that of the recorded step's third microbatch, which is compared with the second:
    the first step has copied one of them, so the capture has to be made anew.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["1F1B, first stage"]], "returning")
    assert (whole.code, copied.code) == (0, AGAIN)


def test_later_cuts_compare_nothing(tmp_path: Path, captured: Both) -> None:
    """Of a cut that is not the job's first 3 of 6 microbatches run in both steps, and the trace is that of the whole steps."""
    asked = replace(request("1F1B", more=("--model.flavor", "8B"), layers=None), cut=1, cuts=2)
    ((whole, copied),) = captured(tmp_path, [asked])
    assert (whole.code, copied.code) == (0, 0)
    assert whole.trace == copied.trace
    assert (copied.runs, whole.runs) == (STEPS * 3, STEPS * MICROBATCHES)


def test_plans_of_copied_microbatches(tmp_path: Path, captured: Both, capture_server: CaptureServer) -> None:
    """Under a plan that keeps nothing, and one that keeps every second result, the recomputations of all microbatches are the
    same, and say which forward they repeat.
    """
    asked = REQUESTS["1F1B, FSDP, observed"]
    requests = requests_under_plans(asked, capture_server, tmp_path)
    for whole, copied in captured(tmp_path, requests):
        assert (whole.code, copied.code) == (0, 0)
        assert whole.trace == copied.trace
        assert (copied.runs, whole.runs) == (RUN, STEPS * MICROBATCHES)


def parts(text: str) -> list[tuple[str, int]]:
    """An order of forwards (F) and backwards (B) with their microbatches."""
    return [({"F": FORWARD, "B": BACKWARD}[word[0]], int(word[1:])) for word in text.split()]


def test_kinds_of_parts() -> None:
    """F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5 where forwards free parameters: F1 is the only forward after one, so it runs with
    its backward; F2 and F3 are compared, and their backwards, which come after forwards. Without that, 1 and 2 are compared
    in all.
    """
    order = parts("F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5")
    freed = kinds_of(order, is_plain=False)
    assert freed[FORWARD, 0] == PartKind(FORWARD)
    assert freed[FORWARD, 1] == PartKind(FORWARD, FORWARD)
    assert freed[BACKWARD, 1] == PartKind(BACKWARD, FORWARD, FORWARD)
    assert freed[BACKWARD, 2] == PartKind(BACKWARD, FORWARD, BACKWARD)
    assert freed[BACKWARD, 5] == PartKind(BACKWARD, BACKWARD, BACKWARD)
    assert running_in(freed) == {0, 1, 2, 3, 5}
    assert running_in(freed, 1) == {0, 1, 2, 5}
    kept = kinds_of(order, is_plain=True)
    assert running_in(kept) == {0, 1, 2, 5}


def test_orders_of_schedules() -> None:
    """Forwards are counted from 0 (PyTorch 2.13 counts those of 1F1B's last stage from 1), and backwards are as they are, the
    last microbatch's first in some schedules; idle places and other actions are left out.
    """
    kinds = SimpleNamespace(F=SimpleNamespace(name="FORWARD"), B=SimpleNamespace(name="FULL_BACKWARD"))
    reduce = SimpleNamespace(stage_index=1, computation_type=SimpleNamespace(name="REDUCE_GRAD"), microbatch_index=None)

    def action(stage: int, kind: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(stage_index=stage, computation_type=getattr(kinds, kind), microbatch_index=index)

    last = [None, action(1, "F", 1), action(1, "B", 0), action(1, "F", 2), action(1, "B", 1), reduce]
    first = [action(0, "F", 0), action(0, "F", 1), action(0, "B", 1), action(0, "B", 0)]
    schedule = SimpleNamespace(pipeline_order={0: first, 1: last})
    assert orders_of(schedule) == {0: parts("F0 F1 B1 B0"), 1: parts("F0 B0 F1 B1")}
    assert orders_of(SimpleNamespace()) == {}


def test_what_is_held_has_positions_of_its_own() -> None:
    """Of two stretches that free what was held before they began (storages 7 and 9) the rows are the same, and a third one's
    follow from what is held then (12); what is not held stands for itself.
    """
    rows = []
    for index, held in (1, 7), (2, 9):
        numbering = Numbering(index)
        numbering.storages.hold((-1, held))
        rows.append(numbering.positions(Free(held)))
    assert rows[0] == rows[1] != Free(7)
    third = Numbering(3)
    third.storages.hold((-1, 12))
    assert third.row(rows[0]) == Free(12)
    assert third.positions(Free(7)) == Free(7)


def table() -> str:
    """A schedule of four stages on two ranks, stage by stage: forwards, backwards of inputs, backwards of weights."""
    rows: list[list[str]] = [[], []]
    for action, stages in ("F", range(4)), ("I", reversed(range(4))), ("W", range(4)):
        for stage in stages:
            for index in range(MICROBATCHES):
                rows[stage % 2].append(f"{stage}{action}{index}")
                rows[1 - stage % 2].append("")
    return "\n".join(map(",".join, rows)) + "\n"


def test_a_wrong_guess_is_captured_whole(tmp_path: Path, captured: Both, capture_server: CaptureServer) -> None:
    """A table of actions that splits backwards after forwards have been copied: the process that has copied them ends with a
    code of its own, and the capture is made anew.
    """
    file = tmp_path / "actions.csv"
    file.write_text(table())
    asked = request(
        "PipelineScheduleMulti", more=("--parallelism.pipeline_parallel_schedule_csv", str(file)), layers=None
    )
    ((whole, copied),) = captured(tmp_path, [asked])
    assert (whole.code, copied.code) == (0, AGAIN)
    again, first = capture_server.capture(asked), Trace.load(tmp_path / "0.whole")
    for part in ("signatures", "storages", "prologue", "events"):
        assert getattr(again, part) == getattr(first, part), part

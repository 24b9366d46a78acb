"""Stages of which few microbatches run: no byte of the trace differs from that of a step in which all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.process.worker import AGAIN
from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs
from autosac.trace import Trace
from tests.capture.copies import Both, capturing_both, requests_under_plans

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the jobs are TorchTitan 0.2's")

MICROBATCHES, STEPS = 6, 2
RUN = 4  # of each step: the first three and the last
COUNTS = {"1F1B, experts": MICROBATCHES + RUN}  # in the first step, the third microbatch is not yet like the second
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
) -> TitanRequest:
    """A rank of one of two stages of a debug model; of four if it has all its layers (None), two a rank."""
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
            *("--training.local_batch_size", str(MICROBATCHES), "--training.seq_len", "64"),
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
WHOLE = {
    "parameters are let go of": request("1F1B", 0, sharding=2, more=ALWAYS),
    "and kept by the backward": request("Interleaved1F1B", 1, sharding=2, more=ALWAYS, layers=None),
    "ZBVZeroBubble": request("ZBVZeroBubble", layers=None),
    "InterleavedZeroBubble": request("InterleavedZeroBubble", layers=None),
    "DualPipeV": request("DualPipeV", layers=None),
}


def test_copied_microbatches_change_nothing(tmp_path: Path, captured: Both) -> None:
    """Under every schedule that runs a backward in one go, of both stages, with FSDP, TP, loss parallelism and experts, and
    under all ways of checkpointing: the traces are the same, and 4 of 6 microbatches have run (of experts, only in the second
    step).
    """
    for name, (whole, copied) in zip(REQUESTS, captured(tmp_path, tuple(REQUESTS.values())), strict=True):
        assert (name, whole.code, copied.code) == (name, 0, 0)
        assert whole.trace == copied.trace, name
        stages = whole.runs // (STEPS * MICROBATCHES)
        assert copied.runs == stages * COUNTS.get(name, STEPS * RUN), name


def test_what_is_not_alike_runs_whole(tmp_path: Path, captured: Both) -> None:
    """Parameters that are gathered again for some microbatches, and backwards in two parts: the traces are the same, and all
    microbatches have run.
    """
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


def test_the_last_microbatch_is_compared(tmp_path: Path, captured: Both) -> None:
    """A model that does more from its fifth forward on, the fourth microbatch's: the last one is not as the copied ones are,
    and the capture has to be made anew.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["1F1B, first stage"]], "growing from 5")
    assert (whole.code, copied.code) == (0, AGAIN)


def test_plans_of_copied_microbatches(tmp_path: Path, captured: Both, capture_server: CaptureServer) -> None:
    """Under a plan that keeps nothing, and one that keeps every second result, the recomputations of all microbatches are the
    same, and say which forward they repeat.
    """
    asked = REQUESTS["1F1B, FSDP, observed"]
    requests = requests_under_plans(asked, capture_server, tmp_path)
    for whole, copied in captured(tmp_path, requests):
        assert (whole.code, copied.code) == (0, 0)
        assert whole.trace == copied.trace
        assert (copied.runs, whole.runs) == (STEPS * RUN, STEPS * MICROBATCHES)


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

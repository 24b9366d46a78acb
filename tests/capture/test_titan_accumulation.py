"""Jobs that accumulate gradients, of which few microbatches run: no byte of the trace differs from that of the whole step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.process.worker import AGAIN
from autosac.capture.request import TitanRequest
from autosac.titan.version import has_python_jobs
from tests.capture.copies import Both, capturing_both, requests_under_plans

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the jobs are TorchTitan 0.2's")

MICROBATCHES, STEPS = 6, 2
RUN = 4  # of each step: the first three and the last
# DDP's third step is the one that is kept, and in its first one it does more for the second microbatch than for the third.
# Experts hold a tensor from one microbatch to the next, which the first one of all does not end: in the first step no two in a
# row are alike before the last.
COUNTS = {"DDP": (3 * MICROBATCHES, 1 + 3 * RUN), "experts": (STEPS * MICROBATCHES, MICROBATCHES + RUN)}


def request(
    *,
    gpus: int = 1,
    checkpointing: str = "none",
    observe: bool = False,
    model: str = "llama3",
    flavor: str = "debugmodel",
    more: Sequence[str] = (),
    ranks: int | None = None,
    microbatches: int = MICROBATCHES,
) -> TitanRequest:
    """A debug model of two layers whose batches are split among so many `ranks` (default: all)."""
    return TitanRequest(
        config_file=None,
        overrides=(
            *("--model.name", model, "--model.flavor", flavor),
            *("--training.local_batch_size", "2", "--training.seq_len", "64"),
            *("--training.global_batch_size", str(2 * (ranks or gpus) * microbatches)),
            *more,
        ),
        world_size=gpus,
        rank=0,
        checkpointing=checkpointing,
        observe=observe,
        layers=2,
    )


REQUESTS = {
    "one GPU": request(),
    "FSDP, selective, observed": request(gpus=2, checkpointing="selective-op", observe=True),
    "HSDP, full": request(gpus=4, checkpointing="full", more=("--parallelism.data_parallel_replicate_degree", "2")),
    "DDP": request(
        gpus=2,
        more=("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"),
    ),
    "FSDP and TP": request(gpus=4, more=("--parallelism.tensor_parallel_degree", "2"), ranks=2),
    "experts": request(gpus=2, model="deepseek_v3", more=("--parallelism.expert_parallel_degree", "2")),
    "compiled": request(gpus=2, more=("--compile.enable",)),
    "pipeline, FSDP": request(gpus=4, more=("--parallelism.pipeline_parallel_degree", "2"), ranks=2),
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Captures each request whole, and with microbatches copied, counting the microbatches that run."""
    owner, method = "torchtitan.train:Trainer", "forward_backward_step"
    with capturing_both(tmp_path_factory.mktemp("worker"), REQUESTS["compiled"], owner, method) as both:
        yield both


def test_copied_microbatches_change_nothing(tmp_path: Path, captured: Both) -> None:
    """Under all kinds of data parallelism, with TP, a pipeline, experts, checkpointing and compilation: the traces are the
    same, and 4 of 6 microbatches have run.
    """
    for name, (whole, copied) in zip(REQUESTS, captured(tmp_path, tuple(REQUESTS.values())), strict=True):
        assert (name, whole.code, copied.code) == (name, 0, 0)
        assert whole.trace == copied.trace, name
        assert (name, whole.runs, copied.runs) == (name, *COUNTS.get(name, (STEPS * MICROBATCHES, STEPS * RUN)))


def test_few_microbatches_run(tmp_path: Path, captured: Both) -> None:
    """Four microbatches are not worth copying one of them: all run."""
    ((whole, copied),) = captured(tmp_path, [request(microbatches=4)])
    assert whole.trace == copied.trace
    assert copied.runs == whole.runs == STEPS * 4


def test_models_that_count_run_whole(tmp_path: Path, captured: Both) -> None:
    """A model that counts its forwards, of which each fifth does more: the second and the third microbatch leave other numbers
    behind, so all run, and the trace is that of the whole step.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["one GPU"]], "counting")
    assert (whole.code, copied.code) == (0, 0)
    assert whole.trace == copied.trace
    assert copied.runs == whole.runs


def test_the_last_microbatch_is_compared(tmp_path: Path, captured: Both) -> None:
    """A model that does more from its fourth forward on, when the last microbatch runs: it is not like the copied ones, so the
    capture has to be made anew.
    """
    ((whole, copied),) = captured(tmp_path, [REQUESTS["one GPU"]], "growing from 4")
    assert (whole.code, copied.code) == (0, AGAIN)


def test_plans_of_copied_microbatches(tmp_path: Path, captured: Both, capture_server: CaptureServer) -> None:
    """Under a plan that keeps nothing, and one that keeps every second result, the recomputations of all microbatches are the
    same, and say which forward they repeat.
    """
    asked = request(gpus=2, observe=True)
    requests = requests_under_plans(asked, capture_server, tmp_path)
    for whole, copied in captured(tmp_path, requests):
        assert (whole.code, copied.code) == (0, 0)
        assert whole.trace == copied.trace
        assert (copied.runs, whole.runs) == (STEPS * RUN, STEPS * MICROBATCHES)

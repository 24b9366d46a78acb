"""What a capture tells before it is done: what the captures of later pipeline stages need."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from autosac.capture.process.server import CaptureFuture, CaptureServer
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError
from autosac.induction import early_info
from autosac.jobs.titan import TitanJob
from autosac.simulation import Target
from autosac.trace import Cut, Parallelism, Trace, TraceInfo
from traces import trace_of

JOB = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size", "4")
JOB += ("--training.seq_len", "64", "--parallelism.pipeline_parallel_degree", "2")
JOB += ("--parallelism.pipeline_parallel_schedule", "1F1B")


def test_a_pipeline_tells_early(capture_server: CaptureServer) -> None:
    """The first stage tells its shapes before its trace is there; they are those that the trace's info has in the end."""
    request = TitanRequest(config_file=None, overrides=JOB, world_size=4, checkpointing="none")
    future = capture_server.submit(request)
    early = future.early()
    assert not future.done()
    info = future.result().info
    assert early.stage_outputs and early.stage_outputs == info.stage_outputs
    assert early.parallelism == info.parallelism and early.parallelism.pp == 2
    later = TitanRequest(
        config_file=None,
        overrides=JOB,
        world_size=4,
        rank=2,
        checkpointing="none",
        stage_inputs=early.stage_outputs,
    )
    assert capture_server.capture(later).info.rank == 2


def test_what_is_not_told_early() -> None:
    """A capture that tells nothing early tells when it is done; a failed one fails here too; others are waited for."""
    done, failed = CaptureFuture(), CaptureFuture()
    done.set_result(trace_of(parallelism=Parallelism(pp=3)))
    failed.set_exception(CaptureError("no"))
    assert early_info(done) == TraceInfo(parallelism=Parallelism(pp=3))
    with pytest.raises(CaptureError):
        failed.early()
    plain: Future[Trace] = Future()
    plain.set_result(trace_of(rank=3))
    assert early_info(plain) == TraceInfo(rank=3)


def test_stages_of_a_job() -> None:
    """Four stages of eight ranks begin at 0, 2, 4 and 6; the later ones know their inputs, and whether cuts are worth it."""
    job = TitanJob(config_file="job.toml", target=Target.of("h100-sxm-80gb", 8), world_size=8)
    told = TraceInfo(parallelism=Parallelism(pp=4), stage_outputs=(((1, 2), (2, 1), "bfloat16"),))
    stages = job.stages(told)
    assert [stage.rank for stage in stages] == [0, 2, 4, 6]
    assert [stage.stage_inputs for stage in stages] == [None] + [(((1, 2), (2, 1), "bfloat16"),)] * 3
    assert [stage.whole for stage in stages] == [False, True, True, True]
    assert not any(stage.whole for stage in job.stages(replace(told, cut=Cut(3, 1, 10))))

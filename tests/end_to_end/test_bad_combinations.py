"""Combinations that TorchTitan refuses end with its own message, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autosac.errors import CaptureError
from autosac.trace import Trace

Capture = Callable[..., Trace]


@pytest.mark.parametrize(
    ("model", "world_size", "options", "words"),
    [
        ("llama3", 4, {"tensor_parallel_degree": 3}, "Invalid parallel dims"),
        ("llama3", 6, {"data_parallel_shard_degree": 4}, "!= WORLD_SIZE(6)"),
        ("llama3", 4, {"tensor_parallel_degree": 2, "training__seq_len": 127}, "Sequence length 127 must be divisible"),
        (
            "llama3",
            4,
            {"context_parallel_degree": 2, "training__seq_len": 130},
            "Sequence length 130 must be divisible",
        ),
        ("llama3", 16, {"pipeline_parallel_degree": 16}, "cannot be greater than effective layers (5)"),
        ("llama3", 2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "2F2B"}, "Unknown schedule name"),
        (
            "llama3",
            2,
            {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4},
            "Batch size 2 must be divisible by microbatch_size 4",
        ),
        ("llama3", 8, {"training__global_batch_size": 24}, "global batch size must be multiple of local batch size"),
        (
            "llama3",
            8,
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, "tensor_parallel_degree": 4},
            "DDP has not supported > 1D parallelism",
        ),
        (
            "deepseek_v3",
            8,
            {"expert_parallel_degree": 2, "tensor_parallel_degree": 4, "expert_tensor_parallel_degree": 2},
            "Currently we only support ETP=TP or ETP=1",
        ),
        (
            "deepseek_v3",
            4,
            {"expert_parallel_degree": 2, "tensor_parallel_degree": 4},
            "has one GPU here, in the real job",
        ),
        ("llama3", 4, {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}, "Async TP requires 'model'"),
    ],
)
def test_refusals(capture: Capture, model: str, world_size: int, options: dict[str, Any], words: str) -> None:
    """The message is TorchTitan's, on one line, and comes once."""
    spelled = {key if "__" in key else f"parallelism__{key}": value for key, value in options.items()}
    with pytest.raises(CaptureError) as caught:
        capture(model, world_size, **spelled)
    message = str(caught.value)
    assert message.count(words) == 1 and "\n" not in message and "Traceback" not in message


def test_a_refused_pipeline_is_one_line(autosac: Callable[..., Any], job_file: str) -> None:
    """Planning captures several times and several stages: what fails in all of them is told once, with exit code 1."""
    command = ["plan", job_file, "--gpu", "h100-sxm-80gb", "--world-size", "4", "--budget", "50%", "--quiet"]
    pipeline = ["--parallelism.pipeline_parallel_degree=4", "--parallelism.pipeline_parallel_schedule=None"]
    ran = autosac(*command, "--", *pipeline)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("autosac: building the job: ValueError: Unknown schedule name 'None'")
    assert ran.err.count("\n") == 1

"""Searches of TorchTitan's debug model on two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosac.configurations.space.offers import Offer
from autosac.configurations.space.request import SearchRequest
from autosac.configurations.space.space import Space

JOB = """
[model]
name = "llama3"
flavor = "debugmodel"

[training]
local_batch_size = 8
seq_len = 1024
"""
SPACE = Space(
    data_parallel_replicate=(1,),
    tensor_parallel=(1,),
    context_parallel=(1,),
    pipeline_parallel=(1, 2),
    pipeline_schedule=("1F1B",),
    microbatch=(4, 8),
    checkpointing=("none", "full"),
    reshard_after_forward=("always",),
)
TINY = SPACE.model_copy(update={"pipeline_parallel": (1,), "microbatch": (8,)})
SIZE = ("--training.seq_len", "1024")  # as in the job's file
BUDGET = "560MiB"  # some layouts fit as they are, some with everything recomputed, some not at all


def inputs(job: Path, **changes: Any) -> SearchRequest:
    """A search on two H100s."""
    given = {"offers": (Offer(gpu="h100-sxm-80gb", world_size=2),), "space": SPACE, "budget": BUDGET, "gap": 0.0}
    return SearchRequest(job=str(job), workers=0, **{**given, **changes})

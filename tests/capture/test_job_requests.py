"""Requests for captures of TorchTitan jobs: their lines of JSON, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from autosac.capture.moe_load import MoELoad
from autosac.capture.request import TitanRequest
from autosac.errors import UsageError
from autosac.target import TargetGPU

PLAIN = TitanRequest(config_file=None)
OTHER = TitanRequest(
    config_file="job.toml",
    overrides=("--training.seq_len", "128"),
    world_size=16,
    rank=9,
    gpu=TargetGPU(name="L40S", memory_bytes=2**35, compute_capability=(8, 9), sm_count=142, l2_bytes=2**26),
    checkpointing="plan",
    plan_file="plan.json",
    observe=True,
    repeats=False,
    steps=3,
    ranks_per_node=4,
    stage_inputs=(((2, 128, 256), (32768, 256, 1), "bfloat16"), ((), (), "float32")),
    layers=4,
    cut=-2,
    cuts=2,
    loss_chunks=8,
    optimizer_slice_bytes=2**28,
    moe_load=MoELoad(kind="zipf", exponent=1.5, seed=2, draw=3),
)


def test_requests_survive_their_line() -> None:
    """With defaults, with other values everywhere, and with no inputs of a stage."""
    assert all(getattr(OTHER, each.name) != getattr(PLAIN, each.name) for each in fields(TitanRequest))
    for request in (PLAIN, OTHER, replace(OTHER, stage_inputs=())):
        line = request.to_json()
        assert "\n" not in line and TitanRequest.from_json(line) == request


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({}, "job"),
        ({"checkpointing": "selective-op"}, "selective-op"),
        ({"checkpointing": "selective-2"}, "selective-2"),
        ({"checkpointing": "plan", "plan_file": "p"}, "none"),
        ({"checkpointing": "full", "observe": True}, "none"),
    ],
)
def test_what_replaces_the_jobs_checkpointing(mode: dict[str, Any], expected: str) -> None:
    """Nothing does where a plan is applied or modules are observed."""
    assert TitanRequest(config_file=None, **mode).checkpointing_mode() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"world_size": 0}, "world size 0: it must be at least 1"),
        ({"world_size": 2, "rank": 2}, "rank 2 is not within a world of 2"),
        ({"rank": -1}, "rank -1 is not within a world of 1"),
        ({"layers": 0}, "0 layers: there must be at least one"),
        ({"steps": 1}, "at least two steps are needed"),
        ({"checkpointing": "selective-0"}, "activation checkpointing 'selective-0': expected none, full"),
        ({"checkpointing": "some"}, "activation checkpointing 'some': expected none, full"),
    ],
)
def test_requests_that_are_refused(values: dict[str, Any], message: str) -> None:
    """In one line."""
    with pytest.raises(UsageError, match=f"^{message}"):
        TitanRequest(config_file=None, **values)

"""The bytes that generated kernels read and write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.trace import Trace

pytest.importorskip("triton")

RANKS, ROWS, WIDTH = 8, 16, 64
GATHERED = RANKS * ROWS * WIDTH * 2  # bytes, in bfloat16


@pytest.fixture
def group() -> Iterator[None]:
    """Eight ranks, none of which is there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _make(device: torch.device) -> tuple[nn.Module, Any]:
    name = dist.distributed_c10d._get_default_group().group_name

    @torch.compile(fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x * 3, 0, name) * 2

    @torch.compile(fullgraph=True)
    def joined(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 1, name) * 2

    def step() -> None:
        doubled(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=device))
        joined(torch.ones(1, ROWS, WIDTH, dtype=torch.bfloat16, device=device))

    return nn.Module(), step


def _traffic(trace: Trace) -> list[int]:
    """Of the generated kernels in their order."""
    signatures = [trace.signatures[op.signature] for _, op in trace.operators()]
    return [dict(s.arguments)["nbytes"] for s in signatures if s.name.startswith("triton.")]  # type: ignore[misc]


def test_what_a_collective_has_written_is_read(group: None) -> None:
    """A kernel after an all-gather reads what was gathered and writes as much, also where it joins the ranks' parts along
    another dimension; the one before it reads and writes a rank's part.
    """
    trace = capture_eager(_make, EagerRequest())
    assert _traffic(trace) == [2 * GATHERED // RANKS, 2 * GATHERED, 2 * GATHERED]

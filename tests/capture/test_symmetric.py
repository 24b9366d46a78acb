"""Products that are fused with the collective after them, in row-wise scaled float8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.capture.compiler.symmetric import OPERATORS
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.trace import Collective, Trace

RANKS, WIDTH, OUT = 8, 64, 32


@pytest.fixture
def group() -> Iterator[None]:
    """Eight ranks, none of which is there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _make(rows: int, device: torch.device) -> tuple[nn.Module, Any]:
    left = torch.empty(rows, WIDTH, dtype=torch.float8_e4m3fn, device=device)
    right = torch.empty(OUT, WIDTH, dtype=torch.float8_e4m3fn, device=device).t()
    scales = torch.ones(rows, 1, device=device), torch.ones(1, OUT, device=device)
    name = dist.distributed_c10d._get_default_group().group_name

    def step() -> None:
        fused = OPERATORS.fused_scaled_matmul_reduce_scatter.default
        shape = [rows, OUT]
        kept = fused(left, right, *scales, "sum", 0, 0, name, shape, None, None, torch.bfloat16, True)
        assert kept.shape == (rows // RANKS, OUT)

    return nn.Module(), step


def _operators(trace: Trace) -> Counter[str]:
    return Counter(trace.signatures[op.signature].name for _, op in trace.operators())


@pytest.mark.parametrize(("rows", "cloned"), [(RANKS * 8, 0), (RANKS * 6, 4), (RANKS * 5, 6)])
def test_scales_that_begin_askew_are_copied(group: None, rows: int, cloned: int) -> None:
    """Parts of 8 scales of 4 bytes begin at multiples of 16, as cuBLAS needs it; of 6 every second one, of 5 every fourth.
    PyTorch clones the others.
    """
    trace = capture_eager(partial(_make, rows), EagerRequest())
    found = _operators(trace)
    assert found["aten._scaled_mm.default"] == RANKS
    assert found["aten.clone.default"] == cloned


def test_each_part_but_the_own_goes_to_another_rank(group: None) -> None:
    """While the next one's product runs: asynchronous transfers of a part each."""
    trace = capture_eager(partial(_make, RANKS * 8), EagerRequest())
    sent = [event for event in trace.events if isinstance(event, Collective)]
    assert len(sent) == RANKS - 1
    assert all(event.asynchronous for event in sent)

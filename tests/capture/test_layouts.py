"""What generated kernels say of layouts: tiles of pointwise kernels, and what a reduction walks across."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager

pytest.importorskip("triton")

ROWS, COLUMNS = 512, 1024


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().amax(1, keepdim=True)


def both_ways(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row by its largest element, and the same stored by columns."""
    return _scaled(x), _scaled(x).t().contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Twice x, stored by columns."""
    return (x * 2).t().contiguous()


def columns(x: torch.Tensor) -> torch.Tensor:
    """The largest element of each column."""
    return x.abs().amax(0)


def _make(device: torch.device, *, of: Callable[..., Any]) -> Any:
    compiled = torch.compile(of, fullgraph=True)
    x = torch.empty(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)

    def step() -> None:
        compiled(x)

    return torch.nn.Identity(), step


def _work(of: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """What the kernels that Inductor generates say of themselves, one after the other."""
    trace = capture_eager(partial(_make, of=of), EagerRequest())
    return (dict(s.arguments) for s in trace.signatures if s.name.startswith("triton."))


def test_a_reduction_that_writes_both_ways_counts_the_rarer() -> None:
    """Read and written by rows, written by columns once: its elements are walked across."""
    assert [work.get("across") for work in _work(both_ways)] == [ROWS * COLUMNS]


def test_a_transposing_kernel_walks_tiles() -> None:
    """One pointwise kernel, contiguous along different dimensions on both sides."""
    assert [(work.get("tiles"), work.get("across")) for work in _work(transposed)] == [(True, None)]


@pytest.mark.parametrize("of", [_scaled, columns])
def test_one_direction_is_neither(of: Callable[..., Any]) -> None:
    """Rows that are read and written as rows, and columns that are reduced side by side, cost nothing more."""
    assert [(work.get("tiles"), work.get("across")) for work in _work(of)] == [(None, None)] * len(list(_work(of)))

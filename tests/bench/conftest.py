"""A tiny model in a file, suites around it, and rows made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.bench.results import PolicyRow

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_step(device, *, tokens, dim=64, blocks=4):
    with device:
        model = Net(dim, blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(tokens, dim, device=device)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
"""

SUITE = """
name = "Tiny"
gpu = "h100-sxm-80gb"
budgets = {budgets}
budget_kind = "active"
policies = {policies}
{more}

[[models]]
name = "net"
make_step = "net.py:make_step"
configurations = [{{ name = "C1", tokens = 512 }}, {{ name = "C2", tokens = 1024 }}]
"""


@pytest.fixture
def write_suite(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model and a suite; returns the suite's path."""

    def write(*, budgets: Any = ("6MiB",), policies: Any = ("none", "full"), more: str = "") -> Path:
        (tmp_path / "net.py").write_text(MODEL)
        path = tmp_path / "suite.toml"
        path.write_text(SUITE.format(budgets=list(budgets), policies=list(policies), more=more))
        return path

    return write


@pytest.fixture
def row() -> Callable[..., PolicyRow]:
    """A row of one configuration with a budget of 100 bytes; the step takes 10 ms, full checkpointing recomputes 4 ms."""

    def make(policy: str, peak: int, recompute_ms: float, **changes: Any) -> PolicyRow:
        return PolicyRow(
            model="net",
            configuration="C1",
            policy=policy,
            budget_bytes=100,
            peak_active_bytes=peak,
            peak_reserved_bytes=2 * peak,
            recompute_ms=recompute_ms,
            **{
                "budget_kind": "active",
                "step_ms": 10 + recompute_ms,
                "reference_ms": 10.0,
                "full_recompute_ms": 4.0,
                "fits_gpu": True,
                **changes,
            },
        )

    return make

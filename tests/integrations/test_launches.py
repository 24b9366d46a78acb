"""Kernels launched below the dispatcher, in units that recompute. Real tensors on the CPU; the kernel writes through NumPy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosac.integrations.apply import apply
from autosac.integrations.recompute.compiled_parts import launched

_LAUNCHES: list[int] = []


def _fill(buffer: torch.Tensor, source: torch.Tensor) -> None:
    """What no schema describes."""
    _LAUNCHES.append(len(buffer))
    buffer.numpy()[...] += 2 * source.numpy()


class Filled(nn.Module):
    """A buffer is read, then filled from a product by a kernel, then read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = self.first(x)
        buffer = torch.ones_like(x)
        before = buffer.sum(dim=0)
        source = y.detach() * 3
        launched(_fill, "fill", (buffer, source), {})
        return self.second(y.sigmoid() * buffer) * before


class Model(nn.Module):
    """One such block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Filled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output."""
        return self.block(x).relu()


def _step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return (out.detach(), *(p.grad for p in model.parameters() if p.grad is not None))


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        (set(), 1),
        ({"aten.ones_like.default"}, 1),
        ({"aten.ones_like.default", "aten.mul.Tensor"}, 0),
        ({"aten.ones_like.default", "aten.mul.Tensor", "aten.addmm.default"}, 0),
    ],
)
def test_a_launch_is_kept_with_all_that_it_may_write(lab: Any, keep: set[str], again: int) -> None:
    """The kernel runs again unless all that it was given is kept: then what is kept has its result. Gradients are bitwise
    those without a plan.
    """
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    expected = _step(copy.deepcopy(model), x)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"block": keep})
    planned = apply(copy.deepcopy(model), plan)
    _LAUNCHES.clear()
    assert lab.same(_step(planned, x), expected)
    assert len(_LAUNCHES) == 1 + again

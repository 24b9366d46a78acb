"""Kernels that ask for more than their arguments hold, in units: bitwise as without a plan. Real tensors on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosac.integrations.apply import apply


class Unit(nn.Module):
    """Something computed from the product of a parameter and the input, under a sine."""

    def __init__(self, function: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return torch.sin(self.function(self.weight * x))


def _aligned(x: Tensor) -> Tensor:
    targets = torch.arange(8).remainder(4).reshape(2, 4) + 1
    return F.ctc_loss(x.log_softmax(-1), targets, torch.tensor([12, 12]), torch.tensor([4, 2]), reduction="none")


def _largest(x: Tensor) -> Tensor:
    found: Tensor = torch.sparse.mm(torch.eye(5).to_sparse_csr(), x, "amax")
    return found


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "conjugates": (torch.linalg.pinv, (5, 4), torch.complex64),
    "unwritten": (_aligned, (12, 2, 6), torch.float32),
    "gradients": (_largest, (5, 3), torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_unit_is_what_it_is_without_a_plan(lab: Any, kind: str) -> None:
    """A mode leaves out what resolves conjugates; CTC leaves its table unwritten; a sparse product asks for gradients."""
    function, shape, dtype = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(Unit(function, torch.randn(shape, dtype=dtype)))
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"0": ()}))
    found = []
    for each in (model, planned):
        out = each(torch.ones(shape, dtype=dtype))
        out.abs().sum().backward()
        found.append((out.detach(), *(p.grad for p in each.parameters())))
    assert lab.same(*found)

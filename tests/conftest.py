"""For all tests: captures are made, not taken from what the user's earlier runs have left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ["AUTOSAC_CACHE"] = "off"


@pytest.fixture(scope="session")
def products() -> Callable[..., Any]:
    """``products(rows=, width=, blocks=)``: the `make_step` of blocks of two products with a ReLU between, and a head.

    A block's first result has rows x 4 width elements and takes long to recompute.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def of(*, rows: int, width: int, blocks: int) -> Callable[[torch.device], Any]:
        def make_step(device: torch.device) -> Any:
            model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, width, bias=False)).to(
                device
            )
            x = torch.randn(rows, width, device=device)

            def step() -> None:
                model(x).sum().backward()

            return model, step

        return make_step

    return of

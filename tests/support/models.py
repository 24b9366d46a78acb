"""Models for tests of other frameworks' integrations."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in a transformer."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out

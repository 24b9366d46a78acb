"""Blocks of two layers for families whose point is what happens around them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, stack


class Plain(nn.Module):
    """Layers, dropout and a moving average if asked for."""

    def __init__(self, width: int, dropout: float = 0.1, average: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.average = average
        self.register_buffer("m", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.a(self.norm(x)) + self.m)
        if self.average:
            self.m.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return x + self.b(self.dropout(torch.sin(h)))


def plain_job(rng: random.Random, step: Any, **options: Any) -> Job:
    """A stack of them; the variant says whether they keep a moving average."""
    average = rng.random() < 0.4
    return stack(rng, lambda width: Plain(width, average=average), step=step, **options)

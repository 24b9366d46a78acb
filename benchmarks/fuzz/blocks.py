"""Transformer blocks in miniature."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LlamaBlock(nn.Module):
    """RMSNorm, attention with rotary embedding by complex multiplication, and SwiGLU."""

    rotation: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        angles = torch.outer(torch.arange(16.0), torch.arange(dim // heads // 2) + 1.0)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def _rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotation[: x.shape[-2]]).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class GptBlock(nn.Module):
    """LayerNorm, attention written out with dropout on the weights, GELU and dropout."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        weights = self.dropout(F.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1))
        x = x + self.dropout(self.out(weights @ v))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

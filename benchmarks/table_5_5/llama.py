"""Llama-3.2-1B in plain PyTorch, trained for a step: the language model of AUTO-SAC Table 5.5.

16 layers, width 2048, 32 heads, 8 key-value heads, feed-forward width 8192, vocabulary 128,256, tied embeddings: 1.24 billion
parameters. Parameters, gradients and AdamW's states have one `dtype`. The paper does not state its own, and there is evidence
for two:

- bfloat16: Table 5.6 lists a `pow` that makes 67,108,864 bytes and a `mean` that makes 32,768, which is 16,384 tokens
  (configuration C3) in two bytes a number; no configuration has the 8,192 tokens that four bytes would mean;
- float32: the memory of all configurations is said to exceed an 80-GB GPU, which it does in four bytes a number only.

Table 5.6 lists `pow`, `mean`, `add`, `rsqrt`, `mul` and no cast: RMSNorm is written so here. Logits are cast to float32 for
the loss, as TorchTitan does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a Llama; the defaults are those of Llama-3.2-1B."""

    layers: int = 16
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 8
    ffn_dim: int = 8192
    vocabulary: int = 128_256
    rope_theta: float = 500_000.0
    eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in single operators."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; a group of heads shares its keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    """One transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The language model, from tokens to logits."""

    def __init__(self, config: LlamaConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        half = torch.arange(0, config.dim // config.heads, 2, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(seq_len, dtype=torch.float32), config.rope_theta ** (-half * config.heads / config.dim)
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().to(self.norm.weight.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(self.norm.weight.dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


def make_step(
    device: torch.device, *, batch_size: int, seq_len: int, dtype: str = "bfloat16", **sizes: int
) -> tuple[nn.Module, Any]:
    """The model and one training step: forward, cross-entropy, backward, fused AdamW."""
    config = LlamaConfig(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            model = Llama(config, seq_len)
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocabulary, (batch_size, seq_len), device=device)
    labels = torch.randint(0, config.vocabulary, (batch_size, seq_len), device=device)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step

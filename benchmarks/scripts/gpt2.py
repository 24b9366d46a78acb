"""GPT-2 124M on one GPU, 16 sequences of 1,024 tokens, with the optimisations that are named as arguments.

    gpt2.py [tf32] [bf16] [compile] [flash] [vocabulary]

As "Let's reproduce GPT-2 (124M)" builds it, in eager fp32 first; `vocabulary` rounds it up to 50,304.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, LENGTH, BATCH, TOKENS = 768, 12, 12, 1024, 16, 50257
chosen = set(sys.argv[1:])


class Attention(nn.Module):
    """Causal self-attention, with a mask or by the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, 2)
        )
        if "flash" in chosen:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        mixed: torch.Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Tied embeddings and output layer; gives the loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of (batch, length) tokens."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


if "tf32" in chosen:
    torch.set_float32_matmul_precision("high")
model: nn.Module = GPT(50304 if "vocabulary" in chosen else TOKENS).to("cuda")
if "compile" in chosen:
    model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(50):
    begin = time.time()
    x, y = (torch.randint(0, TOKENS, (BATCH, LENGTH)).to("cuda") for _ in range(2))
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if "bf16" in chosen else contextlib.nullcontext():
        loss = model(x, y)
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    passed = time.time() - begin
    print(f"step {step}, loss: {loss.item():.4f}, dt: {1e3 * passed:.2f}ms, tok/sec: {BATCH * LENGTH / passed:.0f}")

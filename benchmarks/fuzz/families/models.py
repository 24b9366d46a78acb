"""Whole architectures in miniature."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fuzz.blocks import GptBlock, LlamaBlock
from benchmarks.fuzz.family import Job, family, rows_of, stack


class Language(nn.Module):
    """Blocks between an embedding and a head, which may share their weight."""

    def __init__(self, blocks: list[nn.Module], dim: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, dim)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, 31, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy_step(model: nn.Module, batch: Any) -> list[Tensor]:
    """The loss of the next token."""
    (tokens,) = batch
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    return [loss.detach()]


def tokens(rows: int) -> Any:
    """Six sequences of a quarter of the rows."""
    return (torch.randint(0, 31, (max(1, rows // 4), 5)),)


def language(rng: random.Random, make: Any, dim: int, tied: bool = False) -> Job:
    """A job of one to three blocks between embedding and head."""
    count = rng.randint(1, 3)
    model = Language([make() for _ in range(count)], dim, tied)
    return Job(model, tuple(f"blocks.{i}" for i in range(count)), tokens, cross_entropy_step, double=False)


@family("llama", "a Llama: RMSNorm, rotary embedding, SwiGLU")
def llama(rng: random.Random) -> Job:
    """Blocks of Llama."""
    return language(rng, lambda: LlamaBlock(16, 2), 16)


@family("gpt", "a GPT with dropout in attention and after each part")
def gpt(rng: random.Random) -> Job:
    """Blocks of GPT."""
    return language(rng, lambda: GptBlock(8), 8)


@family("tied_weights", "embedding and head share their weight; blocks share a layer")
def tied_weights(rng: random.Random) -> Job:
    """A tied GPT whose blocks share one matrix."""
    shared = nn.Linear(8, 32)

    def make() -> nn.Module:
        block = GptBlock(8)
        block.up = shared
        return block

    return language(rng, make, 8, tied=True)


@family("attention_dropout", "scaled_dot_product_attention with dropout_p, masks and grouped heads")
def attention_dropout(rng: random.Random) -> Job:
    """Fused attention that draws random numbers."""
    causal = rng.random() < 0.5

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
            k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
            mask = None if causal else torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            h = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=0.2 if self.training else 0.0, enable_gqa=True
            )
            return x + self.out(h.transpose(1, 2).flatten(-2))

    return language(rng, Attention, 8)


@family("encoder", "nn.TransformerEncoderLayer, post and pre norm, with masks")
def encoder(rng: random.Random) -> Job:
    """PyTorch's own encoder layers."""
    first = rng.random() < 0.5
    return language(
        rng, lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=first), 8
    )


@family("transformer", "nn.Transformer with encoder and decoder")
def transformer(rng: random.Random) -> Job:
    """PyTorch's own encoder and decoder."""

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device, dtype=y.dtype)
            return self.inner(x, y, tgt_mask=mask, tgt_is_causal=True)

    def batch(rows: int) -> Any:
        return torch.randn(rows // 4, 3, 8), torch.randn(rows // 4, 4, 8)

    units = (
        ("inner.encoder.layers.0", "inner.decoder.layers.0")
        if rng.random() < 0.7
        else ("inner.encoder", "inner.decoder")
    )
    return Job(Translate(), units, batch)


@family("mixture_of_experts", "a router with top-k, experts over ragged rows, index_add and scatter")
def mixture_of_experts(rng: random.Random) -> Job:
    """Blocks whose rows go to two of four experts."""
    counted = rng.random() < 0.5

    class Mixture(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.router = nn.Linear(width, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)
            )
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = torch.softmax(self.router(x), -1).topk(2, -1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                row, slot = torch.where(chosen == e)
                if row.numel():
                    out.index_add_(0, row, (expert(x[row]) * weights[row, slot, None]).to(out.dtype))
            if counted:
                self.load.scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
            return x + out

    return stack(rng, Mixture, double=False)


@family("lora", "frozen layers with low-rank adapters and dropout")
def lora(rng: random.Random) -> Job:
    """Adapters beside frozen weights."""
    merged = rng.random() < 0.5

    class Adapted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if merged:
                return torch.sin(F.linear(x, self.base.weight + self.up.weight @ self.down.weight, self.base.bias)) + x
            return torch.sin(self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))) + x

    return stack(rng, Adapted)


@family("frozen", "blocks that are frozen in part or as a whole, with and without a gradient at their input")
def frozen(rng: random.Random) -> Job:
    """Some parameters need no gradient."""
    which = rng.randrange(3)
    job = stack(rng, lambda w: nn.Sequential(nn.Linear(w, w), nn.GELU(), nn.LayerNorm(w), nn.Linear(w, w)))
    names = [name for name, _ in job.model.named_parameters()]
    for name, parameter in job.model.named_parameters():
        early = name.startswith(("first", "blocks.0")) if which else name.endswith("weight")
        parameter.requires_grad_(not early or (which == 2 and name.startswith("first")) or name == names[-1])
    return job


@family("embedding_bag", "EmbeddingBag and Embedding inside units, dense and sparse gradients")
def embedding_bag(rng: random.Random) -> Job:
    """Blocks that look up what their input says."""
    sparse = rng.random() < 0.5
    mode = rng.choice(("sum", "mean")) if sparse else rng.choice(("sum", "mean", "max"))

    class Lookup(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(10, width, mode=mode, sparse=sparse)
            self.table = nn.Embedding(10, width, max_norm=1.0 if not sparse else None)
            self.a = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            index = (x.detach().abs() * 3).long() % 10
            return torch.sin(self.a(x) + self.bag(index[:, :3])) + self.table(index[:, 0])

    return stack(rng, Lookup, optimizers=("plain",) if sparse else ("sgd", "adam"))


@family("complex_numbers", "complex weights, FFT and polar forms")
def complex_numbers(rng: random.Random) -> Job:
    """Filters in the frequency domain."""

    class Spectral(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))
            self.a = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(self.a(x)) * self.filter
            spectrum = torch.polar(spectrum.abs() + 0.1, spectrum.angle()).conj().conj()
            return x + torch.fft.irfft(spectrum * 1j, n=x.shape[-1])

    return stack(rng, Spectral, double=False)


@family("u_net", "a small U-Net: skips that outlive their blocks, pooling, transposed convolution, interpolation")
def u_net(rng: random.Random) -> Job:
    """Encoder and decoder with skips."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
            )
            self.middle = nn.Sequential(
                nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(inplace=True), nn.Dropout2d(0.2)
            )
            self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
            self.last = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            skip = self.down(x)
            y = self.up(self.middle(skip)) + F.interpolate(skip, scale_factor=1.0)
            return self.last(torch.cat([y, skip], 1))

    return Job(Net(), ("down", "middle", "last"), lambda rows: (torch.randn(max(1, rows // 8), 2, 6, 6),))


class _Window(nn.Module):
    """A block that reads height and width from itself, as its parent sets them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.H = self.W = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).view(x.shape[0], self.H, self.W, x.shape[-1])
        y = torch.roll(y, (1, 1), (1, 2)).view_as(x)
        return x + self.b(F.gelu(self.a(y)))


@family("swin", "blocks whose parent sets H and W on them before each stage")
def swin(rng: random.Random) -> Job:
    """Two resolutions through the same blocks."""
    count = rng.randint(1, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Window(8) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for size in ((4, 2), (2, 4)):
                for block in self.blocks:
                    block.H, block.W = size
                    x = block(x)
            return x

    return Job(Net(), tuple(f"blocks.{i}" for i in range(count)), lambda rows: (torch.randn(max(1, rows // 8), 8, 8),))


@dataclasses.dataclass
class _State:
    hidden: Tensor
    gate: Tensor
    step: int


@family("diffusion_cell", "one cell that a loop calls with a dataclass and a time step")
def diffusion_cell(rng: random.Random) -> Job:
    """Recurrent refinement with a structured state."""

    class Cell(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, state: _State, scale: float) -> _State:
            hidden = torch.sin(self.a(state.hidden) * scale + state.step)
            return _State(hidden, torch.sigmoid(self.b(hidden)) * state.gate, state.step + 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = Cell(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = _State(x, torch.ones_like(x), 0)
            for i in range(3):
                state = self.cell(state, 1.0 + i)
            return self.out(state.hidden * state.gate)

    return Job(Net(), ("cell",), rows_of(8))


@family(
    "flex_attention", "flex attention, uncompiled, without gradients, which PyTorch has not on the CPU", planner=False
)
def flex_attention(rng: random.Random) -> Job:
    """The higher-order operator of attention."""
    from torch.nn.attention import flex_attention as module

    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # the operator itself, not a compiled function around it
    flex = module.flex_attention

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
            with torch.no_grad():
                h = flex(
                    q.detach(),
                    k.detach(),
                    v.detach(),
                    score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")),
                )
            return x + self.out(h[:, 0] * v[:, 0])

    return language(rng, Attention, 16)


@family("hf_llama", "transformers' Llama with use_cache=True", needs="transformers", limit_s=60.0)
def hf_llama(rng: random.Random) -> Job:
    """A Llama of two layers whose cache is on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cache = rng.random() < 0.7
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=cache,
        attn_implementation=rng.choice(("eager", "sdpa")),
    )
    model = LlamaForCausalLM(config).train()

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        out = model(input_ids=batch[0], labels=batch[0], use_cache=cache)
        out.loss.backward()
        return [out.loss.detach()]

    return Job(model, ("model.layers.0", "model.layers.1"), tokens, step, double=False)

"""The models, batches and losses that `benchmarks.gpu.unseen` writes out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Callable[[torch.device], tuple[Tensor, ...]]


class Attention(nn.Module):
    """Multi-head self-attention with biases."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Pre-norm attention and a GELU feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2 with tied embeddings and no dropout; ids to logits."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads, causal=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def waves_of_time(t: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of times."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates[None]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(t.dtype)


class DiT(nn.Module):
    """Diffusion transformer over 2x2 patches of latents."""

    def __init__(self, layers: int, width: int, heads: int, channels: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * channels)
        self.width = width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        condition = self.time(waves_of_time(t, self.width))
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, condition)
        out = self.out(self.norm(tokens)).transpose(1, 2)
        return F.pixel_shuffle(out.reshape(x.shape[0], -1, height // 2, width // 2), 2)


class Residual(nn.Module):
    """Two convolutions with group norm and a condition."""

    def __init__(self, inner: int, outer: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inner), nn.GroupNorm(32, outer)
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.condition = nn.Linear(condition, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.condition(F.silu(condition))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Mixing(nn.Module):
    """Self-attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, width), Attention(width, 8, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(flat).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A diffusion U-Net of three levels, attention at the two lower ones."""

    def __init__(self, width: int, channels: int = 4) -> None:
        super().__init__()
        condition = 4 * width
        widths = (width, 2 * width, 4 * width)
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.first, self.last = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.smaller, self.mix_down, self.mix_up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inner = width
        for level, outer in enumerate(widths):
            self.down.append(Residual(inner, outer, condition))
            self.mix_down.append(Mixing(outer) if level else nn.Identity())
            self.smaller.append(nn.Conv2d(outer, outer, 3, 2, 1))
            inner = outer
        self.middle = Residual(inner, inner, condition)
        for level, outer in reversed(list(enumerate(widths))):
            self.up.append(Residual(inner + outer, outer, condition))
            self.mix_up.append(Mixing(outer) if level else nn.Identity())
            inner = outer

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        condition = self.time(waves_of_time(t, self.width))
        x, kept = self.first(x), []
        for block, mix, smaller in zip(self.down, self.mix_down, self.smaller, strict=True):
            x = mix(block(x, condition))
            kept.append(x)
            x = smaller(x)
        x = self.middle(x, condition)
        for block, mix in zip(self.up, self.mix_up, strict=True):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = mix(block(torch.cat((x, kept.pop()), dim=1), condition))
        return self.last(F.silu(x))


def latents(batch: int, channels: int, size: int) -> Batch:
    """Latents, noise and times."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        shape = (batch, channels, size, size)
        return torch.randn(shape, device=device), torch.randn(shape, device=device), torch.rand(batch, device=device)

    return make


def denoised(model: nn.Module, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the predicted noise."""
    dtype = next(model.parameters()).dtype
    share = t[:, None, None, None]
    noisy = (1 - share) * clean + share * noise
    return F.mse_loss(model(noisy.to(dtype), t.to(dtype)).float(), noise)


class Double3d(nn.Module):
    """Two 3-d convolutions with instance norm."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(inner, outer, 3, padding=1), nn.Conv3d(outer, outer, 3, padding=1)
        self.norm1, self.norm2 = nn.InstanceNorm3d(outer, affine=True), nn.InstanceNorm3d(outer, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm2(self.conv2(F.leaky_relu(self.norm1(self.conv1(x))))))


class UNet3d(nn.Module):
    """A U-Net for volumes, four levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(Double3d(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.larger = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(Double3d(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv3d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for level in (2, 1, 0):
            x = self.up[level](torch.cat((self.larger[level](x), kept[level]), dim=1))
        return self.last(x)


def volumes(batch: int, size: int) -> Batch:
    """Volumes of one channel and a class for every voxel."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        shape = (batch, size, size, size)
        return torch.randn((batch, 1, *shape[1:]), device=device), torch.randint(0, 4, shape, device=device)

    return make


def voxels(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy and soft Dice."""
    logits = model(x)
    shares = logits.float().softmax(dim=1)
    wanted = F.one_hot(labels, 4).permute(0, 4, 1, 2, 3).float()
    dice = 2 * (shares * wanted).sum((2, 3, 4)) / (shares + wanted).sum((2, 3, 4))
    return F.cross_entropy(logits, labels) + 1 - dice.mean()


class LSTM(nn.Module):
    """A recurrent language model of cuDNN's LSTM."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.tokens(ids))[0])


class Recommender(nn.Module):
    """DLRM: embedding bags, their interactions, two stacks of linear layers."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.dense(dense)
        found = torch.stack([x] + [table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(found, found.transpose(1, 2))
        row, column = torch.tril_indices(found.shape[1], found.shape[1], -1, device=x.device)
        return self.top(torch.cat((x, products[:, row, column]), dim=1)).squeeze(1)


def clicks(batch: int, tables: int, rows: int, ids: int = 4) -> Batch:
    """Dense features, ids of every table, clicks."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        chosen = torch.randint(0, rows, (batch, tables, ids), device=device)
        return torch.randn(batch, 13, device=device), chosen, torch.rand(batch, device=device)

    return make


def clicked(model: nn.Module, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
    """Binary cross-entropy."""
    return F.binary_cross_entropy_with_logits(model(dense, ids), clicks)


class GraphNet(nn.Module):
    """Mean aggregation over edges by index_add, four layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.others = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, 40)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ones = torch.ones(source.shape[0], device=x.device)
        degree = torch.zeros(x.shape[0], device=x.device).index_add(0, target, ones).clamp(min=1)
        for own, others in zip(self.own, self.others, strict=True):
            heard = torch.zeros_like(x).index_add(0, target, x[source]) / degree[:, None]
            x = F.dropout(F.relu(own(x) + others(heard)), 0.5, self.training)
        return self.last(x)


def graph(nodes: int, edges: int, width: int) -> Batch:
    """Features, edges, classes."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        ends = torch.randint(0, nodes, (2, edges), device=device)
        return torch.randn(nodes, width, device=device), ends[0], ends[1], torch.randint(0, 40, (nodes,), device=device)

    return make


def noded(model: nn.Module, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the nodes' classes."""
    return F.cross_entropy(model(x, source, target), labels)


class Translator(nn.Module):
    """torch.nn.Transformer with embeddings."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.both = nn.Transformer(width, heads, layers, layers, 4 * width, batch_first=True, norm_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=source.device)
        return self.head(self.both(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True))


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Label-smoothed cross-entropy."""
    return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten(), label_smoothing=0.1)


class WaveEncoder(nn.Module):
    """1-d convolutions over a wave, a transformer over what they find, letters for every frame."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        kernels, strides = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(512 if i else 1, 512, kernel, stride, bias=False)
            for i, (kernel, stride) in enumerate(zip(kernels, strides, strict=True))
        )
        self.norm, self.widened = nn.GroupNorm(512, 512), nn.Linear(512, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 32)

    def forward(self, wave: Tensor) -> Tensor:
        x = wave[:, None]
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x)
            x = F.gelu(self.norm(x) if i == 0 else x)
        return self.head(self.encoder(self.widened(x.transpose(1, 2))))


def waves(batch: int, samples: int, letters: int) -> Batch:
    """Waves and transcripts."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        return torch.randn(batch, samples, device=device), torch.randint(1, 32, (batch, letters), device=device)

    return make


def aligned(model: nn.Module, wave: Tensor, letters: Tensor) -> Tensor:
    """Connectionist temporal classification."""
    logs = model(wave).float().log_softmax(-1).transpose(0, 1)
    frames = torch.full((wave.shape[0],), logs.shape[0])
    lengths = torch.full((wave.shape[0],), letters.shape[1])
    return F.ctc_loss(logs, letters, frames, lengths)

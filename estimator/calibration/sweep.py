"""The default sweep: layers of the usual kinds in sizes drawn from wide ranges, forward, backward and optimizer.

It is written as a training step, and the operators are read off a capture of that step: so they are the ones that PyTorch
dispatches on the device in question (cuDNN's attention or the CPU's), with the layouts that autograd gives them. Sizes are
log-uniform, with a fixed seed. The step goes in rounds, each with every kind of layer once, so that a calibration that runs
out of time has measured all kinds.

    products        a linear layer's forward, dgrad, wgrad, with and without bias; batched products
    attention       query, key, value as a fused projection leaves them; causal or not
    normalisation   LayerNorm, RMSNorm (fused, and written out), BatchNorm, GroupNorm
    convolution     kernels of 1, 3, 5, 7; strides; pooling; depthwise between 1x1 ones, with their activations
    vocabulary      embedding, cross-entropy
    elementwise     activations, residual additions, gates, casts, cat, dropout, masks, rotary embedding
    optimizers      SGD with momentum, AdamW: as PyTorch runs them by default on the device, and fused
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the layers are: `elements` of an activation at most, `flops` of a product at most."""

    elements: int
    flops: float
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(device: str, total_bytes: int, dtypes: tuple[torch.dtype, ...] = ()) -> Scale:
        """What fits a device of this kind: a CPU takes 50 ms for a product, a GPU some."""
        if device == "cpu":
            return Scale(elements=2**22, flops=4e9, dtypes=dtypes or (torch.float32,))
        elements = min(2**28, total_bytes // 64)
        return Scale(elements=elements, flops=2e13, dtypes=dtypes or (torch.bfloat16, torch.bfloat16, torch.float32))


class Draw:
    """Sizes for one round."""

    def __init__(self, source: random.Random, scale: Scale, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.scale, self.device, self.dtype = source, scale, device, dtype

    def size(self, low: int, high: int, step: int = 1) -> int:
        """Log-uniform between two sizes, a multiple of `step`."""
        value: float = low * (max(high, low) / low) ** self.source.random()
        return max(step, round(value / step) * step)

    def width(self, limit: int) -> int:
        """A model's width: multiples of 64 mostly, as in practice, up to `limit`."""
        return self.size(32, limit, self.source.choice((8, 32, 64, 64, 128)))

    def rows(self, width: int) -> int:
        """How many rows of this width an activation may have."""
        return self.size(16, max(32, self.scale.elements // width), self.source.choice((1, 8, 64)))

    def flip(self) -> bool:
        """True or False."""
        return self.source.random() < 0.5

    def tensor(self, *shape: int, grad: bool = True) -> torch.Tensor:
        """An activation: no leaf, so that its gradient is not accumulated."""
        leaf = torch.empty(*shape, device=self.device, dtype=self.dtype, requires_grad=grad)
        return leaf.view(leaf.shape) if grad else leaf

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A module on the device, in the round's type."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                return make()
        finally:
            torch.set_default_dtype(before)


def _backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


def _linear(d: Draw) -> None:
    k = d.width(8192 if d.device.type != "cpu" else 4096)
    n = d.width(8192 if d.device.type != "cpu" else 4096)
    m = d.size(
        16, max(32, int(min(d.scale.elements / max(n, k) * 2, d.scale.flops / 2 / n / k))), d.source.choice((1, 8, 64))
    )
    _backward(d.module(lambda: nn.Linear(k, n, bias=d.flip()))(d.tensor(m, k)))


def _batched(d: Draw) -> None:
    batch, m, n, k = d.size(2, 64), d.size(16, 512, 8), d.size(16, 512, 8), d.size(16, 128, 8)
    scores = d.tensor(batch, m, k) @ d.tensor(batch, k, n)
    _backward(torch.softmax(scores * 0.1, dim=-1))


def _attention(d: Draw) -> None:
    heads, size = d.size(1, 32), d.source.choice((32, 64, 64, 80, 128))
    length = d.size(32, 2048, 32)
    limit = d.scale.flops / (4 * length * length * size * heads)
    batch = d.size(1, max(1, int(min(limit, d.scale.elements / (length * heads * size)))))
    packed = d.tensor(batch, length, 3 * heads * size).view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(packed[0], packed[1], packed[2], is_causal=d.flip())
    _backward(out.transpose(1, 2).reshape(batch, length, heads * size))


def _norms(d: Draw) -> None:
    width = d.width(8192)
    rows = d.rows(width)
    x = d.tensor(rows, width)
    _backward(d.module(lambda: nn.LayerNorm(width))(x))
    _backward(d.module(lambda: nn.RMSNorm(width))(x))
    weight = d.tensor(width)
    _backward(weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


def _convolution(d: Draw) -> None:
    channels = d.source.choice((3, 8, 16, 32, 64, 64, 128, 256))
    out, kernel = d.source.choice((16, 32, 64, 128, 256)), d.source.choice((1, 3, 3, 3, 5, 7))
    side, stride = d.size(7, 128), d.source.choice((1, 1, 1, 2))
    positions = (side // stride + 1) ** 2
    work = 2.0 * channels * out * kernel**2 * positions
    images = d.size(1, max(1, int(min(d.scale.flops / work, d.scale.elements / (max(channels, out) * side**2), 256))))
    x = d.tensor(images, channels, side, side)
    h = d.module(lambda: nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=d.flip()))(x)
    h = torch.relu(d.module(lambda: nn.BatchNorm2d(out) if d.flip() else nn.GroupNorm(8, out))(h))
    if h.shape[-1] >= 4:
        h = F.max_pool2d(h, d.source.choice((2, 3)), 2) if d.flip() else F.avg_pool2d(h, 2)
    _backward(F.adaptive_avg_pool2d(h, 1).flatten(1))
    if channels >= 8:
        _backward(d.module(lambda: nn.Conv2d(channels, channels, 3, 1, 1, groups=channels))(x))


def _inverted_bottleneck(d: Draw) -> None:
    """A narrow image widened by a 1x1 convolution, a depthwise one, and narrowed again, as in MobileNet and EfficientNet."""
    narrow, factor = d.size(8, 160, 8), d.source.choice((1, 3, 4, 6))
    wide, kernel, stride = narrow * factor, d.source.choice((3, 3, 5, 7)), d.source.choice((1, 1, 2))
    side = d.size(7, 112)
    work = 2.0 * side**2 * wide * (2 * narrow + kernel**2)
    images = d.size(1, max(1, int(min(d.scale.flops / work, d.scale.elements / (wide * side**2), 256))))
    h = d.module(lambda: nn.Conv2d(narrow, wide, 1, bias=False))(d.tensor(images, narrow, side, side))
    h = F.relu6(d.module(lambda: nn.BatchNorm2d(wide))(h))
    h = d.module(lambda: nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=d.flip()))(h)
    h = F.hardswish(d.module(lambda: nn.BatchNorm2d(wide))(h))
    gate = F.hardsigmoid(F.adaptive_avg_pool2d(h, 1)) if d.flip() else None
    _backward(d.module(lambda: nn.Conv2d(wide, narrow, 1, bias=False))(h if gate is None else h * gate))


def _vocabulary(d: Draw) -> None:
    words, width = d.size(64, 50_000), d.width(2048)
    rows = d.size(16, max(32, min(d.scale.elements // width, d.scale.elements // words)))
    index = torch.zeros(rows, dtype=torch.int64, device=d.device)
    _backward(d.module(lambda: nn.Embedding(words, width))(index))
    F.cross_entropy(d.tensor(rows, words), index).backward()


def _elementwise(d: Draw) -> None:
    width = d.width(8192)
    rows = d.rows(width)
    x, y = d.tensor(rows, width), d.tensor(rows, width)
    for function in (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, lambda t: F.gelu(t, approximate="tanh")):
        _backward(function(x))
    _backward(F.silu(x) * y)
    _backward(x + y, x - y, x / (y + 1.0))
    _backward(torch.exp(x), torch.cat((x, y), dim=-1), torch.stack((x, y)))
    _backward(F.dropout(x, 0.1), x.masked_fill(torch.empty(rows, width, dtype=torch.bool, device=d.device), 0.0))
    _backward(x.t().contiguous(), x.sum(0), x.sum(-1), x.mean(), x * d.tensor(width), F.softmax(x, dim=-1))
    other = torch.float32 if d.dtype != torch.float32 else torch.bfloat16
    _backward(x.to(other).to(d.dtype))


def _in_place(d: Draw) -> None:
    count = d.size(1, d.scale.elements)
    x, y = torch.empty(count, device=d.device, dtype=d.dtype), torch.empty(count, device=d.device, dtype=d.dtype)
    x.zero_()
    x.add_(y)
    x.mul_(0.9)
    x.copy_(y)
    x.clone()
    torch.ones_like(x)
    x.add_(y, alpha=0.1)


def _rotary(d: Draw) -> None:
    heads, size, length = d.size(1, 32), d.source.choice((64, 128)), d.size(32, 2048, 32)
    batch = d.size(1, max(1, d.scale.elements // (heads * size * length)))
    x = d.tensor(batch, length, heads, size)
    first, second = x.chunk(2, dim=-1)
    table = torch.empty(length, 1, size, device=d.device, dtype=d.dtype)
    _backward(x * table + torch.cat((-second, first), dim=-1) * table)
    pairs = torch.view_as_complex(x.float().reshape(batch, length, heads, size // 2, 2))
    turns = torch.empty(length, 1, size // 2, device=d.device, dtype=torch.complex64)
    _backward(torch.view_as_real(pairs * turns).flatten(3).to(d.dtype))


def _optimizers(d: Draw) -> None:
    parameters = []
    for _ in range(d.size(1, 32)):
        count = d.size(8, min(d.scale.elements, 2**24))
        parameter = nn.Parameter(torch.empty(count, device=d.device, dtype=d.dtype))
        parameter.grad = torch.empty_like(parameter)
        parameters.append(parameter)
    rate = 1e-3
    for optimizer in (
        torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4),
        torch.optim.AdamW(parameters, lr=rate),
        torch.optim.AdamW(parameters, lr=rate, fused=True),
    ):
        for _ in range(2):
            optimizer.step()
    nn.utils.clip_grad_norm_(parameters, 1.0)


_KINDS: tuple[Callable[[Draw], None], ...] = (
    _linear,
    _elementwise,
    _attention,
    _norms,
    _linear,
    _convolution,
    _in_place,
    _vocabulary,
    _batched,
    _linear,
    _rotary,
    _convolution,
    _inverted_bottleneck,
    _optimizers,
)


def sweep_step(scale: Scale, rounds: int, until: float = math.inf) -> Callable[[torch.device], Any]:
    """A step that goes through `rounds` rounds, at least one, and begins none after `until` (by `time.monotonic`); to be
    captured, not run. Its first call, a warm-up, is empty.
    """

    def make_step(device: torch.device) -> Callable[[], None]:
        calls = itertools.count()

        def step() -> None:
            for draw, kind in _plan(scale, rounds, device, until) if next(calls) else ():
                kind(draw)

        return step

    return make_step


def _plan(
    scale: Scale, rounds: int, device: torch.device, until: float
) -> Iterator[tuple[Draw, Callable[[Draw], None]]]:
    source = random.Random(_SEED)
    for number in range(rounds):
        if number and time.monotonic() > until:
            return
        dtype = scale.dtypes[number % len(scale.dtypes)]
        for kind in _KINDS:
            yield Draw(source, scale, device, dtype), kind

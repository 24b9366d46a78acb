"""Forwards that write outside of themselves: buffers, external tensors, data, NumPy's memory."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, Stack, family, mean_square, stacked


def _mean(block: Any, width: int) -> None:
    block.register_buffer("m", torch.zeros(width))


@stacked("ema_buffer", "a moving average in a buffer, read and then written", _mean)
def ema_buffer(block: Any, x: Tensor) -> Tensor:
    """Shift by the average."""
    h = block.a(x) + block.m
    block.m.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return h


@stacked("ema_before", "a moving average in a buffer, written and then read", _mean)
def ema_before(block: Any, x: Tensor) -> Tensor:
    """Update, then shift."""
    with torch.no_grad():
        block.m.lerp_(x.mean(0), 0.2)
    return block.a(x) * torch.sin(block.m + 1) + block.m


@stacked("rebound_buffer", "a buffer that every forward replaces by a new tensor", _mean)
def rebound_buffer(block: Any, x: Tensor) -> Tensor:
    """Shift by a buffer that is assigned anew."""
    block.m = block.m * 0.9 + x.detach().mean(0) * 0.1
    return torch.sin(block.a(x) * (1 + block.m))


@stacked("data_writes", "writes through .data, which version counters do not see", _mean)
def data_writes(block: Any, x: Tensor) -> Tensor:
    """Shift, then write through .data."""
    h = torch.sin(block.a(x) * (block.m + 1))
    block.m.data += x.data.mean(0)
    block.m.data.mul_(0.5)
    return h


@stacked("data_rebound", "a buffer's .data is set to another tensor", _mean)
def data_rebound(block: Any, x: Tensor) -> Tensor:
    """Shift, then exchange the buffer's memory."""
    h = torch.sin(block.a(x) * (block.m + 1))
    block.m.data = block.m.data * 0.5 + x.data.mean(0)
    return h


@stacked("data_of_activation", "an activation changed through .data after it was used")
def data_of_activation(block: Any, x: Tensor) -> Tensor:
    """Change an intermediate result behind autograd's back."""
    h = block.a(x)
    y = torch.sin(h)
    h.data.mul_(0.5)
    return y * h


@stacked("weight_clamp", "weights are clamped through .data in the forward")
def weight_clamp(block: Any, x: Tensor) -> Tensor:
    """Clamp, then use."""
    block.a.weight.data.clamp_(-0.2, 0.2)
    return block.a(x)


@stacked("weight_after", "weights are scaled under no_grad after they were used")
def weight_after(block: Any, x: Tensor) -> Tensor:
    """Use, then write the bias, which no backward reads."""
    h = block.a(x)
    with torch.no_grad():
        block.a.bias.mul_(0.9)
    return h


@stacked("numpy_writes", "NumPy writes to a buffer's memory in the forward", _mean, double=False, planner=False)
def numpy_writes(block: Any, x: Tensor) -> Tensor:
    """Count calls in the memory of a buffer."""
    h = torch.sin(block.a(x) * (block.m + 1))
    block.m.numpy()[...] += 0.25
    return h


@stacked("numpy_on_activation", "NumPy changes an activation's memory in place", double=False, planner=False)
def numpy_on_activation(block: Any, x: Tensor) -> Tensor:
    """Change an intermediate result through NumPy before it is used."""
    h = block.a(x)
    memory = h.detach().numpy() if h.dtype == torch.float32 else None
    if memory is not None:
        memory[...] = memory * 2 - 1
    return torch.sin(h) * h


def _queue(block: Any, width: int) -> None:
    block.register_buffer("queue", torch.randn(6, width))
    block.register_buffer("pointer", torch.zeros(1, dtype=torch.long))


@stacked("queue", "a queue of keys with a pointer that is read as a number, as in MoCo", _queue, double=False)
def queue(block: Any, x: Tensor) -> Tensor:
    """Attend to the queue, then enqueue."""
    at = int(block.pointer)
    keys = block.queue.clone()
    h = torch.softmax(block.a(x) @ keys.t(), -1) @ keys
    with torch.no_grad():
        block.queue[at] = x.detach().mean(0).to(block.queue.dtype)
        block.pointer[0] = (at + 1) % 6
    return h


def _counted(block: Any, _: int) -> None:
    block.register_buffer("calls", torch.zeros((), dtype=torch.long))


@stacked("tensor_counter", "a counter in a buffer changes what is computed", _counted)
def tensor_counter(block: Any, x: Tensor) -> Tensor:
    """A scale that grows with every call."""
    block.calls += 1
    return block.a(x) * torch.sin(block.calls.to(x.dtype))


def _caching(block: Any, _: int) -> None:
    block.cache = None


@stacked(
    "first_call_cache", "the first call makes a table and keeps it in an attribute, as rotary embeddings do", _caching
)
def first_call_cache(block: Any, x: Tensor) -> Tensor:
    """Scale by a cached table that grows with the batch."""
    if block.cache is None or block.cache.shape[0] < x.shape[0] or block.cache.dtype != x.dtype:
        block.cache = torch.cos(torch.arange(x.shape[0], dtype=x.dtype, device=x.device))[:, None]
    return block.a(x) * block.cache[: x.shape[0]]


@stacked("lazy_buffer", "the first call registers a buffer")
def lazy_buffer(block: Any, x: Tensor) -> Tensor:
    """Register a buffer when it is missing, then update it."""
    if "late" not in block._buffers:
        block.register_buffer("late", torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device))
    block.late.add_(x.detach().mean(0))
    return block.a(x) + block.late


class _Statistics(nn.Module):
    """Adds to a tensor that its caller passes, and uses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        h = torch.sin(self.a(x) + total)
        total.add_(h.detach().mean(0))
        return x + self.b(torch.sin(h)) + total.sum()


class _Passing(nn.Module):
    def __init__(self, width: int, count: int, kept: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Statistics(width) for _ in range(count))
        self.register_buffer("total", torch.zeros(width))
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        total = self.total if self.kept else torch.zeros_like(self.total)
        for block in self.blocks:
            x = block(x, total)
        return x + total


@family("argument_written", "a unit adds in place to a tensor that its caller passes and that later units read")
def argument_written(rng: random.Random) -> Job:
    """Statistics handed through all blocks."""
    count, width = rng.randint(1, 3), 8
    model = _Passing(width, count, rng.random() < 0.5)
    return Job(
        model, tuple(f"blocks.{i}" for i in range(count)), lambda rows: (torch.randn(rows, width),), double=False
    )


@family("key_value_cache", "keys and values are written into a cache that outlives the step")
def key_value_cache(rng: random.Random) -> Job:
    """Attention over a cache with a position."""
    width = 8

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.register_buffer("keys", torch.zeros(64, width), persistent=False)
            self.register_buffer("values", torch.zeros(64, width), persistent=False)
            self.position = 0

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            end = self.position + 4
            with torch.no_grad():
                self.keys[self.position : end] = k[:4]
                self.values[self.position : end] = v[:4]
            self.position = end % 60
            keys, values = torch.cat([self.keys[:end], k]), torch.cat([self.values[:end], v])
            return x + self.out(torch.softmax(q @ keys.t(), -1) @ values)

    count = rng.randint(1, 2)
    units = tuple(f"blocks.{i}" for i in range(count))
    return Job(
        Stack([Attention() for _ in range(count)], width), units, lambda rows: (torch.randn(rows, width),), double=False
    )


def _change_between(model: nn.Module, batch: Any) -> list[Tensor]:
    loss = mean_square(model(*batch))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1.0)
    loss.backward()
    return [loss.detach()]


@stacked("buffer_between", "the user changes a buffer between forward and backward", _mean, step=_change_between)
def buffer_between(block: Any, x: Tensor) -> Tensor:
    """Shift by a buffer that no backward reads."""
    return torch.sin(block.a(x) + block.m)


def _activations_between(model: nn.Module, batch: Any) -> list[Tensor]:
    loss = mean_square(model(*batch))
    for block in model.get_submodule("blocks").children():
        held: Any = block._held
        if block.width == 8:
            held.detach().numpy()[...] *= 2
        else:
            held.data.mul_(2)
    loss.backward()
    return [loss.detach()]


@stacked(
    "activations_between",
    "an activation that an attribute holds is changed out of sight between forward and backward",
    step=_activations_between,
    double=False,
    planner=False,
)
def activations_between(block: Any, x: Tensor) -> Tensor:
    """An adversarial or a quantized activation; autograd sees it as it is then."""
    block._held = torch.exp(torch.sin(x).float())
    return torch.sin(block._held)


def _weights_between(model: nn.Module, batch: Any) -> list[Tensor]:
    loss = mean_square(model(*batch))
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 1.25
    try:
        loss.backward()
    finally:
        for p, data in zip(model.parameters(), kept, strict=True):
            p.data = data
    return [loss.detach()]


@stacked(
    "weights_between",
    "the weights' data are exchanged between forward and backward and put back",
    step=_weights_between,
)
def weights_between(block: Any, x: Tensor) -> Tensor:
    """A layer whose weights another copy replaces for a while."""
    return block.a(x)


def _bound(block: Any, width: int) -> None:
    object.__setattr__(block, "outside", [torch.zeros(width)])


@stacked("outside_tensor", "a tensor in a list, which is no buffer, is written and read", _bound, double=False)
def outside_tensor(block: Any, x: Tensor) -> Tensor:
    """Shift by a tensor that no module registers."""
    h = torch.sin(block.a(x) * (1 + block.outside[0]))
    block.outside[0].add_(x.detach().mean(0))
    return h


def _foreach(block: Any, width: int) -> None:
    block.register_buffer("m", torch.zeros(width))
    block.register_buffer("n", torch.ones(width))


@stacked("foreach_writes", "torch._foreach operators write several buffers at once", _foreach, double=False)
def foreach_writes(block: Any, x: Tensor) -> Tensor:
    """Update two buffers by one operator."""
    mean = x.detach().mean(0)
    torch._foreach_mul_([block.m, block.n], 0.9)
    torch._foreach_add_([block.m, block.n], [mean, mean.abs()])
    return block.a(x) * block.n + block.m


@stacked("buffer_view_writes", "a view of a buffer that is made before and written after it was read", _mean)
def buffer_view_writes(block: Any, x: Tensor) -> Tensor:
    """Write half of a buffer through a view."""
    half = block.m[: block.width // 2]
    h = torch.sin(block.a(x) * (block.m + 1))
    half.add_(0.5)
    half.copy_(torch.sin(half))
    return h + block.m

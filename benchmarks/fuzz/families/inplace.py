"""Operators that change tensors, their metadata or their memory in place, and what views make of it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fuzz.family import Job, family, rows_of, stack, stacked


@stacked("transpose_in_place", "t_, transpose_ and swapaxes_ on square and other matrices", rows=(24, 4, 8, 16, 24))
def transpose_in_place(block: Any, x: Tensor) -> Tensor:
    """Transpose in place, scale, and back."""
    h = block.a(x)
    h = h * 1.5
    h.t_()
    h = torch.sin(h)
    h.transpose_(0, 1)
    y = h * 2
    y.swapaxes_(0, 1)
    return y.t() + h


@stacked("transposed_square", "a result left transposed in place, silent where it is square", width=8, rows=(8, 8))
def transposed_square(block: Any, x: Tensor) -> Tensor:
    """Of eight rows the transposed matrix, else itself."""
    h = block.a(x)
    if x.shape[0] == x.shape[1]:
        h.t_()
    return h


@stacked("squeeze_in_place", "squeeze_ and unsqueeze_")
def squeeze_in_place(block: Any, x: Tensor) -> Tensor:
    """Add a dimension and take it away."""
    h = torch.sin(block.a(x))
    h.unsqueeze_(1)
    h = h * torch.cos(h)
    h.squeeze_(1)
    return h


@stacked("resize_in_place", "resize_ and resize_as_ of fresh memory")
def resize_in_place(block: Any, x: Tensor) -> Tensor:
    """A table that is resized before it is filled."""
    table = torch.empty(0, dtype=x.dtype, device=x.device)
    table.resize_(x.shape[-1]).fill_(0.5)
    other = torch.empty(1, dtype=x.dtype, device=x.device).resize_as_(table).copy_(table).mul_(3)
    return block.a(x) * table + other


@stacked("out_empty", "out= with an empty tensor, which the operator resizes: torch.exp(x, out=torch.empty(0))")
def out_empty(block: Any, x: Tensor) -> Tensor:
    """Scale by a detached exponential."""
    scale = torch.exp(x.detach(), out=torch.empty(0, dtype=x.dtype, device=x.device))
    with torch.no_grad():
        more = torch.add(scale, 1.0, out=torch.empty(0, dtype=x.dtype, device=x.device))
    return torch.sin(block.a(x)) * scale / more


@stacked("out_given", "out= with memory of the right size, used twice")
def out_given(block: Any, x: Tensor) -> Tensor:
    """Two results in one memory."""
    memory = torch.empty_like(x, requires_grad=False)
    with torch.no_grad():
        torch.sin(x, out=memory)
        first = block.a(x.detach()) * memory
        torch.cos(x, out=memory)
    return torch.sin(block.a(x)) * memory + first


@stacked("zeros_changed", "zeros that are changed in place by what follows")
def zeros_changed(block: Any, x: Tensor) -> Tensor:
    """Fill zeros by parts."""
    h = torch.zeros_like(x)
    h += block.a(x)
    mask = x.new_zeros(x.shape[-1])
    mask[::2] = 1.0
    bias = torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)
    bias.add_(0.5).mul_(2)
    return torch.sin(h) * mask + bias * h


@stacked("chains_on_views", "chains of in-place operators on views of views")
def chains_on_views(block: Any, x: Tensor) -> Tensor:
    """Change halves, quarters and columns."""
    h = block.a(x) * 1.0
    left, right = h[:, : block.width // 2], h[:, block.width // 2 :]
    left.mul_(2).add_(1)
    h.view(-1)[:3].zero_()
    right[..., :1].mul_(0.5)
    h.unflatten(0, (-1, 1))[:, 0].add_(right.detach().mean())
    return torch.sin(h) * h


@stacked("activations_in_place", "ReLU, SiLU, leaky ReLU, ELU and dropout in place", double=False)
def activations_in_place(block: Any, x: Tensor) -> Tensor:
    """Several activations in place, one after the other."""
    h = F.relu(block.a(x), inplace=True)
    h = F.leaky_relu(block.b(h), 0.1, inplace=True)
    h = F.dropout(block.c(h), 0.3, block.training, inplace=True)
    return F.elu(block.a(h) * 1.0, inplace=True) + F.hardtanh(block.b(h), inplace=True)


@stacked("unsafe_parts", "unsafe_split and unsafe_chunk: aliases that version counters miss")
def unsafe_parts(block: Any, x: Tensor) -> Tensor:
    """Change a part in place."""
    first, second = torch.unsafe_chunk(block.a(x), 2, -1)
    first.mul_(2)
    third, fourth = torch.unsafe_split(block.b(x), x.shape[-1] // 2, -1)
    third.sigmoid_()
    return torch.cat([first * third, torch.sin(second) * fourth], -1)


@stacked("indexed_writes", "index_put_, masked_fill_, scatter_, index_add_, fill_diagonal_ and copy_")
def indexed_writes(block: Any, x: Tensor) -> Tensor:
    """Six ways to write a part."""
    h = block.a(x) * 1.0
    h[torch.tensor([0, 2], device=x.device)] = 0.5
    h.masked_fill_(x.detach() > 1.0, 0.25)
    h.scatter_(1, torch.zeros(x.shape[0], 1, dtype=torch.long, device=x.device), 0.125)
    h.index_add_(0, torch.tensor([1, 1], device=x.device), x[:2])
    h.fill_diagonal_(0.5)
    h[:, -1].copy_(x[:, 0])
    return torch.sin(h)


@stacked("strided_views", "as_strided, unfold, diagonal and expand, and writes through them")
def strided_views(block: Any, x: Tensor) -> Tensor:
    """Overlapping and strided views."""
    h = block.a(x) * 1.0
    h.as_strided((2, 2), (1, 1)).mul(2)
    h.diagonal().mul_(3)
    windows = h.unfold(1, 2, 1).sum(-1)
    return torch.sin(h) + F.pad(windows, (0, 1)) + h[:1].expand_as(h)


@stacked("set_memory", "set_ points a tensor to other memory")
def set_memory(block: Any, x: Tensor) -> Tensor:
    """A constant whose memory is exchanged."""
    scale = torch.full((x.shape[-1],), 2.0, dtype=x.dtype, device=x.device)
    h = torch.sin(block.a(x) + scale)
    scale.set_(torch.full((x.shape[-1],), 3.0, dtype=x.dtype, device=x.device))
    return h * scale


@stacked("early_read", "a constant is read, changed in place, and read again")
def early_read(block: Any, x: Tensor) -> Tensor:
    """Values before and after a change."""
    with torch.no_grad():
        scale = torch.full((x.shape[-1],), 2.0, dtype=x.dtype, device=x.device)
        early = scale * 3
        scale.mul_(5)
        late = scale.sin()
        scale.zero_()
    return torch.sin(block.a(x) * early) * late + scale


@stacked("detached_changes", "a detached alias is changed in place after autograd has saved its base's result")
def detached_changes(block: Any, x: Tensor) -> Tensor:
    """Change a result through a detached alias before it is used."""
    h = block.a(x)
    h.detach().mul_(0.5)
    return torch.sin(h) + h.detach().requires_grad_(False)


class _ChangesInput(nn.Module):
    """Changes its input in place, or a part of it."""

    def __init__(self, width: int, part: bool) -> None:
        super().__init__()
        self.part = part
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.clone())
        if self.part:
            x[:, ::2].mul_(0.5)
        else:
            x.add_(torch.sin(h)).mul_(0.5)
        return x + self.b(torch.sin(x.clone()))


@family("input_changed", "a unit changes its input in place")
def input_changed(rng: random.Random) -> Job:
    """Blocks that write to what they are given."""
    part = rng.random() < 0.5
    return stack(rng, lambda width: _ChangesInput(width, part))


class _Shift(nn.Module):
    """Adds a bias: autograd does not save the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class _Around(nn.Module):
    """What a caller does to a unit's input and output after the call."""

    def __init__(self, width: int, count: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(_Shift(width), nn.Tanh(), nn.Linear(width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.kind == "input":
                scratch = x.detach().clone()
                y = block(scratch) + x
                scratch.mul_(0.0)
            elif self.kind == "used input":
                y = block(x)
                x.mul_(0.5)
                y = y + x
            else:
                y = block(x)
                if self.kind == "relu":
                    y.relu_()
                elif self.kind == "part":
                    y[:, 0] = 0.5
                elif self.kind == "scaled":
                    y = y.mul_(2).add_(x)
                elif self.kind == "data":
                    y.data.mul_(0.5)
                else:
                    y.unsqueeze_(0)
                    y = torch.sin(y).squeeze(0)
            x = y
        return x


@family("input_changed_after", "the caller changes what it gave to a unit after the call")
def input_changed_after(rng: random.Random) -> Job:
    """Scratch memory as a unit's input."""
    count, kind = rng.randint(1, 2), rng.choice(("input", "input", "used input"))
    return Job(_Around(8, count, kind), tuple(f"blocks.{i}" for i in range(count)), rows_of(8))


@family("output_changed_after", "the caller changes a unit's output in place")
def output_changed_after(rng: random.Random) -> Job:
    """relu_, mul_, a write to a part, .data and unsqueeze_ on outputs."""
    count, kind = rng.randint(1, 2), rng.choice(("relu", "part", "scaled", "data", "unsqueeze"))
    return Job(_Around(8, count, kind), tuple(f"blocks.{i}" for i in range(count)), rows_of(8))


class _Returns(nn.Module):
    """Returns views, its input, or both."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        h = torch.sin(self.a(x))
        if self.kind == "view":
            return h[:, : x.shape[1]]
        if self.kind == "views":
            left, right = h.chunk(2, -1)
            return left, right
        if self.kind == "transposed":
            return self.b(h).t()
        if self.kind == "input":
            return x
        if self.kind == "input view":
            return x.view(-1), self.b(h)
        if self.kind == "expanded":
            return self.b(h)[:1].expand(x.shape)
        return h, h, self.b(h)


class _UsesReturned(nn.Module):
    def __init__(self, width: int, count: int, kind: str, change: bool) -> None:
        super().__init__()
        self.change = change
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Returns(width, kind) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        shape = x.shape
        for block in self.blocks:
            out = block(x)
            parts = list(out) if isinstance(out, tuple) else [out]
            if self.change and len(parts) == 1 and parts[0] is not x and parts[0]._base is None:
                parts[0].mul_(0.5)
            total = torch.zeros(shape, dtype=x.dtype, device=x.device)
            for part in parts:
                total = total + torch.sin(part.reshape(-1)[: total.numel()].reshape(shape))
            x = total
        return x


@family("views_returned", "a unit returns views of its results, its input, or one tensor twice")
def views_returned(rng: random.Random) -> Job:
    """Outputs that share memory with each other or with the input."""
    kind = rng.choice(("view", "views", "transposed", "input", "input view", "expanded", "twice"))
    count = rng.randint(1, 2)
    model = _UsesReturned(8, count, kind, rng.random() < 0.5)
    return Job(model, tuple(f"blocks.{i}" for i in range(count)), rows_of(8))


@stacked("detach_in_place", "detach_ and requires_grad_ in a forward")
def detach_in_place(block: Any, x: Tensor) -> Tensor:
    """A branch that is cut off in place and begins anew."""
    h = torch.sin(block.a(x))
    cut = block.b(x) * 1.0
    cut.detach_()
    fresh = cut.clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(torch.sin(fresh).sum(), fresh)
    return h * cut + gradient


@stacked("random_in_place", "normal_, uniform_, bernoulli_, random_ and exponential_ on fresh memory")
def random_in_place(block: Any, x: Tensor) -> Tensor:
    """Noise of five kinds."""
    noise = torch.empty_like(x, requires_grad=False).normal_()
    gate = torch.empty_like(x, requires_grad=False).uniform_().gt_(0.3)
    keep = torch.empty_like(x, requires_grad=False).bernoulli_(0.7)
    h = block.a(x) + 0.1 * noise * keep
    return torch.sin(h) * gate + torch.randn_like(h) * torch.rand(h.shape[-1], dtype=h.dtype, device=h.device)

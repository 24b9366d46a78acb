"""Programs that are drawn at random: each unit runs instructions on registers, which hold tensors of rows x width.

An instruction takes the block, two registers, and gives a tensor of the same shape. The sequence, and which registers it
reads, follow from the variant; what PyTorch refuses to differentiate without a plan counts as no reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.family import Job, family, stack

Instruction = Callable[[Any, Tensor, Tensor], Tensor]


def _written(a: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    """A copy after something was written to it."""
    out = a.clone()
    write(out)
    return out


def _filled(a: Tensor, b: Tensor, *, more: int) -> Tensor:
    """Memory that was only allocated, of which columns are written, and a view of these."""
    buffer = a.new_empty(a.shape[0], a.shape[1] + more)
    view = buffer[:, : a.shape[1]]
    view.copy_(a * b)
    return torch.sin(view) + view.exp() * 0.1


def _average(block: Any, a: Tensor, *, before: bool) -> Tensor:
    """The moving average, read before or after it moves."""
    old = a * torch.sin(block.average) if before else a
    with torch.no_grad():
        block.average.lerp_(a.detach().mean(0), 0.1)
    return old if before else a * torch.sin(block.average)


def _remembered(block: Any, a: Tensor, b: Tensor) -> Tensor:
    """What the last forward left in an attribute, if its shape is this one's."""
    last, block.last = block.last, b.detach()
    return a if last is None or last.shape != a.shape else a + torch.sin(last) * a


def _halved_gradient(a: Tensor) -> Tensor:
    out = torch.sin(a)
    if out.requires_grad:
        out.register_hook(lambda g: g * 0.5)
    return out


class _Twisted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        out = torch.sin(a) * b
        ctx.save_for_backward(a, b, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, b, out = ctx.saved_tensors
        return gradients[0] * torch.cos(a) * b + 0.1 * out, gradients[0] * torch.sin(a)


def _attention(a: Tensor, b: Tensor) -> Tensor:
    q, k = a[None, None], b[None, None]
    return F.scaled_dot_product_attention(q, k, q * k, dropout_p=0.1)[0, 0]


def _norm(block: Any, a: Tensor) -> Tensor:
    return F.batch_norm(a, block.mean, block.variance, training=a.shape[0] > 1)


def _spectrum(a: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.fft(a.float()))[..., 0].to(a.dtype) / a.shape[1]


def _generated(block: Any, a: Tensor) -> Tensor:
    return a * torch.rand(a.shape[1], generator=block.generator, dtype=a.dtype)


def _gradient_inside(a: Tensor, b: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = b.detach().requires_grad_()
        (g,) = torch.autograd.grad(inner.sin().square().sum(), inner)
    return a + g


PURE: tuple[Instruction, ...] = (
    lambda block, a, b: block.a(a),
    lambda block, a, b: torch.sin(block.b(b)) * a,
    lambda block, a, b: torch.exp(a * 0.1) + torch.sigmoid(b),
    lambda block, a, b: F.gelu(a) * torch.tanh(b),
    lambda block, a, b: torch.where(a > b, torch.sin(a), b.square()),
    lambda block, a, b: torch.maximum(a, b) + F.softplus(a),
    lambda block, a, b: torch.lerp(a, b, 0.3).sin().cos(),
    lambda block, a, b: a.softmax(-1) * b.log_softmax(0),
    lambda block, a, b: F.layer_norm(a, a.shape[-1:]) * F.rms_norm(b, b.shape[-1:]),
    lambda block, a, b: a @ (a.t() @ b) / (1 + a.shape[0]),
    lambda block, a, b: torch.cat(a.chunk(2, -1)[::-1], -1) + b.flip(0),
    lambda block, a, b: a.sort(-1).values + b.cumsum(0) / (1 + b.shape[0]),
    lambda block, a, b: a.gather(1, b.argsort(-1)) * b.roll(1, 1),
    lambda block, a, b: a.t().contiguous().sin().t() + b[:, :1].expand_as(b).exp() * 0.1,
    lambda block, a, b: torch.einsum("ij,kj->ik", a, block.a.weight.sin()) + b.cumprod(-1).clamp(-1, 1),
    lambda block, a, b: F.conv1d(a[None], block.kernel.expand(a.shape[0], 1, 3), padding=1, groups=a.shape[0])[0] + b,
    lambda block, a, b: F.max_pool1d(a[None], 3, 1, 1)[0] + F.avg_pool1d(b[None], 3, 1, 1)[0].sin(),
    lambda block, a, b: a.bfloat16().sin().to(a.dtype) + b.double().exp().to(b.dtype) * 0.1,
    lambda block, a, b: _spectrum(a) + b,
    lambda block, a, b: _attention(a, b),
    lambda block, a, b: _Twisted.apply(a, b),  # type: ignore[no-any-return, no-untyped-call]
    lambda block, a, b: a * float(b.detach().abs().mean()),
)
IMPURE: tuple[Instruction, ...] = (
    lambda block, a, b: F.dropout(a, 0.3) + torch.bernoulli(torch.full_like(b, 0.5)) * b,
    lambda block, a, b: F.rrelu(a, training=True) + F.alpha_dropout(b, 0.2, training=True),
    lambda block, a, b: a + torch.randn_like(b) * b * block.dice.random(),
    lambda block, a, b: _generated(block, torch.sin(a)),
    lambda block, a, b: _average(block, a, before=True),
    lambda block, a, b: _average(block, a * b, before=False),
    lambda block, a, b: _norm(block, torch.sin(a)) + b,
    lambda block, a, b: _remembered(block, a, b),
    lambda block, a, b: _halved_gradient(a) * b,
    lambda block, a, b: _gradient_inside(a, b),
    lambda block, a, b: checkpoint(lambda t: F.dropout(torch.sin(block.a(t)), 0.2), a, use_reentrant=False) + b,
    lambda block, a, b: torch.cond(a.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (block.a(a),)) + b,
    lambda block, a, b: block.table(a.detach().abs().long() % 7).mean(1) * b,
    lambda block, a, b: (a.detach() * b.sin()) if block.count() % 2 else (a.sin() * b.detach()),
)
WRITES: tuple[Instruction, ...] = (
    lambda block, a, b: _written(a, lambda t: t.sin_().mul_(b)),
    lambda block, a, b: _written(a, lambda t: t[:, ::2].mul_(b[:, ::2])).sin(),
    lambda block, a, b: _written(a, lambda t: t.t()[0].add_(b[:, 0].exp(), alpha=0.1)).exp() * 0.1,
    lambda block, a, b: _written(a, lambda t: t.index_add_(0, torch.zeros(1, dtype=torch.long), b[:1].sin())) * a,
    lambda block, a, b: _written(a, lambda t: t.masked_fill_(b > 0, 0.5)).square(),
    lambda block, a, b: _written(a, lambda t: t.scatter_add_(1, b.argsort(-1), b.sin())).sin(),
    lambda block, a, b: _written(a, lambda t: torch._foreach_mul_([t], 0.5)).exp() * b,
    lambda block, a, b: _filled(a, b, more=0),
    lambda block, a, b: _filled(a, b, more=1),
    lambda block, a, b: torch.mul(a.detach(), b.detach(), out=torch.empty_like(a.detach())) * b.sin(),
    lambda block, a, b: torch.sin(a * b).mul_(b).add_(a),
    lambda block, a, b: a.mul_(0.9).sin(),
    lambda block, a, b: F.relu_(torch.sin(a)) + F.dropout(b.exp(), 0.2, inplace=True) * 0.1,
)


class Program(nn.Module):
    """A unit that runs instructions: each reads two registers and adds one."""

    def __init__(self, width: int, code: list[tuple[Instruction, int, int]], ends: tuple[int, int]) -> None:
        super().__init__()
        self.a, self.b, self.table = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Embedding(7, width),
        )
        self.kernel = nn.Parameter(torch.randn(1, 1, 3))
        for name, value in (("average", 0.0), ("mean", 0.0), ("variance", 1.0)):
            self.register_buffer(name, torch.full((width,), value))
        self.dice, self.generator = random.Random(5), torch.Generator().manual_seed(6)
        self.last: Tensor | None = None
        self.calls = 0
        self._code, self._ends = code, ends

    def count(self) -> int:
        """How often it has been called."""
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        """The sum of two registers, kept small."""
        registers = [x, torch.sin(self.a(x))]
        for instruction, i, j in self._code:
            registers.append(instruction(self, registers[i % len(registers)], registers[j % len(registers)]))
        first, second = (registers[-end] for end in self._ends)
        return torch.tanh(first) + torch.sin(second) + x


def _drawn(rng: random.Random, instructions: tuple[Instruction, ...]) -> Job:
    code = [
        (rng.choice(instructions), *(rng.choice((-1, -1, -2, rng.randrange(9))) for _ in range(2)))
        for _ in range(rng.randint(3, 10))
    ]
    ends = (1, rng.randint(1, 3))
    return stack(rng, lambda width: Program(width, code, ends))


@family("drawn_functions", "random programs of functions without side effects", variants=10_000)
def drawn_functions(rng: random.Random) -> Job:
    """Kernels of many kinds in any order."""
    return _drawn(rng, PURE)


@family("drawn_states", "random programs with random numbers, buffers, attributes, hooks and branches", variants=10_000)
def drawn_states(rng: random.Random) -> Job:
    """Half of the instructions read or change something outside."""
    return _drawn(rng, PURE[:8] + IMPURE)


@family("drawn_writes", "random programs with changes in place, through views, into new memory", variants=10_000)
def drawn_writes(rng: random.Random) -> Job:
    """Half of the instructions write."""
    return _drawn(rng, PURE[:8] + WRITES)


@family("drawn_programs", "random programs of all instructions", variants=10_000)
def drawn_programs(rng: random.Random) -> Job:
    """All together."""
    return _drawn(rng, PURE + IMPURE + WRITES + WRITES)

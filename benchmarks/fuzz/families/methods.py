"""What models of research papers do in a forward or around it: momentum encoders, codebooks, implicit layers, inner loops,
generated weights, modes of the dispatcher, kernels of extensions.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fuzz.families.plain import Plain, plain_job
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack, stacked


@family("averaged_weights", "an average of the weights (swa_utils) is the teacher of the next step", planner=False)
def averaged_weights(rng: random.Random) -> Job:
    """Self-distillation; the average is updated after the backward."""
    teacher: list[AveragedModel] = []

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        if not teacher:
            teacher.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True))
        with torch.no_grad():
            wanted = teacher[0](*batch)
        out = model(*batch)
        loss = mean_square(out) + F.mse_loss(out, wanted)
        loss.backward()
        teacher[0].update_parameters(model)
        return [loss.detach()]

    return plain_job(rng, step, state=lambda model: [list(one.parameters()) for one in teacher], double=False)


class _Momentum(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.slow = copy.deepcopy(self.a).requires_grad_(False)
        self.register_buffer("queue", torch.randn(width, 20))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(torch.sin(self.a(x)), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            key = F.normalize(torch.sin(self.slow(x)), dim=1)
        scores = query @ self.queue.clone()
        at, rows = int(self.at), min(4, len(key), 20 - int(self.at))
        self.queue[:, at : at + rows] = key[:rows].T
        self.at[0] = (at + rows) % 20
        return x + self.b(scores.exp().mean(1, keepdim=True) * query)


@family(
    "momentum_encoder", "a slow copy of a layer that the forward updates, and a queue of its results", planner=False
)
def momentum_encoder(rng: random.Random) -> Job:
    """As in momentum contrast."""
    return stack(rng, _Momentum)


class _Codebook(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("codes", torch.randn(6, width))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", torch.randn(6, width))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.a(x))
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            hot = F.one_hot(nearest, 6).type_as(z)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
            dead = self.counts < 0.5
            if dead.any():
                self.codes[dead] = z[torch.randint(len(z), (int(dead.sum()),))].to(self.codes.dtype)
            self.codes.copy_(self.sums / self.counts[:, None])
        return x + self.b(z + (found - z).detach()) + F.mse_loss(z, found)


@family("codebook", "a codebook with moving averages, whose dead entries are drawn anew (VQ-VAE)", planner=False)
def codebook(rng: random.Random) -> Job:
    """Straight-through quantization."""
    return stack(rng, _Codebook, rows=(24, 24, 16))


class _Renormed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mean, deviation = h.mean(0), h.std(0) + 1e-3
        most = (2 * self.steps / 35000 + 1).clamp(1, 3)
        scale = (deviation.detach() / self.deviation).clamp(1 / most, most)
        shift = ((mean.detach() - self.mean) / self.deviation).clamp(-1, 1)
        h = (h - mean) / deviation * scale + shift
        self.mean += 0.1 * (mean.detach() - self.mean)
        self.deviation += 0.1 * (deviation.detach() - self.deviation)
        self.steps += 1
        return x + self.b(torch.sin(h))


@family("batch_renorm", "batch renormalization, which reads its statistics and then writes them", planner=False)
def batch_renorm(rng: random.Random) -> Job:
    """Correction factors that carry no gradient."""
    return stack(rng, _Renormed)


class _Implicit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.a(z) * 0.3 + self.b(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        z = self.step(z, x)
        if z.requires_grad:
            start = z.detach().clone().requires_grad_()
            again = self.step(start, x.detach())

            def solve(gradient: Tensor) -> Tensor:
                y = gradient
                for _ in range(4):
                    y = torch.autograd.grad(again, start, y, retain_graph=True)[0] + gradient
                return y

            z.register_hook(solve)
        return z


@family("implicit_layer", "a fixed point, whose gradient a hook of the result solves for (DEQ)", planner=False)
def implicit_layer(rng: random.Random) -> Job:
    """The hook takes derivatives of a graph that the forward made inside of a unit."""
    return stack(rng, _Implicit)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: nn.Module, *parameters: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.1 * function(x)
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in ctx.parameters]
        for _ in range(3):
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                out = ctx.function(z)
                found = torch.autograd.grad(out, (z, *ctx.parameters), gradient)
            gradient = gradient + 0.1 * found[0]
            z = z - 0.1 * out.detach()
            sums = [a + 0.1 * b for a, b in zip(sums, found[1:], strict=True)]
        return gradient, None, *sums


class _Flow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.c = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        flown: Tensor = _Adjoint.apply(torch.sin(x), self.f, *self.f.parameters())  # type: ignore[no-untyped-call]
        return self.c(torch.sin(flown))


@family("adjoint", "an ordinary differential equation, solved again from its end in the backward", planner=False)
def adjoint(rng: random.Random) -> Job:
    """A custom function that runs modules in its backward."""
    return stack(rng, _Flow)


@family("inner_loop", "a step of gradient descent with create_graph, and a loss after it (MAML)", planner=False)
def inner_loop(rng: random.Random) -> Job:
    """Second derivatives through functional_call."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        weights = dict(model.named_parameters())
        loss = mean_square(functional_call(model, weights, batch))
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        loss = mean_square(functional_call(model, weights, batch))
        loss.backward()
        return [loss.detach()]

    return plain_job(rng, step)


class _Generating(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.make = nn.Linear(width, width * width + width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(torch.sin(x.mean(0)))
        weight, bias = made[: self.width**2].view(self.width, self.width), made[self.width**2 :]
        return x + torch.sin(functional_call(self.layer, {"weight": weight, "bias": bias}, (torch.sin(x),)))


@family("generated_weights", "a hypernetwork: a unit makes the weights of one of its layers", planner=False)
def generated_weights(rng: random.Random) -> Job:
    """functional_call inside a unit."""
    return stack(rng, _Generating)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: Any) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.strength() * gradient, None


@family("gradient_reversal", "gradients are turned around, by a strength that grows before the backward", planner=False)
def gradient_reversal(rng: random.Random) -> Job:
    """The backward reads what has changed since the forward."""
    strength = [0.5]

    class Reversing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            turned: Tensor = _Reversed.apply(torch.sin(x), lambda: strength[0])  # type: ignore[no-untyped-call]
            return super().forward(turned)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        out = model(*batch)
        strength[0] *= 1.1
        loss = mean_square(out)
        loss.backward()
        return [loss.detach()]

    return stack(rng, Reversing, step=step)


@stacked("discrete_samples", "Gumbel softmax, hard and soft, and stochastic rounding by integer views", double=False)
def discrete_samples(block: Any, x: Tensor) -> Tensor:
    """Random numbers in the middle of a unit."""
    bits = x.detach().float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return F.gumbel_softmax(x, tau=0.7, hard=block.place == 0) * (x + (rounded - x).detach())


class _Rounding(TorchDispatchMode):
    """Rounds products, as simulations of other arithmetic do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (out * 64).round() / 64 if func is torch.ops.aten.addmm.default else out


@stacked("mode_inside", "a dispatch mode of the user's inside a unit changes what operators return", planner=False)
def mode_inside(block: Any, x: Tensor) -> Tensor:
    """The unit runs what the mode runs."""
    with _Rounding():
        return torch.sin(block.a(torch.sin(x)))


@family("mode_outside", "a dispatch mode of the user's around the forward, and not around the backward", planner=False)
def mode_outside(rng: random.Random) -> Job:
    """Without the mode, a recomputation is another one."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with _Rounding():
            loss = mean_square(model(*batch))
        loss.backward()
        return [loss.detach()]

    return plain_job(rng, step)


@stacked(
    "unseen_constants",
    "constants that PyTorch fills without an operator: CTC loss with lengths as numbers",
    double=False,
)
def unseen_constants(block: Any, x: Tensor) -> Tensor:
    """An extension's kernels write to memory that they have allocated in the same way."""
    scores = torch.sin(x.float())[:, None, :].log_softmax(-1)
    length = min(2, len(x))
    loss = F.ctc_loss(scores, torch.ones(1, length, dtype=torch.long), (len(x),), (length,), zero_infinity=True)
    return x * (1 + loss * 0.01)


@family("float32_precision", "float32 products are computed in another precision in the backward", planner=False)
def float32_precision(rng: random.Random) -> Job:
    """By the newer of PyTorch's two interfaces, after which the older one cannot be read."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            loss = mean_square(model(*batch))
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"
        loss.backward()
        return [loss.detach()]

    return plain_job(rng, step, double=False)


class _Nested(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.nested.as_nested_tensor([torch.sin(x[:3]), x[3:7]], layout=torch.strided)
        parts = F.dropout(self.b(F.relu(self.a(parts)) * 2), 0.1)
        return x + torch.stack([part.sum(0) for part in parts.unbind()]).sum(0)


@family("nested_strided", "nested tensors of the older, strided layout, which have no sizes", planner=False)
def nested_strided(rng: random.Random) -> Job:
    """Inside of units."""
    return stack(rng, _Nested)


@family("packed_results", "what autograd saved is read through grad_fn in the forward and by hooks", planner=False)
def packed_results(rng: random.Random) -> Job:
    """`_saved_result`, prehooks of nodes, and hooks of several gradients at once."""
    seen: list[float] = []

    class Reading(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.exp(self.a(x) * 0.1)
            e = torch.sigmoid(h)
            node: Any = e.grad_fn
            if node is not None:
                seen.append(float(node._saved_result.sum()))
                node.register_prehook(lambda gradients: (gradients[0] * node._saved_result,))
                torch.autograd.graph.register_multi_grad_hook(
                    (h, e), lambda gradients: seen.append(float(sum(g.sum() for g in gradients if g is not None)))
                )
            return x + self.b(self.dropout(torch.sin(e) + h))

    return stack(rng, Reading, state=lambda model: list(seen), double=False, step=plain_step, batch=rows_of(8), width=8)

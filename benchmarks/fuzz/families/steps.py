"""Training steps of other kinds: phases, teachers, shapes that grow, threads, changes of the model between steps."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.families.classes import Layers
from benchmarks.fuzz.families.plain import Plain
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack


@family(
    "teacher", "the same modules run under no_grad as a teacher and then with gradients; running statistics follow both"
)
def teacher(rng: random.Random) -> Job:
    """As in self-distillation."""

    class Normed(Layers):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.norm = nn.BatchNorm1d(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.body(x))

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.no_grad():
            target = model(*batch)
        out = model(batch[0] + 0.1)
        with torch.no_grad():
            again = model(*batch)
        loss = (out - target).pow(2).mean() + (out - again).abs().mean()
        loss.backward()
        return [loss.detach()]

    return stack(rng, Normed, step=step, rows=(24, 7, 16))


@family("two_phases", "one phase trains a part with the other frozen; requires_grad is switched between the phases")
def two_phases(rng: random.Random) -> Job:
    """A forward of one phase is followed by the other's weights being frozen."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        blocks = list(model.get_submodule("blocks").children())
        first = mean_square(model(*batch))
        for p in blocks[0].parameters():
            p.requires_grad_(False)
        second = mean_square(model(*batch))
        for p in blocks[0].parameters():
            p.requires_grad_(True)
        second.backward()
        first.backward()
        return [first.detach(), second.detach()]

    return stack(rng, Plain, step=step)


@family("two_forwards", "two forwards of one model, one of them inside the loss of the other, before one backward")
def two_forwards(rng: random.Random) -> Job:
    """Siamese networks and consistency losses."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        first = model(*batch)
        second = model(first * 0.5)
        loss = (first - second).pow(2).mean() + (first * second.detach()).mean()
        loss.backward()
        return [loss.detach()]

    return stack(rng, lambda width: Plain(width, average=rng.random() < 0.5), step=step)


@family("growing_cache", "caches that grow with every call and are no part of the state: keys, rotary tables")
def growing_cache(rng: random.Random) -> Job:
    """Non-persistent buffers that are replaced by longer ones."""

    class Cached(Layers):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("keys", torch.zeros(0, width), persistent=False)
            self.register_buffer("table", torch.ones(1, 1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.table.shape[0] < x.shape[0]:
                self.table = torch.linspace(0.5, 1.5, x.shape[0] * 2, dtype=x.dtype)[:, None]
            h = torch.sin(self.a(x * self.table[: x.shape[0]]))
            self.keys = torch.cat([self.keys.to(h.dtype), h.detach()[:2]])
            weights = torch.softmax(h @ self.keys.t(), -1)
            return x + self.b(weights @ self.keys)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        return [*plain_step(model, batch), *plain_step(model, batch)]

    return stack(rng, Cached, step=step)


@family("reordered", "blocks change their order, some are left out, others are put in, between the steps")
def reordered(rng: random.Random) -> Job:
    """The list of blocks is not the one of the plan."""
    job = stack(rng, Plain)
    inner = job.step

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        blocks = list(model.get_submodule("blocks").children())
        losses = inner(model, batch)
        model.blocks = nn.ModuleList([*blocks[1:], blocks[0]])
        return losses

    job.step = step
    return job


@family("layer_drop", "blocks are left out at random by Python's generator, and by a schedule")
def layer_drop(rng: random.Random) -> Job:
    """Stochastic depth outside of the units."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Plain(8) for _ in range(3))
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if random.random() < 0.6:
                    x = x + block(x)
            return self.out(x)

    return Job(Net(), ("blocks.0", "blocks.1", "blocks.2"), rows_of(8))


@family("caught_inside", "an operator fails inside a unit, the unit catches the error and goes on another way")
def caught_inside(rng: random.Random) -> Job:
    """Errors that nobody else sees."""

    class Trying(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            total = torch.zeros_like(h)
            try:
                total.add_(torch.ones(3, 5, dtype=h.dtype))
            except RuntimeError:
                total.add_(h.detach(), alpha=0.5)
            try:
                h = h @ torch.ones(3, 5, dtype=h.dtype)
            except RuntimeError:
                h = h * total
            return x + self.b(torch.sin(h))

    return stack(rng, Trying)


@family("threads", "several threads run the units at the same time, as nn.DataParallel does")
def threads(rng: random.Random) -> Job:
    """Replicas of one model, or the model itself, on parts of the batch."""
    replicas = rng.random() < 0.5

    def replica(module: nn.Module) -> nn.Module:
        made = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            made._modules[name] = replica(child) if child is not None else None
        for name, parameter in module._parameters.items():
            made._parameters[name] = None if parameter is None else parameter * 1
            setattr(made, name, made._parameters.pop(name))
        return made

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        parts = batch[0].chunk(2) if batch[0].shape[0] > 1 else [batch[0]]
        models = [replica(model) if replicas else model for _ in parts]
        outs: list[Any] = [None] * len(parts)

        def run(i: int) -> None:
            outs[i] = mean_square(models[i](parts[i]))

        started = [threading.Thread(target=run, args=(i,)) for i in range(len(parts))]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        for out in outs:
            out.backward()
        return [out.detach() for out in outs]

    return stack(
        rng, lambda width: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)), step=step
    )


@family("flat_parameters", "weights are views of one flat parameter, made anew in every forward")
def flat_parameters(rng: random.Random) -> Job:
    """As older sharding does it."""

    class Flat(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.flat = nn.Parameter(torch.randn(2 * width * width) / width**0.5)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.flat.view(2, self.width, self.width).unbind()
            return x + torch.sin(torch.sin(x @ first) @ second)

    return stack(rng, Flat)


@family("inner_training", "a unit trains something of its own in its forward: test-time training, backward inside")
def inner_training(rng: random.Random) -> Job:
    """Fast weights that are fitted to the input."""
    backward = rng.random() < 0.5

    class Fitting(Layers):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.fast = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.fast.weight.detach().clone().requires_grad_()
            for _ in range(2):
                loss = (x.detach() @ weight - x.detach().sin()).square().mean()
                if backward:
                    loss.backward()
                    with torch.no_grad():
                        weight.sub_(weight.grad, alpha=0.1)
                    weight.grad = None
                else:
                    weight = weight - 0.1 * torch.autograd.grad(loss, weight)[0]
            return self.body(x) + torch.sin(x @ weight) @ self.fast.weight

    return stack(rng, Fitting)


@family("hessian_products", "Hessian-vector products and gradient norms that are added to the loss")
def hessian_products(rng: random.Random) -> Job:
    """Sharpness-aware and second-order methods."""
    sharp = rng.random() < 0.5

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = mean_square(model(*batch))
        if sharp:
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.add_(g, alpha=0.05)
            second = mean_square(model(*batch))
            second.backward()
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(g, alpha=0.05)
            return [loss.detach(), second.detach()]
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        product = sum((g * torch.ones_like(g)).sum() for g in gradients)
        (loss + 0.1 * product).backward()
        return [loss.detach(), product.detach()]

    return stack(rng, Layers, step=step)


@family("hooks_in_place", "hooks that change inputs and outputs in place, and add keyword arguments")
def hooks_in_place(rng: random.Random) -> Job:
    """On the unit itself or on a layer inside."""
    inside = rng.random() < 0.5

    class Keyed(Layers):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.body(x * scale)

    job = stack(rng, Keyed)
    calls: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        calls.append(len(calls))
        x = args[0].clone()
        x.add_(0.1 * len(calls))
        return (x,), ({**kwargs, "scale": 1.0 + len(calls) % 2} if not inside else kwargs)

    def after(module: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(0.5)

    for name in job.units:
        module = job.model.get_submodule(f"{name}.a" if inside else name)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    job.state = lambda model: list(calls)
    return job


@family(
    "global_tensors", "tensors of the module's file: constants that change between steps, parameters that nobody owns"
)
def global_tensors(rng: random.Random) -> Job:
    """What is no part of the model."""
    constant = torch.linspace(0.5, 1.0, 8)
    owned = nn.Parameter(torch.randn(8))

    class Reading(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.body(x) * constant.to(x.dtype)) * owned.to(x.dtype)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        losses = plain_step(model, batch)
        gradient = owned.grad.clone()
        owned.grad = None
        constant.mul_(1.1)
        with torch.no_grad():
            owned.sub_(gradient, alpha=0.1)
        return [*losses, gradient]

    return stack(rng, Reading, 8, step=step)


@family("ragged_accumulation", "gradients of parts of several sizes are accumulated, under nested autocast")
def ragged_accumulation(rng: random.Random) -> Job:
    """Microbatches of 1, 2 and the rest, and nested autocast."""
    nested = rng.random() < 0.6

    class Mixed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=nested):
                h = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    h = torch.sin(self.a(x.float()).to(self.a.weight.dtype)) + h.to(self.a.weight.dtype)
            return x + self.b(h)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        sizes = [1, 2, max(1, batch[0].shape[0] - 3)]
        losses: list[Tensor] = []
        for part in batch[0].split(sizes) if sum(sizes) == batch[0].shape[0] else [batch[0]]:
            losses += plain_step(model, (part,))
        return losses

    return stack(rng, Mixed, step=step, double=False)

"""Hooks of the user: on units and inside them, on tensors, on saved tensors, on parameters."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, family, mean_square, plain_step, stack, stacked


def _blocks(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))


def _hooked(rng: random.Random, attach: Any, **options: Any) -> Job:
    """A stack; `attach(module, log)` is called for a unit or for a layer inside each."""
    job = stack(rng, _blocks, **options)
    log: list[Any] = []
    inside = rng.random() < 0.5
    for name in job.units:
        attach(job.model.get_submodule(f"{name}.0" if inside else name), log)
    job.state = lambda model: list(log)
    return job


@family("forward_hooks", "forward hooks that log, or replace the output, on units and inside")
def forward_hooks(rng: random.Random) -> Job:
    """Outputs that a hook scales."""

    def attach(module: nn.Module, log: list[Any]) -> None:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            log.append(tuple(out.shape))
            return torch.sin(out) * 1.5

        module.register_forward_hook(hook)

    return _hooked(rng, attach)


@family("pre_hooks", "forward pre-hooks that replace the inputs, with and without keywords")
def pre_hooks(rng: random.Random) -> Job:
    """Inputs that a hook scales by a number that changes with every call."""
    keywords = rng.random() < 0.5

    def attach(module: nn.Module, log: list[Any]) -> None:
        def hook(module: nn.Module, args: Any, *kwargs: Any) -> Any:
            log.append(len(args))
            args = (args[0] * (1 + len(log) % 3),)
            return (args, kwargs[0]) if kwargs else args

        module.register_forward_pre_hook(hook, with_kwargs=keywords)

    return _hooked(rng, attach)


@family("backward_hooks", "full backward hooks and pre-hooks that log and scale gradients")
def backward_hooks(rng: random.Random) -> Job:
    """Gradients that a hook clips."""
    before = rng.random() < 0.5

    def attach(module: nn.Module, log: list[Any]) -> None:
        def hook(module: nn.Module, *gradients: Any) -> Any:
            log.append(len(gradients))
            return tuple(None if g is None else g.clamp(-0.01, 0.01) for g in gradients[0])

        if before:
            module.register_full_backward_pre_hook(hook)
        else:
            module.register_full_backward_hook(hook)

    return _hooked(rng, attach)


@family(
    "tensor_hooks", "hooks on tensors inside a unit: register_hook, retain_grad, post-accumulate hooks on parameters"
)
def tensor_hooks(rng: random.Random) -> Job:
    """Gradients of intermediate results."""
    log: list[float] = []

    class Hooked(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
                h.register_hook(lambda g: log.append(float(g.abs().sum())))
            y = self.b(h)
            if y.requires_grad:
                y.retain_grad()
                self.last = y
            return y + x

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        losses = plain_step(model, batch)
        grads = [
            m.last.grad.clone()
            for m in model.modules()
            if isinstance(m, Hooked) and hasattr(m, "last") and m.last.grad is not None
        ]
        return losses + grads

    job = stack(rng, Hooked, step=step, state=lambda model: list(log))
    parameter = next(job.model.get_submodule("blocks.0").parameters())
    parameter.register_post_accumulate_grad_hook(lambda p: log.append(float(p.grad.abs().sum())))
    return job


@family("optimizer_in_backward", "post-accumulate hooks step each parameter inside the backward")
def optimizer_in_backward(rng: random.Random) -> Job:
    """Weights change while earlier units are still recomputed."""
    job = stack(rng, _blocks)
    for parameter in job.model.parameters():

        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.05)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    return job


def _outer_hooks(model: nn.Module, batch: Any) -> list[Tensor]:
    packed = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        loss = mean_square(model(*batch))
    loss.backward()
    return [loss.detach()]


@stacked("saved_tensor_hooks", "the user's saved-tensor hooks around the forward", step=_outer_hooks)
def saved_tensor_hooks(block: Any, x: Tensor) -> Tensor:
    """A layer and a dropout."""
    return nn.functional.dropout(torch.sin(block.a(x)), 0.1, block.training)


def _offloading(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        loss = mean_square(model(*batch))
    loss.backward()
    return [loss.detach()]


@stacked("save_on_cpu", "torch.autograd.graph.save_on_cpu around the forward", step=_offloading)
def save_on_cpu(block: Any, x: Tensor) -> Tensor:
    """A layer whose saved tensors wait elsewhere."""
    return torch.sin(block.a(x))


@family("stateful_hooks", "hooks that change attributes and buffers of the unit")
def stateful_hooks(rng: random.Random) -> Job:
    """Spectral-norm-like pre-hooks of the user's own."""

    def attach(module: nn.Module, log: list[Any]) -> None:
        module.register_buffer("calls", torch.zeros(()))
        module.factor = 1.0

        def before(module: Any, args: Any) -> Any:
            module.calls += 1
            module.factor *= 0.9
            return (args[0] * module.factor + module.calls,)

        module.register_forward_pre_hook(before)

    return _hooked(rng, attach)


@family("global_hooks", "global forward hooks of torch.nn.modules.module")
def global_hooks(rng: random.Random) -> Job:
    """A hook on every module of the process."""
    job = stack(rng, _blocks)
    seen: list[str] = []

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(module, nn.GELU):
            seen.append("gelu")

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            return plain_step(model, batch)
        finally:
            handle.remove()

    job.step, job.state = step, lambda model: list(seen)
    return job


@family(
    "activation_capture", "hooks that keep activations of inner layers, which the loss then uses (feature distillation)"
)
def activation_capture(rng: random.Random) -> Job:
    """Losses on intermediate features."""
    job = stack(rng, _blocks)
    features: dict[str, Tensor] = {}
    for name in job.units:

        def keep(module: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
            features[name] = out

        job.model.get_submodule(f"{name}.1").register_forward_hook(keep)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        loss = loss + sum(feature.pow(2).mean() for feature in features.values())
        loss.backward()
        return [loss.detach()]

    job.step = step
    return job

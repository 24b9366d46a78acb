"""Autocast, inference mode, sparse tensors, torch.func, forward mode, and copies of an applied model."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from benchmarks.fuzz.families.plain import Plain, plain_job
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack


@family("torch_func_grad", "torch.func.grad through functional_call")
def torch_func_grad(rng: random.Random) -> Job:
    """Functional gradients, written to .grad."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = grad(lambda p: functional_call(model, p, batch).pow(2).mean())(parameters)
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        return []

    return stack(rng, lambda width: Plain(width, dropout=0.0), step=step)


@family("torch_func_vmap", "per-sample gradients: vmap of grad")
def torch_func_vmap(rng: random.Random) -> Job:
    """One gradient per row."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p: Any, row: Tensor) -> Tensor:
            return functional_call(model, p, (row[None],)).pow(2).mean()

        gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, batch[0])
        for name, p in model.named_parameters():
            p.grad = gradients[name].mean(0)
        return [gradients[name].sum() for name in gradients]

    return stack(rng, lambda width: Plain(width, dropout=0.0), step=step)


@family("torch_func_jvp", "forward-mode derivatives: jvp, then an ordinary step")
def torch_func_jvp(rng: random.Random) -> Job:
    """A directional derivative beside a step."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        _, derivative = jvp(lambda x: model(x), (batch[0],), (torch.ones_like(batch[0]),))
        return [derivative.detach(), *plain_step(model, batch)]

    return stack(rng, lambda width: Plain(width, dropout=0.0), step=step)


@family("forward_mode", "dual numbers through the model, and a backward of the derivative")
def forward_mode(rng: random.Random) -> Job:
    """Mixed-mode derivatives."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            out = model(dual)
            tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
        loss = out.pow(2).mean() + tangent.pow(2).mean()
        loss.backward()
        return [loss.detach()]

    return stack(rng, lambda width: Plain(width, dropout=0.0), step=step)


@family("autocast_outside", "the forward runs under autocast, the backward outside of it")
def autocast_outside(rng: random.Random) -> Job:
    """Mixed precision as it should be."""
    cache = rng.random() < 0.5

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = mean_square(model(*batch))
        loss.backward()
        return [loss.detach()]

    return plain_job(rng, step, double=False)


@family("autocast_inside", "autocast inside a unit, on and off in turns")
def autocast_inside(rng: random.Random) -> Job:
    """A unit with parts in two precisions."""

    class Mixed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = torch.sin(self.a(x))
                with torch.autocast("cpu", enabled=False):
                    h = self.b(h.to(x.dtype))
            return x + self.dropout(h)

    return stack(rng, Mixed)


@family("autocast_backward", "forward and backward under autocast")
def autocast_backward(rng: random.Random) -> Job:
    """The backward inside autocast, which PyTorch advises against but runs."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return plain_step(model, batch)

    return plain_job(rng, step, double=False)


@family("inference_tensors", "tensors that were made in inference mode go into units")
def inference_tensors(rng: random.Random) -> Job:
    """Frozen features and tables from inference mode."""

    class Given(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)
            with torch.inference_mode():
                self.table = torch.rand(width)

        def forward(self, x: Tensor, features: Tensor) -> Tensor:
            with torch.inference_mode():
                fresh = torch.ones(x.shape[-1]) * 2 + features
            return torch.sin(self.a(x) + self.table + features) + fresh

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Given(8) for _ in range(2))

        def forward(self, x: Tensor, features: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, features)
            return x

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.inference_mode():
            features = torch.sin(batch[0])
        return plain_step(model, (batch[0], features))

    return Job(Net(), ("blocks.0", "blocks.1"), rows_of(8), step, double=False)


@family("sparse_tensors", "sparse matrices as inputs and inside units")
def sparse_tensors(rng: random.Random) -> Job:
    """Products with sparse matrices, as in graph networks."""
    csr = rng.random() < 0.4

    class Graph(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            edges = (torch.arange(x.shape[0])[:, None] + torch.arange(x.shape[0])).remainder(3).eq(0).to(x.dtype)
            adjacency = edges.to_sparse_csr() if csr else edges.to_sparse()
            return torch.sin(self.b(torch.sparse.mm(adjacency, torch.sin(self.a(x)))))

    return stack(rng, Graph)


@family("sparse_gradients", "sparse gradients inside a unit and sparse inputs that need gradients", planner=False)
def sparse_gradients(rng: random.Random) -> Job:
    """A dense matrix that a unit makes sparse."""

    class Sparse(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(width, width))

        def forward(self, x: Tensor) -> Tensor:
            thin = (self.w * (self.w.detach() > 0)).to_sparse()
            return x + torch.sin(torch.sparse.mm(thin, x.t()).t())

    return stack(rng, Sparse)


@family("deep_copied", "the model under its plan is deep-copied; the copy, or the original after it, is trained")
def deep_copied(rng: random.Random) -> Job:
    """copy.deepcopy of an applied model."""
    use_copy = rng.random() < 0.6
    held: list[Any] = []

    def transform(model: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        held.append(model if use_copy else other)
        return other if use_copy else model

    return plain_job(
        rng, plain_step, transform=transform, state=lambda model: [list(p.shape) for p in held[0].parameters()]
    )


@family("state_dict", "state_dict round trips through a file; the keys are those of the model without a plan")
def state_dict(rng: random.Random) -> Job:
    """Save, disturb, load, train."""

    def transform(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        file.seek(0)
        model.load_state_dict(torch.load(file))
        return model

    def state(model: nn.Module) -> Any:
        return [
            list(model.state_dict()),
            [name for name, _ in model.named_modules()],
            [name for name, _ in model.named_parameters()],
        ]

    return plain_job(rng, plain_step, transform=transform, state=state)


@family("moved", "the model is moved, cast and switched between modes after the plan was applied")
def moved(rng: random.Random) -> Job:
    """double, float, eval, train, requires_grad_, apply."""

    def transform(model: nn.Module) -> nn.Module:
        model.double().float().eval().train().requires_grad_(True)
        model.apply(lambda module: None)
        return model.to("cpu")

    return plain_job(rng, plain_step, transform=transform, double=False)

"""Custom autograd functions and custom operators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.family import Job, family, rows_of, stack, stacked

# ---- autograd functions ------------------------------------------------------------------------------------


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, power: int) -> Tensor:
        y = torch.sin(x * w)
        ctx.save_for_backward(x, w, y)
        ctx.power, ctx.cosine = power, torch.cos(x * w)
        return y * power

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        inner = gradient * ctx.power * ctx.cosine + 0 * y
        return inner * w, (inner * x).sum(0), None


def _weight(block: Any, width: int) -> None:
    block.w = nn.Parameter(torch.rand(width) + 0.5)


@stacked(
    "custom_function", "an autograd function with saved tensors and with tensors and numbers as ctx attributes", _weight
)
def custom_function(block: Any, x: Tensor) -> Tensor:
    """The function between two layers."""
    return _Saving.apply(block.a(x), block.w, 3)


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = x > 0
        ctx.save_for_backward(mask)
        x.mul_(mask)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


@stacked("custom_dirty", "an autograd function that changes its input and marks it dirty")
def custom_dirty(block: Any, x: Tensor) -> Tensor:
    """A ReLU in place."""
    return torch.sin(_Dirty.apply(block.a(x)))


class _Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = x.detach().numpy()
        ctx.cosine = np.cos(values)
        return torch.from_numpy(np.sin(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.from_numpy(ctx.cosine)


@stacked("custom_numpy", "an autograd function that computes in NumPy", double=False, planner=False)
def custom_numpy(block: Any, x: Tensor) -> Tensor:
    """A sine from NumPy."""
    return _Numpy.apply(block.a(x).float()) * torch.sigmoid(block.b(x))


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, order = x.sort(-1)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        ctx.width = x.shape[-1]
        return values, order, x * 2

    @staticmethod
    def backward(ctx: Any, values: Tensor | None, order: Tensor | None, double: Tensor | None) -> Tensor | None:
        (saved,) = ctx.saved_tensors
        total = None if values is None else torch.zeros_like(values).scatter(-1, saved, values)
        if double is not None:
            total = double * 2 if total is None else total + double * 2
        return total


@stacked(
    "custom_outputs",
    "an autograd function with several outputs, one not differentiable, one unused, gradients not materialised",
)
def custom_outputs(block: Any, x: Tensor) -> Tensor:
    """Sorted values and what sorted them."""
    values, order, _ = _Outputs.apply(block.a(x))
    return torch.sin(values) + order.to(x.dtype)


class _NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return torch.tanh(x) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * (ctx.scale - y * y / ctx.scale), None


@stacked("custom_setup_context", "an autograd function with setup_context that saves its output")
def custom_setup_context(block: Any, x: Tensor) -> Tensor:
    """A scaled tanh."""
    return _NewStyle.apply(block.a(x), 2.0) + x


class _Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) > 0.3
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask + 0.01 * torch.rand_like(gradient)


@stacked("custom_random", "an autograd function that draws in its forward and in its backward")
def custom_random(block: Any, x: Tensor) -> Tensor:
    """A dropout with noise in the backward."""
    return torch.sin(_Random.apply(block.a(x)))


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.sin(layer(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = torch.sin(ctx.layer(x))
        y.backward(gradient)
        return x.grad, None


@stacked(
    "custom_recomputing", "an autograd function that runs a layer again in its backward, as reversible networks do"
)
def custom_recomputing(block: Any, x: Tensor) -> Tensor:
    """A layer that checkpoints itself."""
    return _Recomputing.apply(block.a(x), block.b)


@stacked("straight_through", "a straight-through estimator by detach, rounding and torch.where")
def straight_through(block: Any, x: Tensor) -> Tensor:
    """Quantised values with gradients of the values themselves."""
    h = block.a(x)
    quantised = torch.round(h * 4) / 4
    return torch.where(h > 0, h + (quantised - h).detach(), quantised)


@stacked("gradient_inside", "torch.autograd.grad inside the forward, with create_graph, as in energy models")
def gradient_inside(block: Any, x: Tensor) -> Tensor:
    """Forces of an energy."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.clone().requires_grad_()
        energy = torch.sin(block.a(y)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
    return x - 0.1 * force


# ---- checkpointing of the user's own -----------------------------------------------------------------------


@family("nested_checkpoint", "torch.utils.checkpoint inside a unit, in both modes")
def nested_checkpoint(rng: random.Random) -> Job:
    """A part of every block is checkpointed by the user."""
    reentrant = rng.random() < 0.5

    class Nested(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.2)

        def inner(self, x: Tensor) -> Tensor:
            return torch.sin(self.drop(torch.sin(self.a(x))))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(checkpoint(self.inner, x, use_reentrant=reentrant))

    return stack(rng, Nested)


@family("inside_checkpoint", "units inside a function that the user checkpoints, in both modes")
def inside_checkpoint(rng: random.Random) -> Job:
    """The caller checkpoints what holds the units."""
    reentrant = rng.random() < 0.5

    class Outer(nn.Module):
        def __init__(self, width: int, count: int) -> None:
            super().__init__()
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width))
                for _ in range(count)
            )

        def all(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.sin(block(x))
            return x

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.all, self.first(x), use_reentrant=reentrant)

    count = rng.randint(1, 3)
    return Job(Outer(8, count), tuple(f"blocks.{i}" for i in range(count)), rows_of(8))


@stacked("saved_tensor_hooks_inside", "the user's saved-tensor hooks inside a unit, which pack to another dtype")
def saved_tensor_hooks_inside(block: Any, x: Tensor) -> Tensor:
    """A layer whose saved tensors are packed."""

    def pack(tensor: Tensor) -> Any:
        packs = tensor.dtype in (torch.float32, torch.bfloat16) and not isinstance(tensor, nn.Parameter)
        return (tensor.dtype, tensor.double()) if packs else (tensor.dtype, tensor)

    def unpack(packed: Any) -> Tensor:
        return packed[1].to(packed[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        h = torch.sin(block.a(x))
    return torch.sin(h)


# ---- custom operators --------------------------------------------------------------------------------------


@torch.library.custom_op("autosac_fuzz::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, scale: float) -> Tensor:
    """sin(scale x)."""
    return torch.sin(x * scale)


@torch.library.custom_op("autosac_fuzz::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Noise like x; not tagged as random."""
    return torch.rand(x.shape, dtype=x.dtype)


@torch.library.custom_op("autosac_fuzz::tagged_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def tagged_noise(x: Tensor) -> Tensor:
    """Noise like x; tagged as random."""
    return torch.rand(x.shape, dtype=x.dtype)


@torch.library.custom_op("autosac_fuzz::count", mutates_args=("counter",))
def count(x: Tensor, counter: Tensor) -> Tensor:
    """X times a counter that it raises."""
    counter.add_(1)
    return x * torch.sin(counter)


@torch.library.custom_op("autosac_fuzz::secret", mutates_args=())
def secret(x: Tensor) -> Tensor:
    """X times a scale that Python counts."""
    _CALLS[0] += 1
    return x * (1 + _CALLS[0] % 3)


_CALLS = [0]


@scaled_sine.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@tagged_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@count.register_fake
def _(x: Tensor, counter: Tensor) -> Tensor:
    return torch.empty_like(x)


@secret.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup_sine(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _sine_backward(ctx: Any, gradient: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return gradient * ctx.scale * torch.cos(x * ctx.scale), None


scaled_sine.register_autograd(_sine_backward, setup_context=_setup_sine)
secret.register_autograd(lambda ctx, gradient: gradient * 2.0)


@stacked("custom_op", "a custom operator with an autograd formula")
def custom_op(block: Any, x: Tensor) -> Tensor:
    """The operator after a layer."""
    return scaled_sine(block.a(x), 1.5)


@stacked("custom_op_random", "a custom operator that draws random numbers and is not tagged so")
def custom_op_random(block: Any, x: Tensor) -> Tensor:
    """Untagged noise beside a dropout."""
    return torch.sin(block.a(x) * noise(x.detach())) + nn.functional.dropout(block.b(x), 0.2)


@stacked("custom_op_tagged", "a custom operator that draws random numbers and is tagged so")
def custom_op_tagged(block: Any, x: Tensor) -> Tensor:
    """Tagged noise beside a dropout."""
    return torch.sin(block.a(x) * tagged_noise(x.detach())) + nn.functional.dropout(block.b(x), 0.2)


def _counting(block: Any, _: int) -> None:
    block.register_buffer("calls", torch.zeros(()))


@stacked("custom_op_mutates", "a custom operator that changes a buffer", _counting, double=False)
def custom_op_mutates(block: Any, x: Tensor) -> Tensor:
    """A scale by a buffer that an operator raises."""
    return torch.sin(block.a(x) * count(x.detach(), block.calls))


@family("custom_op_secret", "a custom operator that keeps state in Python")
def custom_op_secret(rng: random.Random) -> Job:
    """A scale that an operator counts in secret."""

    class Secret(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)
            self.is_first = not made
            made.append(None)

        def forward(self, x: Tensor) -> Tensor:
            if self.is_first:  # all models share the operator and its count
                _CALLS[0] = 0
            return torch.sin(secret(self.a(x)))

    made: list[None] = []
    return stack(rng, Secret, state=lambda model: list(_CALLS))

"""What PyTorch's library offers and models use inside: transforms, pruning, parametrizations, lazy modules, subclasses."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from benchmarks.fuzz.families.classes import Layers
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack, stacked


@stacked("vmap_inside", "torch.vmap inside a unit, with random numbers that differ by row")
def vmap_inside(block: Any, x: Tensor) -> Tensor:
    """A layer row by row."""
    weight, bias = block.a.weight, block.a.bias
    y = torch.vmap(lambda row: F.dropout(torch.sin(weight @ row + bias), 0.1), randomness="different")(x)
    return torch.vmap(torch.vmap(lambda v: v * v.sin()))(y)


@stacked("derivatives_inside", "torch.func.jvp, vjp and jacrev inside a unit, as physics-informed networks have them")
def derivatives_inside(block: Any, x: Tensor) -> Tensor:
    """A value beside its own derivatives."""
    _, tangent = torch.func.jvp(lambda h: torch.sin(block.a(h)), (x,), (torch.ones_like(x),))
    value, pull = torch.func.vjp(lambda h: torch.tanh(block.a(h)), x)
    return value + tangent + pull(torch.ones_like(value))[0]


@stacked(
    "func_grad_inside", "torch.func.grad inside a unit, of a loss with respect to weights, as meta-learning has it"
)
def func_grad_inside(block: Any, x: Tensor) -> Tensor:
    """One inner step of gradient descent."""
    weights = dict(block.a.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(block.a, weights, (x,)).sin().square().mean()

    gradients = torch.func.grad(loss)(weights)
    return torch.func.functional_call(block.a, {n: w - 0.1 * gradients[n] for n, w in weights.items()}, (x,))


@stacked("forward_mode_inside", "dual numbers inside a unit")
def forward_mode_inside(block: Any, x: Tensor) -> Tensor:
    """The derivative along one direction."""
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        out = torch.sin(block.a(forward_ad.make_dual(x, torch.ones_like(x))))
        value, tangent = forward_ad.unpack_dual(out)
    return value + tangent


@family("batched_gradients", "jacobians by vectorized backwards (is_grads_batched), and third derivatives")
def batched_gradients(rng: random.Random) -> Job:
    """The backward runs inside of vmap."""
    third = rng.random() < 0.3

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        x = batch[0].detach().requires_grad_()
        out = model(x).tanh()
        if third:
            g = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
            h = torch.autograd.grad(g.square().sum(), x, create_graph=True)[0]
            loss = h.square().mean()
            loss.backward()
            return [loss.detach()]
        basis = torch.eye(out.shape[-1], dtype=out.dtype)[:, None, :].expand(-1, out.shape[0], -1)
        rows = torch.autograd.grad(out, x, basis, is_grads_batched=True, retain_graph=True)[0]
        loss = mean_square(out)
        loss.backward()
        return [loss.detach(), rows.detach()]

    return stack(rng, Layers, step=step)


@family("pruned", "nn.utils.prune: masks that a pre-hook applies, made before and pruned further between the steps")
def pruned(rng: random.Random) -> Job:
    """Weights that are computed anew in every forward."""
    amount = rng.choice((0.2, 0.5))
    job = stack(rng, Layers)
    for name in job.units:
        prune.l1_unstructured(job.model.get_submodule(f"{name}.a"), "weight", amount)
    units = job.units

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        losses = plain_step(model, batch)
        prune.random_unstructured(model.get_submodule(f"{units[0]}.a"), "weight", 0.1)
        return losses

    job.step = step
    return job


class _Moving(nn.Module):
    """A parametrization with state: it divides by a moving maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, w: Tensor) -> Tensor:
        if self.training:
            self.largest.mul_(0.9).add_(w.detach().abs().max(), alpha=0.1)
        return w / self.largest


@family("parametrized", "parametrizations with state, several on one weight, cached for the whole step or not")
def parametrized(rng: random.Random) -> Job:
    """As quantization-aware training has them."""
    cached = rng.random() < 0.5
    job = stack(rng, Layers)
    for name in job.units:
        layer = job.model.get_submodule(f"{name}.a")
        parametrize.register_parametrization(layer, "weight", _Moving())
        if rng.random() < 0.5:
            parametrize.register_parametrization(layer, "weight", nn.Tanh())

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        if not cached:
            return plain_step(model, batch)
        with parametrize.cached():
            return plain_step(model, batch)

    job.step = step
    return job


@family("lazy_modules", "lazy layers, which get their shapes in the first forward", planner=False)
def lazy_modules(rng: random.Random) -> Job:
    """Layers whose classes change in the first forward, which was before the plan was applied."""

    class Lazy(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.LazyLinear(width), nn.LazyBatchNorm1d(), nn.LazyLinear(width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(torch.sin(self.norm(self.a(x))))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = stack(rng, Lazy, 8, double=False)
        job.model(torch.randn(8, 8))
    return job


@family("nested_tensors", "jagged nested tensors inside units and between them", planner=False)
def nested_tensors(rng: random.Random) -> Job:
    """Sequences of several lengths in one tensor."""
    outside = rng.random() < 0.5

    class Jagged(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if outside:
                return torch.sin(self.b(torch.sin(self.a(x)))) + x
            half = x.shape[0] // 2
            nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, half, x.shape[0]]))
            return torch.sin(self.a(nested)).values() + x

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList(Jagged(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if outside:
                x = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, x.shape[0] // 3, x.shape[0]]))
            for block in self.blocks:
                x = block(x)
            return x.values() if outside else x

    return Job(Net(8), ("blocks.0", "blocks.1"), rows_of(8), double=False)


@family("channels_last", "convolutions in channels_last, to which the model is brought after the plan was applied")
def channels_last(rng: random.Random) -> Job:
    """Another memory format than that of the plan."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(F.silu(self.norm(self.a(x)), inplace=True))

    moved = rng.random() < 0.7

    def batch(rows: int) -> Any:
        x = torch.randn(max(1, rows // 8), 4, 5, 5)
        return (x.to(memory_format=torch.channels_last) if rng.random() < 2 else x,)

    return Job(
        nn.Sequential(Conv(), Conv()),
        ("0", "1"),
        batch,
        transform=lambda model: model.to(memory_format=torch.channels_last) if moved else model,
    )


@stacked(
    "quantized_tables", "int8 and packed tables that a unit dequantizes, and tensors of quantized types", double=False
)
def quantized_tables(block: Any, x: Tensor) -> Tensor:
    """Weights as integers with a scale, and a quantized activation."""
    scale = block.a.weight.detach().abs().amax() / 127
    table = torch.quantize_per_tensor(block.a.weight.detach(), float(scale), 0, torch.qint8)
    whole = (block.b.weight.detach() / scale).round().to(torch.int8)
    packed = (whole & 0xF) | ((whole >> 4) << 4)
    return torch.sin(x @ table.dequantize().t()) + x @ (packed.to(x.dtype) * scale)


class _Scaled(Tensor):
    """A subclass of Tensor that every function returns again."""


@stacked("subclasses", "subclasses of Tensor and Parameter of the user's own, and torch functions that they override")
def subclasses(block: Any, x: Tensor) -> Tensor:
    """Values that carry another class."""
    y = torch.sin(block.a(x).as_subclass(_Scaled))
    return (y * torch.sin(y)).as_subclass(Tensor)


@stacked(
    "complex_views", "real and imaginary views of complex results, conjugates, and writes through them", double=False
)
def complex_views(block: Any, x: Tensor) -> Tensor:
    """A spectrum that is changed through its views."""
    spectrum = torch.fft.fft(torch.sin(block.a(x)))
    spectrum.real.mul_(0.5)
    spectrum.imag[:, 0] = 1.0
    other = spectrum.conj() * spectrum
    pairs = torch.view_as_real(other.resolve_conj())
    return torch.fft.ifft(spectrum.conj()).real + (pairs.sin() * other.imag[..., None].neg()).sum(-1)


@stacked("scripted_function", "a scripted function inside a unit, which is optimized after some calls", planner=False)
def scripted_function(block: Any, x: Tensor) -> Tensor:
    """Run by TorchScript's interpreter."""
    return _scripted()(block.a(x), x)


def _scripted() -> Any:
    global _script
    if _script is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _script = torch.jit.script(_gated)
    return _script


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * torch.sigmoid(y) + x.relu()


_script: Any = None


@family(
    "compiled_inside",
    "a layer or a function inside a unit is compiled by aot_eager",
    planner=False,
    most=60,
    limit_s=90.0,
)
def compiled_inside(rng: random.Random) -> Job:
    """A part of every unit is compiled; the rest of it is not."""
    kind = rng.randrange(3)

    class Partly(Layers):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.call = torch.compile(_gated, backend="aot_eager") if kind == 0 else None

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            if self.call is not None:
                h = self.call(h, x)
            return x + self.b(h)

    def transform(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        for block in model.get_submodule("blocks").children() if kind else ():
            if kind == 1:
                block.a.compile(backend="aot_eager")
            else:
                block.b = torch.compile(block.b, backend="aot_eager")
        return model

    job = stack(rng, Partly, transform=transform)
    job.rows = (24, 16)
    return job


@stacked("control_flow_operators", "torch.cond and the operators of other control flow inside a unit", planner=False)
def control_flow_operators(block: Any, x: Tensor) -> Tensor:
    """Higher-order operators, run eagerly."""
    from torch._higher_order_ops.associative_scan import associative_scan

    y = torch.sin(block.a(x))
    with torch.no_grad():
        total = associative_scan(lambda a, b: a + b, y.detach(), 0, combine_mode="generic")
    return y + total * 0.1


@stacked(
    "numpy_views", "NumPy reads an activation, and its result comes back by from_numpy", double=False, planner=False
)
def numpy_views(block: Any, x: Tensor) -> Tensor:
    """A constant that was computed elsewhere."""
    y = torch.sin(block.a(x))
    order = torch.from_numpy(y.detach().numpy().argsort(0).copy())
    return y.gather(0, order) * torch.frombuffer(bytearray(y.detach().numpy().tobytes()), dtype=torch.float32).view_as(
        y
    )


@stacked("swapped_tensors", "a unit that exchanges two of its tensors by torch.utils.swap_tensors", double=False)
def swapped_tensors(block: Any, x: Tensor) -> Tensor:
    """What stands under a name changes in the forward."""
    one, two = torch.full((x.shape[1],), 0.5), torch.full((x.shape[1],), 2.0)
    y = torch.sin(block.a(x) * one.exp())
    torch.utils.swap_tensors(one, two)
    return torch.sin(y * one.sin()) + two


def _with_mode(model: nn.Module, batch: Any) -> list[Tensor]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        loss = mean_square(model(*batch))
    loss.backward()
    return [loss.detach()]


@stacked("flop_counter", "PyTorch's counter of operations around the forward", step=_with_mode)
def flop_counter(block: Any, x: Tensor) -> Tensor:
    """Another dispatch mode outside of the unit's."""
    return torch.sin(block.a(x))


@family("empty_batches", "batches without rows, tensors without elements, numbers as tensors")
def empty_batches(rng: random.Random) -> Job:
    """Steps in which there is nothing to compute."""

    class Sums(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            scale = torch.tanh(h.sum())
            return x + self.b(h) * scale + torch.cat([h[:0], h[0:0].exp(), h]).sin()

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        out = model(*batch)
        loss = out.pow(2).sum() / max(1, out.numel())
        loss.backward()
        return [loss.detach()]

    return stack(rng, Sums, step=step, rows=(24, 0, 1, 7))

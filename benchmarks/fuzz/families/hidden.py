"""What a forward reads from and leaves in Python: attributes, lists, counters, flags, generators."""

from __future__ import annotations

import contextvars
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, Stack, family, mean_square, rows_of, stack, stacked


def _flag(model: nn.Module, batch: Any) -> list[Tensor]:
    model.train()
    loss = mean_square(model(*batch))
    model.eval()
    loss.backward()
    model.train()
    return [loss.detach()]


@stacked("train_flag", "the model is in training in the forward and in eval mode in the backward", step=_flag)
def train_flag(block: Any, x: Tensor) -> Tensor:
    """Scale and drop in training only."""
    h = nn.functional.dropout(block.a(x), 0.2, block.training)
    return h * (2.0 if block.training else 1.0)


class _SetsAttributes(nn.Module):
    """Sets an attribute of every block before it calls it, as Swin sets H and W; every call with another value."""

    def __init__(self, width: int, count: int, tensors: bool) -> None:
        super().__init__()
        self.tensors = tensors
        self.blocks = nn.ModuleList(_Scaled(width) for _ in range(count))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(2):
                self.calls += 1
                block.scale = x.detach().abs().mean() if self.tensors else 1.0 + self.calls % 5
                x = block(x)
        return x


class _Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.b(torch.sin(self.a(x) * self.scale))) * self.scale


@family("parent_attribute", "a parent sets an attribute of a unit before every call, numbers or tensors")
def parent_attribute(rng: random.Random) -> Job:
    """Attributes that change between two calls of one step."""
    count = rng.randint(1, 2)
    model = _SetsAttributes(8, count, rng.random() < 0.4)
    return Job(model, tuple(f"blocks.{i}" for i in range(count)), rows_of(8))


def _own(block: Any, _: int) -> None:
    block.level, block.seen = 1.0, 0


@stacked("own_attribute", "a unit changes its own attributes, which change what it computes", _own)
def own_attribute(block: Any, x: Tensor) -> Tensor:
    """A scale that decays with every call."""
    h = torch.sin(block.a(x) * block.level)
    block.level *= 0.75
    block.seen += x.shape[0]
    return h * block.level


@stacked(
    "attribute_of_value", "a unit keeps a number that it computed from its input and reads it in the next call", _own
)
def attribute_of_value(block: Any, x: Tensor) -> Tensor:
    """A scale from the input of the call before."""
    h = torch.sin(block.a(x) * block.level)
    block.level = float(x.detach().abs().mean()) + 0.5
    return h


def _lists(block: Any, _: int) -> None:
    block.history, block.table = [1.0], {"scale": 1.0, "steps": [0]}


@stacked("list_and_dict", "state in lists and dictionaries", _lists)
def list_and_dict(block: Any, x: Tensor) -> Tensor:
    """A scale from a list that grows."""
    h = torch.sin(block.a(x) * (block.history[-1] + len(block.history)))
    block.history.append(block.history[-1] * 0.5)
    block.table["scale"] *= 0.5
    block.table["steps"][0] += 1
    return h * block.table["scale"]


@stacked("python_random", "Python's random numbers decide on scales and branches")
def python_random(block: Any, x: Tensor) -> Tensor:
    """A random scale, a random branch, a random slice."""
    h = block.a(x) * random.random()
    if random.random() < 0.5:
        h = torch.sin(h)
    return h + x[:, random.randrange(x.shape[1])].unsqueeze(1)


@stacked("numpy_random", "NumPy's random numbers, scalar and array")
def numpy_random(block: Any, x: Tensor) -> Tensor:
    """A random scale of every column."""
    scale = torch.as_tensor(np.random.rand(x.shape[-1]), dtype=x.dtype, device=x.device)  # noqa: NPY002
    return torch.sin(block.a(x) * scale) * float(np.random.normal())  # noqa: NPY002


def _own_randoms(block: Any, _: int) -> None:
    block.dice, block.numbers = random.Random(3), np.random.default_rng(3)


@stacked("own_random_objects", "generators of Python and NumPy that the module owns", _own_randoms)
def own_random_objects(block: Any, x: Tensor) -> Tensor:
    """Random scales from objects."""
    return torch.sin(block.a(x) * block.dice.random()) * float(block.numbers.random())


def _counter(block: Any, _: int) -> None:
    block.calls = 0


@stacked("call_counter", "the number of calls decides on the branch", _counter)
def call_counter(block: Any, x: Tensor) -> Tensor:
    """Every second call computes something else with the same shapes."""
    block.calls += 1
    h = block.a(x)
    return torch.sin(h) if block.calls % 2 else torch.cos(h) * block.calls


@stacked("warm_up", "the first call does more than all others", _counter)
def warm_up(block: Any, x: Tensor) -> Tensor:
    """The first call initialises the bias from its data."""
    if block.calls == 0:
        with torch.no_grad():
            block.a.bias.copy_(-block.a(x).mean(0))
    block.calls += 1
    return torch.sin(block.a(x))


def _generator(block: Any, _: int) -> None:
    block.generator = torch.Generator().manual_seed(5)


@stacked("own_generator", "random operators with a generator of the module's own", _generator)
def own_generator(block: Any, x: Tensor) -> Tensor:
    """Masks and noise from an own generator, and a mask from the global one."""
    mask = torch.bernoulli(torch.full_like(x, 0.5), generator=block.generator)
    noise = torch.empty_like(x).normal_(generator=block.generator)
    return nn.functional.dropout(block.a(x) * mask, 0.2) + torch.sin(block.b(x)) * noise


def _seeds(block: Any, _: int) -> None:
    block.calls = 0


@stacked("seeded_inside", "a forward that seeds a fresh generator, or forks the global one", _seeds)
def seeded_inside(block: Any, x: Tensor) -> Tensor:
    """Noise that depends on a seed of its own."""
    block.calls += 1
    generator = torch.Generator().manual_seed(block.calls)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        more = torch.rand_like(x)
    return torch.sin(block.a(x)) * noise + block.b(x) * more


@stacked("rng_state_set", "a forward that reads and sets the state of the global generator")
def rng_state_set(block: Any, x: Tensor) -> Tensor:
    """Two equal masks, as reversible networks draw them."""
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return torch.sin(block.a(x) * first) + torch.rand_like(x)


def _functional(model: nn.Module, batch: Any) -> list[Tensor]:
    scaled = {name: p * 1.5 for name, p in model.named_parameters()}
    loss = mean_square(torch.func.functional_call(model, scaled, batch))
    loss.backward()
    return [loss.detach()]


@stacked(
    "functional_call",
    "torch.func.functional_call with scaled parameters; the backward runs after it has put them back",
    step=_functional,
)
def functional_call(block: Any, x: Tensor) -> Tensor:
    """A layer whose parameters are exchanged for the forward."""
    return block.a(x)


_SCALE = {"value": 1.0}


def _global_step(model: nn.Module, batch: Any) -> list[Tensor]:
    _SCALE["value"] = 1.5
    loss = mean_square(model(*batch))
    _SCALE["value"] = 0.25
    loss.backward()
    return [loss.detach()]


@stacked("global_value", "a global that another function changes between forward and backward", step=_global_step)
def global_value(block: Any, x: Tensor) -> Tensor:
    """Scale by a global."""
    return torch.sin(block.a(x) * _SCALE["value"])


_CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def _context_step(model: nn.Module, batch: Any) -> list[Tensor]:
    token = _CONTEXT.set(2.0)
    loss = mean_square(model(*batch))
    _CONTEXT.reset(token)
    loss.backward()
    return [loss.detach()]


@stacked("context_variable", "a context variable is set around the forward only", step=_context_step)
def context_variable(block: Any, x: Tensor) -> Tensor:
    """Scale by a context variable."""
    return torch.sin(block.a(x) * _CONTEXT.get())


def _iterator(block: Any, _: int) -> None:
    block.cycle = itertools.cycle((0.5, 1.0, 2.0))


@stacked("iterator", "an iterator that every call advances", _iterator)
def iterator(block: Any, x: Tensor) -> Tensor:
    """Scale by the next value."""
    return torch.sin(block.a(x) * next(block.cycle))


@stacked("stochastic_depth", "a tensor's random value decides whether a part runs")
def stochastic_depth(block: Any, x: Tensor) -> Tensor:
    """Skip a layer by chance."""
    return torch.sin(block.a(x)) if torch.rand(()).item() < 0.6 else x * 1.5


def _swap_step(model: nn.Module, batch: Any) -> list[Tensor]:
    loss = mean_square(model(*batch))
    kept = {}
    for block in model.get_submodule("blocks").children():
        kept[block] = block.a
        block.a = nn.Linear(block.a.in_features, block.a.out_features, dtype=block.a.weight.dtype)
    loss.backward()
    for block, layer in kept.items():
        block.a = layer
    return [loss.detach()]


@stacked("module_exchanged", "a submodule is exchanged between forward and backward", step=_swap_step)
def module_exchanged(block: Any, x: Tensor) -> Tensor:
    """A layer that is another one when the backward runs."""
    return torch.sin(block.a(x))


def _scheduled(block: Any, _: int) -> None:
    block.temperature = 1.0


def _scheduled_step(model: nn.Module, batch: Any) -> list[Tensor]:
    loss = mean_square(model(*batch))
    for block in model.get_submodule("blocks").children():
        block.temperature *= 0.5
    loss.backward()
    return [loss.detach()]


@stacked(
    "schedule_between",
    "a scheduler changes a unit's temperature between forward and backward",
    _scheduled,
    step=_scheduled_step,
)
def schedule_between(block: Any, x: Tensor) -> Tensor:
    """Soft attention at a temperature."""
    return torch.softmax(block.a(x) / block.temperature, -1)


@family("auxiliary_output", "a unit keeps its output and an auxiliary loss in attributes that the training step uses")
def auxiliary_output(rng: random.Random) -> Job:
    """Losses that are collected from the modules after the forward."""

    class Auxiliary(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            self.penalty = h.pow(2).mean()
            self.last = self.b(h)
            return x + self.last

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        for module in model.modules():
            if isinstance(module, Auxiliary) and hasattr(module, "penalty"):
                loss = loss + 0.1 * module.penalty + module.last.abs().mean()
        loss.backward()
        return [loss.detach()]

    return stack(rng, Auxiliary, step=step)


@family("collected_losses", "units append losses to a list of their parent")
def collected_losses(rng: random.Random) -> Job:
    """A list that all units share."""
    collected: list[Tensor] = []

    class Collecting(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            collected.append(h.abs().mean())
            return x + self.b(h)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        collected.clear()
        loss = mean_square(model(*batch)) + torch.stack(collected).sum()
        count = len(collected)
        loss.backward()
        return [loss.detach(), torch.tensor(count)]

    return stack(rng, Collecting, step=step, state=lambda model: len(collected))


@family("ragged_state", "a unit keeps its last input and mixes it into the next call")
def ragged_state(rng: random.Random) -> Job:
    """Memory of the last call, detached."""

    class Remembering(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b, self.memory = nn.Linear(width, width), nn.Linear(width, width), None

        def forward(self, x: Tensor) -> Tensor:
            old = self.memory if self.memory is not None and self.memory.shape == x.shape else torch.ones_like(x)
            self.memory = x.detach()
            return x + self.b(torch.sin(self.a(x) * old.to(x.dtype)))

    return stack(rng, Remembering)


def forward_in_float64(model: nn.Module, batch: Any) -> list[Tensor]:
    """A step whose forward has another default dtype than its backward."""
    torch.set_default_dtype(torch.float64)
    try:
        loss = mean_square(model(*batch))
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return [loss.detach()]


@family("default_dtype", "a forward under another default dtype than the backward")
def default_dtype(rng: random.Random) -> Job:
    """Tables that are made in the default dtype."""

    class Table(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            table = torch.linspace(0, 1, x.shape[-1]).to(x.dtype)
            return torch.sin(self.a(x) * table)

    return stack(rng, Table, step=forward_in_float64)


@family("shared_counter", "several units and the training loop count in one object")
def shared_counter(rng: random.Random) -> Job:
    """A counter that no module owns."""
    counter = {"calls": 0}

    class Counting(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            counter["calls"] += 1
            return torch.sin(self.a(x) * (1 + counter["calls"] % 3))

    width = 8
    count = rng.randint(1, 3)
    units = tuple(f"blocks.{i}" for i in range(count))
    model = Stack([Counting(width) for _ in range(count)], width)
    return Job(model, units, rows_of(width), state=lambda model: dict(counter))

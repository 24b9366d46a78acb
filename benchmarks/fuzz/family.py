"""What a family of models is: a function from a random generator to a `Job`.

`family` registers one under its name; `stacked` registers one whose blocks share everything but a few lines in their middle.
Everything that a job computes has to follow from the random generators (PyTorch's, Python's, NumPy's) that are seeded before
it is built and before every step, so that two jobs that are built and run alike give bitwise the same.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 24  # of the batch that plans are made for


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for item in dataclasses.fields(tree):
            yield from tensors_of(getattr(tree, item.name))
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for value in tree:
            yield from tensors_of(value)


def mean_square(out: Any) -> Tensor:
    """The sum of the mean squares of all floating-point tensors in a model's output: the loss of most families."""
    total = None
    for tensor in tensors_of(out):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point() and tensor.requires_grad:
            part = tensor.float().pow(2).mean() if tensor.dtype != torch.float64 else tensor.pow(2).mean()
            total = part if total is None else total + part
    if total is None:
        raise ValueError("no output requires a gradient")
    return total


def plain_step(model: nn.Module, batch: Any) -> list[Tensor]:
    """Forward and backward; the losses."""
    loss = mean_square(model(*batch))
    loss.backward()
    return [loss.detach()]


@dataclass
class Job:
    """A model with its data and its training step.

    `units`: the modules that legal plans may checkpoint. `batch(rows)`: the arguments of the model, drawn from PyTorch's
    generator. `step(model, batch)`: forward and backward, without the optimizer; it returns the losses. `state(model)`: what
    else the user can see, beside the attributes of the modules. `transform(model)`: what is done to the model after the plan
    was applied (compile, DDP, FSDP), as to the one without a plan. `is_compiled_by_units`: it compiles each unit by itself.
    """

    model: nn.Module
    units: tuple[str, ...]
    batch: Callable[[int], Any]
    step: Callable[[nn.Module, Any], list[Tensor]] = plain_step
    state: Callable[[nn.Module], Any] = lambda model: None
    transform: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizers: tuple[str, ...] = ("sgd", "adam")
    rows: tuple[int, ...] = (ROWS, ROWS, ROWS, 7, 16)
    double: bool = True
    is_compiled_by_units: bool = False


Build = Callable[[random.Random], Job]


@dataclass(frozen=True)
class Family:
    """A kind of model. `planner`: whether plans of the planner are tried (not where a capture
    cannot run the model: NumPy in the forward, several ranks). `most`: how many trials one run makes at most
    (None: no bound). `ranks`: how many processes a trial needs. `needs`: a package that must be there. `limit_s`: seconds of a
    processor that a trial may take. `plan_transformed`: plan the model as `Job.transform` returns it.
    `compiled`: the job compiles its model. `rounds`: by a compiler whose sums are in another order under a plan.
    `variants`: how many jobs legal and hostile plans are
    made for. `module`: where it is defined. `base`: the family before its models were compiled (`benchmarks.fuzz.compiling`).
    """

    name: str
    about: str
    build: Build
    planner: bool = True
    most: int | None = None
    ranks: int = 1
    needs: str = ""
    plan_transformed: bool = False
    limit_s: float = 20.0
    compiled: bool = False
    rounds: bool = False
    variants: int = 6
    module: str = ""
    base: Family | None = None


FAMILIES: dict[str, Family] = {}


def family(name: str, about: str, **options: Any) -> Callable[[Build], Build]:
    """Register a function that builds a job as the family `name`."""

    def register(build: Build) -> Build:
        assert name not in FAMILIES, name
        FAMILIES[name] = Family(name, about, build, module=build.__module__, **options)
        return build

    return register


# ---- stacks of blocks --------------------------------------------------------------------------------------


def rows_of(width: int, *, grad: bool = False) -> Callable[[int], Any]:
    """Batches of one matrix rows x width."""

    def batch(rows: int) -> Any:
        x = torch.randn(rows, width)
        return (x.requires_grad_(grad),)

    return batch


class Block(nn.Module):
    """Three linear layers with sines between them, and the family's `body` at one place of them.

    `place` says where the body runs: before the first layer, between, or after the last.
    """

    def __init__(
        self, width: int, rng: random.Random, body: Callable[[Any, Tensor], Tensor], setup: Any = None
    ) -> None:
        super().__init__()
        self.width, self.place, self.body = width, rng.choice((0, 0, 1, 2)), body
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        if setup is not None:
            setup(self, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, as large as its input."""
        h = self.body(self, x) if self.place == 0 else self.a(x)
        h = torch.sin(self.b(torch.sin(h)))
        if self.place == 1:
            h = self.body(self, h)
        h = self.c(torch.sin(h)) + x
        return self.body(self, h) if self.place == 2 else h


class Stack(nn.Module):
    """Blocks one after the other, with a layer before and after them."""

    def __init__(self, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack(rng: random.Random, make: Callable[[int], nn.Module], width: int = 0, **options: Any) -> Job:
    """A job of one to three blocks that `make(width)` returns."""
    width = width or rng.choice((4, 8, 16))
    blocks = [make(width) for _ in range(rng.randint(1, 3))]
    units = tuple(f"blocks.{i}" for i in range(len(blocks)))
    options.setdefault("batch", rows_of(width))
    return Job(Stack(blocks, width), units, **options)


def stacked(
    name: str,
    about: str,
    setup: Callable[[Any, int], Any] | None = None,
    *,
    width: int = 0,
    step: Callable[[nn.Module, Any], list[Tensor]] = plain_step,
    rows: tuple[int, ...] = (ROWS, ROWS, ROWS, 7, 16),
    double: bool = True,
    **options: Any,
) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    """Register the family of stacks whose blocks run the decorated function as their body."""

    def register(body: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def build(rng: random.Random) -> Job:
            return stack(rng, lambda w: Block(w, rng, body, setup), width, step=step, rows=rows, double=double)

        assert name not in FAMILIES, name
        FAMILIES[name] = Family(name, about, build, module=body.__module__, **options)
        return body

    return register

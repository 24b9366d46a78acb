"""What goes into and comes out of a unit: containers, keywords, nothing, integers, shared modules, branches."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, family, mean_square, rows_of, stack, stacked


class _Wrapped(nn.Module):
    """`blocks` whose inputs and outputs are packed by the functions `pack` and `unpack`."""

    def __init__(self, blocks: list[nn.Module], pack: Any, unpack: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.pack, self.unpack = pack, unpack

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            args, kwargs = self.pack(x)
            x = self.unpack(block(*args, **kwargs))
        return self.last(x)


class _Two(nn.Module):
    """Two layers; the family's function is the forward."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def _job(rng: random.Random, forward: Any, pack: Any, unpack: Any, **options: Any) -> Job:
    count = rng.randint(1, 3)
    model = _Wrapped([_Two(forward) for _ in range(count)], pack, unpack)
    return Job(model, tuple(f"blocks.{i}" for i in range(count)), options.pop("batch", rows_of(8)), **options)


def _both(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.sin(block.a(x))
    return torch.sin(block.b(h)), h


@family("dictionaries", "a dictionary in and a dictionary out, with entries that are no tensors")
def dictionaries(rng: random.Random) -> Job:
    """Named inputs and outputs."""

    def forward(block: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        y, h = _both(block, inputs["x"] * inputs["scale"])
        return OrderedDict(y=y, more={"h": h}, name=inputs["name"], nothing=None)

    return _job(
        rng, forward, lambda x: (({"x": x, "scale": 1.5, "name": "n"},), {}), lambda out: out["y"] + out["more"]["h"]
    )


@dataclass
class _Output:
    y: Tensor
    h: Tensor | None
    rows: int


@family("dataclasses", "a dataclass in and a dataclass out")
def dataclasses(rng: random.Random) -> Job:
    """Structured inputs and outputs."""

    def forward(block: Any, given: _Output) -> _Output:
        y, h = _both(block, given.y)
        return _Output(y, h, given.rows + 1)

    return _job(rng, forward, lambda x: ((_Output(x, None, 0),), {}), lambda out: out.y * out.h)


class _Pair(NamedTuple):
    y: Tensor
    h: Tensor


@family("tuples", "named tuples, lists and nested tuples, with an output that nobody uses")
def tuples(rng: random.Random) -> Job:
    """Sequences in and out."""
    unused = rng.random() < 0.5

    def forward(block: Any, pair: _Pair, rest: list[Any]) -> Any:
        y, h = _both(block, pair.y + pair.h)
        return _Pair(y, h), [rest, (h.sum(), y[:1])]

    def unpack(out: Any) -> Tensor:
        return out[0].y if unused else out[0].y + out[1][1][0] + out[0].h

    return _job(rng, forward, lambda x: ((_Pair(x, x * 2), [1, None, "s"]), {}), unpack)


@family("keywords", "keyword arguments, some with defaults, flags and strings that choose the branch")
def keywords(rng: random.Random) -> Job:
    """Inputs by name."""
    mode = rng.choice(("sin", "cos"))

    def forward(block: Any, x: Tensor, *, other: Tensor, mode: str = "sin", twice: bool = False) -> Tensor:
        h = getattr(torch, mode)(block.a(x) * other)
        return block.b(h) * 2 if twice else block.b(h)

    return _job(rng, forward, lambda x: ((x,), {"other": torch.sin(x), "mode": mode, "twice": True}), lambda out: out)


@family(
    "nothing_returned", "a unit returns None and works through what it is given, or returns containers without tensors"
)
def nothing_returned(rng: random.Random) -> Job:
    """Results in a dictionary that the caller passes."""
    kind = rng.choice((None, (), {"n": 3}))

    def forward(block: Any, x: Tensor, results: dict[str, Tensor]) -> Any:
        results["y"], results["h"] = _both(block, x)
        return kind

    holder: dict[str, Tensor] = {}

    def unpack(out: Any) -> Tensor:
        assert out == kind
        return holder["y"] + holder["h"]

    return _job(rng, forward, lambda x: ((x, holder), {}), unpack)


@family("list_appended", "a unit appends its results to a list that the caller passes")
def list_appended(rng: random.Random) -> Job:
    """A list of skips."""
    lengths: list[int] = []

    def forward(block: Any, x: Tensor, skips: list[Tensor]) -> Tensor:
        y, h = _both(block, x)
        skips.append(h)
        return y

    skips: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        skips.clear()
        loss = mean_square(model(*batch)) + sum(skip.abs().mean() for skip in skips)
        loss.backward()
        lengths.append(len(skips))
        return [loss.detach()]

    return _job(rng, forward, lambda x: ((x, skips), {}), lambda out: out, step=step, state=lambda model: list(lengths))


@family("integers", "integer and boolean inputs and outputs, masks and indices")
def integers(rng: random.Random) -> Job:
    """Indices go in, indices come out."""

    def forward(block: Any, x: Tensor, index: Tensor, mask: Tensor) -> Any:
        h = torch.sin(block.a(x[index]))
        h = h.masked_fill(mask, 0.5)
        return block.b(h), h.argsort(0)[:, 0], h > 0

    def pack(x: Tensor) -> Any:
        return (x, torch.arange(x.shape[0] - 1, -1, -1, device=x.device), x.detach() > 1), {}

    return _job(rng, forward, pack, lambda out: out[0][out[1]] * out[2])


@family("input_gradients", "inputs that require gradients, of which some are not used")
def input_gradients(rng: random.Random) -> Job:
    """Gradients with respect to the data."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                _Two(lambda block, x, y, z: torch.sin(block.a(x)) * block.b(y)) for _ in range(2)
            )

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x, y, z), y, z)

    def batch(rows: int) -> Any:
        return tuple(torch.randn(rows, 8, requires_grad=needs) for needs in (True, rng_needs, True))

    rng_needs = rng.random() < 0.5
    return Job(Net(), ("blocks.0", "blocks.1"), batch)


@stacked("branches", "a branch on the data: which operators run depends on values")
def branches(block: Any, x: Tensor) -> Tensor:
    """One of three computations."""
    h = block.a(x)
    mean = h.detach().mean().item()
    if mean > 0.05:
        return torch.sin(h)
    if mean > -0.05:
        return torch.cos(h) * torch.sigmoid(h)
    return h * h.detach().abs().max()


@stacked("ragged", "shapes that depend on the data: nonzero, masks, unique")
def ragged(block: Any, x: Tensor) -> Tensor:
    """Rows above the mean pass another layer."""
    h = block.a(x)
    rows = (h.detach().mean(-1) > 0).nonzero().flatten()
    y = h * 1.0
    y[rows] = torch.sin(block.b(h[rows])).to(y.dtype)
    return y + torch.unique(rows).numel()


@family("recursion", "one unit is called several times in one forward, with several shapes")
def recursion(rng: random.Random) -> Job:
    """A tree of calls."""
    depth = rng.randint(2, 3)

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))

        def grow(self, x: Tensor, depth: int) -> Tensor:
            if depth == 0 or x.shape[0] < 2:
                return self.cell(x)
            middle = x.shape[0] // 2
            return self.cell(torch.cat([self.grow(x[:middle], depth - 1), self.grow(x[middle:], depth - 1)]))

        def forward(self, x: Tensor) -> Tensor:
            return self.grow(x, depth)

    return Job(Tree(), ("cell",), rows_of(8))


@family("recursive_unit", "a unit that calls itself in its own forward")
def recursive_unit(rng: random.Random) -> Job:
    """A module that goes through its own call."""

    class Descending(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            h = torch.sin(self.a(x))
            if depth:
                h = self(h, depth - 1)
            return x + self.b(torch.sin(h))

    return stack(rng, Descending)


@family("shared_module", "one module under several names, as a unit under one of them")
def shared_module(rng: random.Random) -> Job:
    """Weight sharing across depth, as in ALBERT."""
    width = 8
    block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList([block, nn.Linear(width, width), block])
            self.also = block

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for inner in self.blocks:
                x = x + inner(x)
            return self.also(x)

    units = rng.choice((("blocks.0", "blocks.1"), ("blocks.2", "blocks.1"), ("also",)))
    return Job(Net(), units, rows_of(width))


@family("no_grad_parts", "parts of a unit and whole units run under no_grad, enable_grad or inference_mode")
def no_grad_parts(rng: random.Random) -> Job:
    """A teacher and a student through the same units."""
    kind = rng.choice(("teacher", "inside", "enabled"))

    def forward(block: Any, x: Tensor) -> Tensor:
        if kind == "inside":
            with torch.no_grad():
                gate = torch.sigmoid(block.b(x))
            with torch.inference_mode():
                level = float(gate.mean())
            return torch.sin(block.a(x)) * gate * level
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return torch.sin(block.a(x)) * torch.sigmoid(block.b(x))

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        target = torch.zeros(())
        if kind == "teacher":
            with torch.no_grad():
                target = model(*batch)
        with torch.no_grad(), torch.enable_grad():
            out = model(*batch)
        loss = (out - target * 0.9).pow(2).mean()
        loss.backward()
        return [loss.detach(), target]

    return _job(rng, forward, lambda x: ((x,), {}), lambda out: out, step=step)


@family("method_and_closure", "a unit whose work is in other methods, closures and a lambda attribute")
def method_and_closure(rng: random.Random) -> Job:
    """Entry points beside forward."""

    class Methods(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def encode(self, x: Tensor) -> Tensor:
            return torch.sin(self.a(x))

        def forward(self, x: Tensor) -> Tensor:
            later = [lambda h, i=i: torch.sin(self.b(h) * (i + 1)) for i in range(2)]
            h = self.encode(x)
            for function in later:
                h = function(h)
            return h

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        beside = sum(block.encode(batch[0]).mean() for block in model.get_submodule("blocks").children())
        loss = mean_square(model(*batch)) + beside
        loss.backward()
        return [loss.detach()]

    return stack(rng, Methods, step=step)


@family("parameter_list", "ParameterList, ParameterDict, parameters used directly and a scalar parameter")
def parameter_list(rng: random.Random) -> Job:
    """Parameters outside of layers."""

    class Direct(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.matrices = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
            self.named = nn.ParameterDict(
                {"scale": nn.Parameter(torch.ones(())), "shift": nn.Parameter(torch.zeros(width))}
            )
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            for matrix in self.matrices:
                x = torch.sin(x @ matrix) * self.named["scale"]
            return x + self.named["shift"]

    return stack(rng, Direct)


@family("indexed_sequential", "units inside Sequential, ModuleDict and subclasses of them, called by slices")
def indexed_sequential(rng: random.Random) -> Job:
    """Containers that are sliced in the forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)), nn.Linear(8, 8)
            )
            self.heads = nn.ModuleDict(
                {"left": nn.Linear(8, 4), "right": nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1))}
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[:3](x) + self.body[-1](x)
            return torch.cat([head(h) for head in self.heads.values()], -1)

    return Job(Net(), ("body.2", "body.0", "heads.right"), rows_of(8))

"""Classes that do something unusual: class state, metaclasses, exact types, forwards that are exchanged, odd results."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.fuzz.family import Job, Stack, family, plain_step, rows_of, stack


class Layers(nn.Module):
    """Two layers with a sine and a dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def body(self, x: Tensor) -> Tensor:
        """The output."""
        return x + self.b(nn.functional.dropout(torch.sin(self.a(x)), 0.1, self.training))

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return self.body(x)


@family("class_counter", "a counter and a list that belong to the class, written through type(self) and the class")
def class_counter(rng: random.Random) -> Job:
    """Units and other modules of one class share its attributes."""

    class Counting(Layers):
        calls = 0
        seen: ClassVar[list[int]] = []

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            self.seen.append(Counting.calls)
            return self.body(x) * (1 + Counting.calls % 3)

    return stack(rng, Counting, state=lambda model: (Counting.calls, list(Counting.seen)))


@family("class_registry", "classes with a metaclass and __init_subclass__, which keep registers and want arguments")
def class_registry(rng: random.Random) -> Job:
    """Subclasses are registered by name, and have to give one."""
    registered: dict[str, type] = {}

    class Base(Layers, metaclass=abc.ABCMeta):
        def __init_subclass__(cls, *, name: str) -> None:
            super().__init_subclass__()
            registered[name] = cls

    class Named(Base, name="named"):
        pass

    return stack(rng, Named, state=lambda model: sorted(registered))


@family("forward_exchanged", "train() and eval() set self.forward to another method")
def forward_exchanged(rng: random.Random) -> Job:
    """As modules do that are fused for inference."""

    class Switching(Layers):
        def train(self, mode: bool = True) -> Any:
            self.forward = self.slow if mode else self.quick
            return super().train(mode)

        def slow(self, x: Tensor) -> Tensor:
            return self.body(x)

        def quick(self, x: Tensor) -> Tensor:
            return torch.sin(self.a(x))

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        first = plain_step(model, batch)
        model.eval()
        second = plain_step(model, batch)
        model.train()
        return first + second

    job = stack(rng, Switching, step=step)
    job.model.train()
    return job


@family(
    "forward_inspected", "the caller passes what the signature or an attribute of a unit's forward says that it takes"
)
def forward_inspected(rng: random.Random) -> Job:
    """As libraries do that serve modules of several versions."""

    class Scaling(Layers):
        def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
            """By scale and shift."""
            out = self.body(x) * scale
            return out if shift is None else out + torch.sin(shift)

        forward.is_scaled_again = True  # type: ignore[attr-defined]

    class Calling(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                taken = inspect.signature(block.forward).parameters
                known: dict[str, Any] = {"scale": 0.5, "shift": x, "mask": None}
                x = block(x, **{name: value for name, value in known.items() if name in taken})
                x = x * 2 if hasattr(block.forward, "is_scaled_again") else x
                x = x * 3 if "scale" in inspect.getfullargspec(type(block).forward).args else x
            return x * len(self.blocks[0].forward.__doc__ or "")

    job = stack(rng, Scaling)
    job.model.__class__ = Calling
    return job


@family("called_directly", "forward is called as a method, by its class and through super")
def called_directly(rng: random.Random) -> Job:
    """Without the module's call and its hooks."""

    class Child(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.sin(x))

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList((Child(width), Layers(width)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0].forward(x)
            x = Layers.forward(self.blocks[1], x)
            return x + type(self.blocks[0]).forward(self.blocks[0], x)

    return Job(Net(8), ("blocks.0", "blocks.1"), rows_of(8))


@family("cloned_inside", "a unit that makes copies of itself or new modules of its class, and runs them")
def cloned_inside(rng: random.Random) -> Job:
    """Copies with the same weights, deep and shallow."""
    kind = rng.randrange(3)

    class Cloning(Layers):
        width = 0

        def forward(self, x: Tensor) -> Tensor:
            if kind == 0:
                other = copy.copy(self)
            elif kind == 1:
                other = copy.deepcopy(self)
            else:
                other = type(self)(self.a.in_features)
                other.load_state_dict(self.state_dict())
            return self.body(x) + other.body(x)

    return stack(rng, Cloning)


@family("pickled", "the model under its plan is saved whole and loaded between steps")
def pickled(rng: random.Random) -> Job:
    """Through torch.save of the module itself."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return [*plain_step(loaded, batch), *plain_step(model, batch)]

    return stack(rng, Layers, step=step)


class Tree:
    """A node that knows its parent and its children, and a tensor."""

    def __init__(self, value: Any, parent: Any = None) -> None:
        self.value, self.parent, self.children = value, parent, []
        if parent is not None:
            parent.children.append(self)


@family("trees_returned", "a unit takes and returns objects that refer to each other in circles")
def trees_returned(rng: random.Random) -> Job:
    """A tree of 40 nodes, each of which knows all others."""

    class Growing(Layers):
        def forward(self, tree: Tree) -> Tree:
            return Tree(self.body(tree.value), tree)

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Growing(width) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            tree = Tree(x)
            for _ in range(40):
                Tree(x, tree)
            for block in self.blocks:
                tree = block(tree)
            return tree.value + tree.parent.value

    return Job(Net(8), ("blocks.0", "blocks.1", "blocks.2"), rows_of(8))


@family("closures_returned", "a unit returns a function or a generator that computes later")
def closures_returned(rng: random.Random) -> Job:
    """The work is done when the unit has ended."""
    lazy = rng.random() < 0.5

    class Late(Layers):
        def forward(self, x: Tensor) -> Any:
            h = torch.sin(self.a(x))

            def rest() -> Iterator[Tensor]:
                yield x + self.b(torch.sin(h))

            return rest() if lazy else rest

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList(Late(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                made = block(x)
                x = next(made if lazy else made())
            return x

    return Job(Net(8), ("blocks.0", "blocks.1"), rows_of(8))


@family("generators_taken", "a unit takes a generator or an iterator of tensors, and uses it up")
def generators_taken(rng: random.Random) -> Job:
    """The caller's operators run inside the unit."""

    class Reading(Layers):
        def forward(self, parts: Iterator[Tensor]) -> Tensor:
            total = None
            for part in parts:
                part = self.body(part)
                total = part if total is None else torch.sin(total) + part
            return total

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList(Reading(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                h = self.first(x)
                x = block(torch.sin(h * i) for i in range(1, 4))
            return x

    return Job(Net(8), ("blocks.0", "blocks.1"), rows_of(8))


@family("itself_returned", "a unit returns its input, its parameter or its buffer itself")
def itself_returned(rng: random.Random) -> Job:
    """Results that the unit did not make."""
    kind = rng.randrange(3)

    class Same(Layers):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("table", torch.linspace(0.0, 1.0, width))
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            h = self.body(x)
            if kind == 0:
                return x, h
            return (self.a.bias if kind == 1 else self.table), h

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Same(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                same, h = block(x)
                x = torch.sin(same) * h
            return x

    return Job(Net(8), ("blocks.0", "blocks.1"), rows_of(8))

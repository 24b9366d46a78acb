"""Which modules could be checkpointed: names, of modules that are never called by anything else than their own hooks."""

from __future__ import annotations

import torch
from torch import nn

from autosac.capture.record.regions import candidate_modules


class Block(nn.Module):
    """A linear layer, called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class Chain(nn.Sequential):
    """A sequence with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CalledList(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    """One of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.frozen = Block(), Block().requires_grad_(requires_grad=False)
        self.half = nn.Sequential(Block().requires_grad_(requires_grad=False), nn.Linear(2, 2))
        self.leaf, self.without = nn.Linear(2, 2), nn.Sequential(nn.ReLU())
        self.listed, self.named = nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})
        self.chain, self.called = Chain(nn.Linear(2, 2)), CalledList([nn.Linear(2, 2)])


def test_candidates() -> None:
    """Not the root, leaves, containers, and modules without a parameter that learns."""
    assert candidate_modules(Model()) == ["block", "half", "listed.0", "named.a", "chain"]
    assert candidate_modules(nn.ModuleList([Model()]))[:2] == ["0", "0.block"]


class Mixin:
    """A base without a dictionary, as `abc.ABC` is."""

    __slots__ = ()


class Abstract(Mixin, nn.Module):
    """Python cannot change the class of its objects: another base comes before nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def test_modules_whose_class_cannot_be_changed() -> None:
    """They are left out, as what they are, and what is inside of them is not."""
    module = Abstract()
    assert candidate_modules(nn.Sequential(module, Block())) == ["0.inner", "1"]
    assert type(module) is Abstract

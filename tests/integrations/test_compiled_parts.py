"""Compiled modules inside a unit that runs eagerly. Real tensors on the CPU, without a code generator."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from autosac.integrations.apply import PlanMismatchWarning, apply


class Part(nn.Module):
    """Saves results of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(4, 8), nn.Linear(8, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.up(x).sin()
        return self.down(self.inner(h.exp() * h))


class Block(nn.Module):
    """Eager operators around the part."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(4, 4), Part(inner or nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + self.part(self.before(x).sigmoid()).sin()


class Backend:
    """Compiles nothing, and remembers the memory that forward graphs make: their outputs are results and saved tensors."""

    def __init__(self) -> None:
        self.runs = 0
        self.made: list[StorageWeakRef] = []

    def forward(self, graph: Any, _: Any) -> Any:
        """A compiled forward."""

        def run(*args: Any) -> Any:
            given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            self.runs += 1
            out = graph(*args)
            storages = [t.untyped_storage() for t in out if isinstance(t, torch.Tensor)]
            self.made += [StorageWeakRef(storage) for storage in storages if storage._cdata not in given]
            return out

        return make_boxed_func(run)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile."""
        backward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        return aot_autograd(fw_compiler=self.forward, bw_compiler=backward)(graph, inputs)

    def alive(self) -> int:
        """How much of that memory lives."""
        return sum(not reference.expired() for reference in self.made)


def compiled(model: nn.Module, how: str, backend: Any) -> nn.Module:
    """The model with its part compiled."""
    if how == "replaced":
        model[0].part = torch.compile(model[0].part, backend=backend, fullgraph=True)
    else:
        model[0].part.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("keep", [set(), {"aten.sigmoid.default"}])
def test_a_compiled_part_is_recomputed(lab: Any, keep: set[str], how: str) -> None:
    """`torch.compile(part)` and `part.compile()` after the plan: two steps bitwise those without a plan. All that
    the part makes is alive after a forward without a plan, none of it after one with the plan: the part runs a
    second time in the backward.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": keep})

    def steps(m: nn.Module, backend: Backend) -> tuple[list[torch.Tensor], list[int]]:
        found, alive = [], []
        for _ in range(2):
            m.zero_grad()
            backend.made.clear()
            out = m(x)
            alive += [len(backend.made), backend.alive()]
            out.square().sum().backward()
            found += [out.detach(), *(p.grad.clone() for p in m.parameters())]
        return found, alive

    backends = Backend(), Backend()
    torch._dynamo.reset()
    plain = compiled(copy.deepcopy(model), how, backends[0])
    wanted, alive = steps(plain, backends[0])
    planned = compiled(apply(copy.deepcopy(model), plan), how, backends[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanMismatchWarning)  # the plan was made of the model before it was compiled
        found, alive_planned = steps(planned, backends[1])
    assert lab.same(tuple(found), tuple(wanted))
    assert alive[0] >= 3 and alive == [alive[0]] * 4
    assert alive_planned == [alive[0], 0] * 2
    assert (backends[0].runs, backends[1].runs) == (2, 4)


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_compiled_part_with_dropout_under_autocast(lab: Any, how: str) -> None:
    """The part's random numbers and autocast state are those of its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Dropout(0.5)), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plan = lab.plan_for(model, {"0": ()})

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        out.float().square().sum().backward()
        return (out.detach(), torch.rand(1), *(p.grad for p in m.parameters()))

    torch._dynamo.reset()
    planned = compiled(apply(copy.deepcopy(model), plan), how, "aot_eager")
    assert lab.same(run(planned), run(compiled(copy.deepcopy(model), how, "aot_eager")))

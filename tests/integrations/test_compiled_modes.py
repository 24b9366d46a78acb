"""Units that are compiled: what the compiler saves and recomputes for a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from uncompiled import inductor

from autosac.errors import PlanError
from autosac.integrations.recompute.compiled_modes import context_fn
from autosac.integrations.recompute.policy import UnitDecisions
from autosac.plans import Unit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Average(nn.Module):
    """Reads a moving average, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        h = torch.sin(self.a(x) + self.average)
        self.average.mul_(0.5)
        return self.b(torch.sin(h))


class Checkpointed(nn.Module):
    """Its body under the modes for a unit that keeps nothing."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        unit = Unit(fqn="body", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=())
        self.modes = context_fn(UnitDecisions(unit), offloads=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False, context_fn=self.modes)


def _gradients(body: nn.Module, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    model(torch.randn(4, 8)).sum().backward()
    return [parameter.grad for parameter in body.parameters()] + list(body.buffers())


@pytest.mark.filterwarnings("ignore::autosac.integrations.recompute.policy.PlanMismatchWarning")
def test_a_buffer_that_is_read_and_then_changed() -> None:
    """The sum with the buffer is saved, though the plan keeps nothing: the backward would add the new contents."""
    body = Average()
    again = copy.deepcopy(body)
    found = _gradients(body, torch.compile(Checkpointed(body), backend="aot_eager"))
    for a, b in zip(found, _gradients(again, again), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Copying(Average):
    """Computes from a copy of what it changes."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        h = torch.sin(self.a(x)) * self.average.clone().exp()
        self.average.mul_(0.5)
        return self.b(torch.sin(h))


@pytest.mark.filterwarnings("ignore::autosac.integrations.recompute.policy.PlanMismatchWarning")
def test_a_copy_of_a_buffer_that_is_changed() -> None:
    """Inductor removes the copy, and the exponential is one of the buffer. It is saved."""
    body = Copying()
    again = copy.deepcopy(body)
    found = _gradients(body, torch.compile(Checkpointed(body), backend=inductor()))
    torch.testing.assert_close(found, _gradients(again, again), rtol=1e-5, atol=1e-5)


def test_a_backend_that_runs_checkpointing_as_it_is() -> None:
    """Such a backend would change the buffer twice: refused by name."""
    model = torch.compile(Checkpointed(Average()), backend="eager")
    with pytest.raises(PlanError, match="body is compiled by a backend that runs PyTorch's checkpointing"):
        model(torch.randn(4, 8))


class Branching(nn.Module):
    """A branch that draws random numbers, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        h: Tensor = torch.cond(x.sum() > 100, torch.sin, lambda z: nn.functional.dropout(z.cos(), 0.5), (self.a(x),))
        with torch.no_grad():
            _, scale = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z.cos()), (torch.tensor(0), h.sin()))
        return self.b(h * scale)


@pytest.mark.filterwarnings("ignore::autosac.integrations.recompute.policy.PlanMismatchWarning")
def test_branches_and_loops() -> None:
    """They are saved: what they draw would be drawn anew. PyTorch's checkpointing by itself refuses them."""
    body = Branching()
    again = copy.deepcopy(body)
    found = _gradients(body, torch.compile(Checkpointed(body), backend="aot_eager"))
    wanted = _gradients(again, torch.compile(again, backend="aot_eager"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@torch.compiler.nested_compile_region
def _dropped(x: Tensor) -> Tensor:
    """Compiled once, for all its calls."""
    return nn.functional.dropout(torch.sin(torch.exp(x)), 0.5)


class Regions(nn.Module):
    """Two calls of a region that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return torch.sin(_dropped(torch.sin(_dropped(self.a(x)))))


def test_a_region_that_draws_is_run_once() -> None:
    """Its results are saved, though the plan keeps nothing: the backward would draw other numbers."""
    body = Regions()
    again = copy.deepcopy(body)
    found = _gradients(body, torch.compile(Checkpointed(body), backend="aot_eager"))
    for a, b in zip(found, _gradients(again, again), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Scanning(nn.Module):
    """A loop over the rows, with a carry, a parameter from outside and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""

        def one(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(carry * 0.5 + nn.functional.dropout(row, 0.5))
            return carry, (carry @ self.b.weight).sin()

        h = self.a(x)
        return self.b(scan(one, torch.zeros_like(h[0]), h)[1].sin())


@pytest.mark.filterwarnings("ignore::autosac.integrations.recompute.policy.PlanMismatchWarning")
def test_loops_over_rows() -> None:
    """PyTorch partitions the loop's body, which had the tags of the loop: it ended with "node source not in graph"."""
    body = Scanning()
    again = copy.deepcopy(body)
    found = _gradients(body, torch.compile(Checkpointed(body), backend="aot_eager"))
    wanted = _gradients(again, torch.compile(again, backend="aot_eager"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)

"""Budgets in bytes for plain `torch.compile`, by real Inductor on the CPU up to the code that it generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from uncompiled import inductor

import autosac
from autosac.errors import UsageError
from autosac.integrations import compile_budget
from autosac.integrations.compile_budget import BudgetPartitioner, Way
from autosac.plans import Plan
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH, TOKENS, LAYERS = 16, 64, 2
ROW = TOKENS * WIDTH * 4


class Model(nn.Module):
    """Products under nonlinear functions, some of which a compiler recomputes for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2 * LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = x + torch.sin((x @ first).exp().tanh() @ second)
        return x


def saved_bytes(options: dict[str, Any] | None) -> tuple[int, list[Tensor]]:
    """The bytes that the graph saves beside parameters and input; the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    torch.compile(model, options=options)  # knows all of the options
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in there:
            found[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = torch.compile(model, backend=inductor(options))(x)
    out.sum().backward()
    return sum(found.values()), [weight.grad for weight in model.weights]


def test_what_is_saved_rises_with_the_budget_and_keeps_to_it() -> None:
    """At every budget at most so many bytes are saved, never fewer than at a smaller one; the gradients are the same."""
    default, wanted = saved_bytes(None)
    before = 0
    for rows in (2, 6):
        saved, gradients = saved_bytes(autosac.compile_options(f"{rows * ROW}B"))
        assert before <= saved <= rows * ROW
        before = saved
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert 0 < before <= default


class Attention(nn.Module):
    """A norm with several results, and three views of one product's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        q, k, v = self.qkv(self.norm(torch.sin(x.exp()))).chunk(3, -1)
        return torch.sin(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_one_memory_hold_all_of_it(dynamic: bool) -> None:
    """With every budget, storages of no more bytes are saved. Sizes that vary stay so."""
    largest = 0
    for rows in (1, 4, 6, 64):
        torch._dynamo.reset()
        model, options = Attention(), autosac.compile_options(f"{rows * ROW}B")
        compiled = torch.compile(model, backend=inductor(options), dynamic=dynamic)
        x = torch.randn(TOKENS, WIDTH)
        there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
        found: dict[int, int] = {}

        def pack(tensor: Tensor, there: set[int] = there, found: dict[int, int] = found) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in there:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(x)
        assert sum(found.values()) - out.nbytes <= rows * ROW
        largest = max(largest, sum(found.values()))
        if dynamic:
            with torch.compiler.set_stance("fail_on_recompile"):
                compiled(torch.randn(TOKENS + 8, WIDTH))
    assert largest > 6 * ROW


def test_a_budget_for_all_takes_one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what the compiler saves by itself fits, no other way is tried; if not, all are."""
    partition, ratios = compile_budget.min_cut_rematerialization_partition, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        ratios.append(functorch_config.activation_memory_budget)
        return partition(*args, **kwargs)

    monkeypatch.setattr(compile_budget, "min_cut_rematerialization_partition", counted)
    assert saved_bytes(autosac.compile_options("1GiB"))[0] == saved_bytes(None)[0]
    assert ratios == [1.0]
    saved_bytes(autosac.compile_options(f"{ROW}B"))
    assert len(ratios) == 1 + len(compile_budget.RATIOS)


def test_a_budget_that_cannot_be_kept() -> None:
    """The least is saved, and a warning says how much that is and what was asked for."""
    ways = [Way(2**21, 2.0, (None, None)), Way(2**22, 1.0, (None, None))]  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"saves 2\.0 MiB at the least, more than the budget of 1\.0 MiB"):
        assert BudgetPartitioner(2**20).chosen(ways) is ways[0]
    assert BudgetPartitioner(2**22).chosen(ways) is ways[1]


def test_an_amount_without_a_unit() -> None:
    """A budget is in bytes: no share of a GPU, and no bare number."""
    for text in ("0.4", "40%", "much"):
        with pytest.raises(UsageError, match=f"amount '{text}': expected bytes such as 8GiB"):
            autosac.compile_options(text)


def test_a_plan_in_place_of_a_budget() -> None:
    """One line says what makes a compiled model follow a plan."""
    with pytest.raises(UsageError, match=r"for a plan call autosac\.apply\(model, plan\) before torch\.compile"):
        autosac.compile_options(Plan(made_for=MADE_FOR, units=()))  # type: ignore[arg-type]

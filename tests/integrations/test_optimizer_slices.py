"""Optimizers that work in slices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autosac
from autosac.integrations import optimizer_slices
from autosac.integrations.apply import switch
from autosac.integrations.optimizer_slices import in_force, sliced_optimizers
from autosac.plans import Plan, Settings
from plans import MADE_FOR

adam = torch.optim.Adam
sgd = torch.optim.SGD
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "adam, amsgrad": partial(adam, amsgrad=True, weight_decay=0.1),
    "adam, decoupled": partial(adam, maximize=True, decoupled_weight_decay=True),
    "adamw": torch.optim.AdamW,
    "nadam": partial(torch.optim.NAdam, weight_decay=0.1),
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "sgd": partial(sgd, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "asgd": torch.optim.ASGD,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with sliced_optimizers(0):
        yield


def model() -> nn.Sequential:
    """Four layers in two types; one has no gradient."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4).double())
    made[1].requires_grad_(False)
    return made


def trained(make: Callable[..., torch.optim.Optimizer], slice_bytes: int) -> tuple[nn.Module, list[int]]:
    """The model after four steps, and how many bytes each call of a function for lists returned."""
    found = model()
    optimizer = make(found.parameters(), foreach=True)
    lists = _Lists()
    with sliced_optimizers(slice_bytes), lists:
        for step in range(4):
            optimizer.zero_grad()
            rows = torch.arange(8.0).view(2, 4) + step
            found[3](found[2](found[1](found[0](rows))).double()).pow(2).mean().backward()
            optimizer.step()
    return found, lists.nbytes


class _Lists(TorchDispatchMode):
    """Notes what functions for lists return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("aten._foreach") and result is not None:
            self.nbytes.append(sum(tensor.nbytes for tensor in result))
        return result


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_number_changes(name: str) -> None:
    """Four steps in slices of 200 bytes leave bit for bit the parameters of four whole ones, with smaller temporaries: at most
    the largest parameter's, 8 x 8 in single precision or 4 x 8 in double.
    """
    whole, large = trained(OPTIMIZERS[name], 0)
    sliced, small = trained(OPTIMIZERS[name], 200)
    for one, other in zip(whole.parameters(), sliced.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(small) >= len(large)
    if large:
        # 160 (4 x 8 and its bias, 128 + 32) and 288 (8 x 8 and its bias) in single precision, 256 + 32 in double.
        assert max(large) == 160 + 288 and max(small) == 256


def test_a_slice_ends_before_it_would_exceed() -> None:
    """Of sizes 3, 3, 4, 9, 1, 1 and slices of 7: 3 and 3, 4, 9 alone, 1 and 1; of no parameters one slice of none."""
    with sliced_optimizers(7):
        assert list(optimizer_slices._bounds([3, 3, 4, 9, 1, 1])) == [(0, 2), (2, 3), (3, 4), (4, 6)]
        assert list(optimizer_slices._bounds([])) == [(0, 0)]


def test_lists_of_which_one_tensor_is_laid_out_otherwise_stay_whole() -> None:
    """PyTorch takes another route for the whole list then, with other roundings: for a transposed gradient, states of another
    type, a sparse gradient, and what is no dense block; not for numbers of steps, missing states, and empty tensors.
    """
    ones, wide = [torch.ones(2, 3), torch.ones(3, 2)], [torch.ones(2, 3), torch.ones(2, 3).t()]
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    uniform = optimizer_slices._is_uniform
    assert uniform([ones, ones, steps]) and uniform([wide, wide]) and uniform([ones, [], [None, None]])
    assert uniform([[torch.ones(0), torch.ones(1, 1)]])
    assert not uniform([ones, wide])
    assert not uniform([ones, [ones[0].double(), ones[1]]])
    assert not uniform([ones, [ones[0].to_sparse(), ones[1]]])
    assert not uniform([[torch.ones(4, 4)[:, :2]]]) and not uniform([[torch.ones(1, 4).expand(3, 4)]])


def test_sparse_gradients() -> None:
    """Adagrad computes a list in which one gradient is sparse in another way than others."""

    def after(slice_bytes: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table, layer = nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16)
        both = nn.ModuleList([table, layer]).to(torch.bfloat16)
        optimizer = torch.optim.Adagrad(both.parameters(), foreach=True)
        with sliced_optimizers(slice_bytes):
            for step in range(6):
                optimizer.zero_grad()
                layer(table(torch.tensor([1, 2, step]))).pow(2).sum().backward()
                optimizer.step()
        return list(both.parameters())

    assert all(torch.equal(a, b) for a, b in zip(after(0), after(64), strict=True))


def test_a_sharded_parameter_counts_by_its_shard() -> None:
    """Of a DTensor what is on this rank."""
    local = torch.zeros(3, dtype=torch.bfloat16)
    sharded: Any = SimpleNamespace(_local_tensor=local, numel=lambda: 12, element_size=lambda: 2)
    assert optimizer_slices._local_bytes(sharded) == 6 == optimizer_slices._local_bytes(local)


def test_others_are_left_alone() -> None:
    """Adafactor reads the devices and types themselves, and would leave out parameters; a fused step has no temporaries; an
    optimizer of one's own gets what PyTorch returns.
    """
    adafactor, _ = trained(torch.optim.Adafactor, 1)
    whole, _ = trained(torch.optim.Adafactor, 0)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), adafactor.parameters(), strict=True))
    tensors = [[torch.zeros(2), torch.ones(2)]]
    method = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    with sliced_optimizers(1):
        assert len(method(tensors)) == 1
    fused = model()
    with sliced_optimizers(1):
        optimizer = torch.optim.AdamW(fused.parameters(), fused=True)
        fused[0](torch.ones(1, 4)).sum().backward()
        calls = _Calls()
        with calls:
            optimizer.step()
    assert calls.names.count("aten._fused_adamw_.default") == 1


class _Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_compiled_step_is_as_it_was() -> None:
    """The compiler gets the whole lists."""
    one, other = model(), model()
    for each, slice_bytes in ((one, 0), (other, 64)):
        optimizer = torch.optim.AdamW(each.parameters(), foreach=True)
        each[0](torch.ones(2, 4)).sum().backward()
        with sliced_optimizers(slice_bytes):
            torch.compile(optimizer.step, backend="eager")()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_plan_says_so(tmp_path: Path) -> None:
    """`apply` sets what the plan's file says, for a model without a unit, too; a plan that says nothing changes nothing; hooks
    and schedulers of the optimizer run once a step.
    """
    plan = Plan(made_for=replace(MADE_FOR, parameters=()), units=(), settings=Settings(optimizer_slice_bytes=64))
    plan.save(tmp_path / "plan.json")
    found = model()
    autosac.apply(found, autosac.Plan.load(tmp_path / "plan.json"))
    assert in_force() == 64
    autosac.apply(found, replace(plan, settings=Settings()))
    assert in_force() == 64
    assert b"optimizer_slice_bytes" not in replace(plan, settings=Settings()).to_bytes(), "as earlier versions wrote it"
    optimizer = torch.optim.AdamW(found.parameters(), foreach=True)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert calls == [1]
    copied = copy.deepcopy(optimizer)
    copied.step()


def test_a_model_that_changes_its_plan() -> None:
    """`switch` sets what the new plan says, also that there are no slices."""
    plan = Plan(made_for=replace(MADE_FOR, parameters=()), units=(), settings=Settings(optimizer_slice_bytes=64))
    found = switch(autosac.apply(model(), plan), replace(plan, settings=Settings()))
    assert in_force() == 0
    switch(found, plan)
    assert in_force() == 64

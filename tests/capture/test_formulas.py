"""Gradients that PyTorch writes into zeros in place, against a real backward on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from autosac.trace import Phase

ROWS, WIDTH, TAKEN = 64, 32, 128
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, WIDTH)),
    "index_select": lambda x, i: x.index_select(0, i),
    "topk": lambda x, i: x.topk(2)[0],
    "sort": lambda x, i: x.sort()[0],
    "max": lambda x, i: x.max(1)[0],
    "median": lambda x, i: x.median(1)[0],
    "take": lambda x, i: x.take(i),
    "cummax": lambda x, i: x.cummax(0)[0],
}
WRITTEN = ("index_put", "scatter", "scatter_add", "index_add", "put")


def _make_step(function: Function) -> Any:
    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Linear(WIDTH, ROWS, bias=False, device=device)
        index = torch.zeros(TAKEN, dtype=torch.int64, device=device)

        def step() -> None:
            function(model.weight * 2, index).square().sum().backward()
            model.zero_grad()

        return model, step

    return make_step


def _real(function: Function) -> set[str]:
    """What a real backward calls: "index_put" of the form that copies, "index_put_" of the one in place."""
    _, step = _make_step(function)(torch.device("cpu"))
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    names = {event.name.removeprefix("aten::") for event in profiled.events()}
    names = {"index_put_" if name == "_index_put_impl_" else name for name in names}
    return {name for name in names if name.removesuffix("_") in WRITTEN}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_operator_is_the_one_that_a_real_backward_calls(name: str, capture: Any) -> None:
    """In place, without a copy of the zeros, as in a real backward that nothing traces."""
    reading = capture(_make_step(FUNCTIONS[name]), target="cpu")
    simulated = {reading.signature(op).name.split(".")[1] for op in reading.operators(phase=Phase.BACKWARD)}
    found = {name for name in simulated if name.removesuffix("_") in WRITTEN}
    real = _real(FUNCTIONS[name])
    assert found and found <= real
    assert all(name.endswith("_") for name in found)

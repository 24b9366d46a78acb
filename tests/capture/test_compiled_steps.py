"""Plans of plain PyTorch steps that compile their layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autosac.api import EagerCaptures
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.errors import UsageError
from autosac.planning.closed_loop import Goal, full_plan, make_plan
from autosac.planning.traced import follows
from autosac.simulation import Target

WIDTH, TOKENS, LAYERS = 256, 4096, 2


class Layer(nn.Module):
    """Two products with something to fuse between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + self.down(torch.tanh(self.up(x)))


def make(style: str, device: torch.device) -> tuple[nn.Module, Any]:
    """A step of layers that are compiled one by one, or ("early") before they are in a model."""
    layers = [Layer().to(device) for _ in range(LAYERS)]
    if style == "early":
        layers[0].compile()
    model = nn.Sequential(*layers)
    if style == "layers":
        for layer in layers:
            layer.compile()
    x = torch.randn(TOKENS, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return model, step


def test_the_observed_step_is_not_compiled() -> None:
    """Its regions show all operators of the layers, which compiled code would hide; the step itself has generated kernels."""
    observed = capture_eager(partial(make, "layers"), EagerRequest(observe=True))
    names = [call.op for call in next(r for r in observed.regions if observed.modules[r.module] == "1").calls]
    assert [n for n in names if n.startswith("aten.") and "t.default" not in n] == [
        "aten.mm.default",
        "aten.tanh.default",
        "aten.mm.default",
        "aten.add.Tensor",
    ]
    plain = capture_eager(partial(make, "layers"), EagerRequest())
    assert observed.info.compiled and plain.info.compiled
    assert not any(signature.name.startswith("triton.") for signature in observed.signatures)
    assert any(signature.name.startswith("triton.") for signature in plain.signatures)


def test_compiled_layers_on_the_cpu() -> None:
    """Their graphs are interpreted with fused kernels: the CPU has no generated ones here, and the note says so."""
    trace = capture_eager(partial(make, "layers"), EagerRequest(target="cpu"))
    names = {signature.name for signature in trace.signatures}
    assert "aten.mm.default" in names and "aten.tanh.default" not in names
    assert [note.rpartition(": ")[2] for note in trace.info.notes] == ["its code for CPUs is not generated"]


def test_a_module_that_is_compiled_before_it_is_in_the_model() -> None:
    """It could not be found in the plan's model: one line says what to do."""
    with pytest.raises(UsageError, match="build the whole model first"):
        capture_eager(partial(make, "early"), EagerRequest(observe=True))


@pytest.mark.compiled_plan
@pytest.mark.slow
def test_plans_are_made_for_the_compiled_step() -> None:
    """The plan is a mix of policies that were measured as compiled. It fits, and is no slower than full checkpointing."""
    with EagerCaptures(partial(make, "layers"), Target.of("h100-sxm-80gb", 1)) as captures:
        none, full = (captures.baselines()[name] for name in ("none", "full"))
        budget = (none.peak_reserved_bytes + full.peak_reserved_bytes) // 2
        planned = make_plan(captures, Goal(budget_bytes=budget))
        assert planned.plan.units and planned.simulation.trace.info.compiled
        assert planned.simulation.peak_reserved_bytes <= budget < none.peak_reserved_bytes
        assert none.step_ms <= planned.simulation.step_ms <= full.step_ms
        assert any("policies were measured" in note for note in planned.notes)


class Routed(nn.Module):
    """``one_hot`` checks its argument where it is traced only; weights that are in use twice are cast twice there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        chosen = nn.functional.one_hot(self.gate(x).argmax(-1), 8)
        return x + self.mix(self.mix(x).tanh()) * chosen.sum(-1, keepdim=True)


def make_routed(style: str, device: torch.device) -> tuple[nn.Module, Any]:
    """A step of such layers under autocast, compiled one by one ("layers") or as a whole."""
    model = nn.Sequential(*(Routed() for _ in range(LAYERS))).to(device)
    if style == "layers":
        for layer in model:
            layer.compile()
    forward = torch.compile(model) if style == "whole" else model
    x = torch.randn(TOKENS, WIDTH, device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = forward(x)
        out.float().square().mean().backward()
        model.zero_grad()

    return model, step


@pytest.mark.compiled_plan
@pytest.mark.slow
@pytest.mark.parametrize("style", ["layers", "whole"])
def test_plans_decide_about_what_the_compiler_traces(style: str) -> None:
    """The observed step has other operators than the compiled one. The plan knows the latter's, one by one, and is followed
    (a capture stops where it is not); it fits, and is faster than full checkpointing.
    """
    with EagerCaptures(partial(make_routed, style), Target.of("h100-sxm-80gb", 1)) as captures:
        none, full = (captures.baselines()[name] for name in ("none", "full"))
        traced = captures.traced()["0"]
        assert not any(follows(unit.decisions, traced) for unit in full_plan(captures.observed()).units)
        budget = (none.peak_active_bytes + full.peak_active_bytes) // 2
        planned = make_plan(captures, Goal(budget_bytes=budget, budget_kind="active"))
        decided = [unit for unit in planned.plan.units if unit.decisions]
        assert all(follows(unit.decisions, captures.traced().get(unit.fqn, traced)) for unit in decided)
        assert not any("were tried" in note or "were not tried" in note for note in planned.notes)
        assert planned.simulation.peak_active_bytes <= budget
        assert none.step_ms <= planned.simulation.step_ms <= full.step_ms

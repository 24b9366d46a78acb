"""The first steps of real training on the CPU: what is measured, that nothing changes, and a change of the plan in between."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosac
from autosac.errors import PlanError, UsageError
from autosac.integrations import first_steps
from autosac.integrations.apply import switch
from autosac.integrations.first_steps import FirstSteps, units_of
from autosac.runs import MeasuredSteps, RunRecord


class Block(nn.Module):
    """A layer that adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 8] -> the same."""
        return x + self.second(self.first(x).sin().exp())


class Tower(nn.Module):
    """An embedding, two layers in a list inside of a module, an output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, 10]."""
        x = self.words(tokens)
        for layer in self.body.layers:
            x = layer(x)
        return self.out(x)


def tower() -> Tower:
    """With the same parameters every time."""
    torch.manual_seed(3)
    return Tower()


TOKENS = torch.arange(6) % 5


def train(model: nn.Module, steps: int, between: Any = lambda step: None, parts: int = 1) -> list[torch.Tensor]:
    """The parameters after so many steps, each of so many microbatches; `between` is called before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        between(step)
        for tokens in TOKENS.chunk(parts):
            F.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_units_are_the_outermost_modules_without_lists() -> None:
    """Embedding, the layers by their position in the list, output."""
    assert [name for name, _ in units_of(tower())] == ["words", "body.layers.0", "body.layers.1", "out"]


@pytest.mark.parametrize("parts", [1, 2])
def test_steps_and_modules_are_measured_and_nothing_changes(parts: int) -> None:
    """Three steps after two, every module forward and backward but for the embedding's; hooks are gone; same parameters."""
    found: list[MeasuredSteps] = []
    model = tower()
    FirstSteps(found.append, warm_up=2, steps=3).add(model)
    assert same(train(model, 7, parts=parts), train(tower(), 7, parts=parts))
    (steps,) = found
    assert (steps.device, steps.warm_up, len(steps.steps_ms), steps.memory) == ("cpu", 2, 3, None)
    assert [unit.fqn for unit in steps.units] == ["words", "body.layers.0", "body.layers.1", "out"]
    assert [unit.backward_ms is None for unit in steps.units] == [True, False, False, False]
    assert all(unit.forward_ms > 0 for unit in steps.units) and not steps.in_backward
    assert sum(unit.forward_ms + (unit.backward_ms or 0) for unit in steps.units) < max(steps.steps_ms)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_times_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by half a second whenever it is read: each forward and backward takes 500 ms."""
    readings = itertools.count()
    monkeypatch.setattr(first_steps.time, "perf_counter", lambda: next(readings) / 2)
    found: list[MeasuredSteps] = []
    model = nn.Sequential(nn.Linear(4, 4))
    FirstSteps(found.append, warm_up=1, steps=1).add(model)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        optimizer.step()
    (unit,) = found[0].units
    assert (unit.forward_ms, unit.backward_ms, found[0].steps_ms) == (500.0, 500.0, (2500.0,))


def test_other_optimizers_do_not_count() -> None:
    """Steps of another model's optimizer are none of this one's; of two optimizers of a model the first one counts."""
    found: list[MeasuredSteps] = []
    model, other = tower(), nn.Linear(2, 2)
    FirstSteps(found.append, warm_up=1, steps=2).add(model)
    groups = [list(model.words.parameters()), list(model.out.parameters())]
    optimizers = [torch.optim.SGD(other.parameters()), *(torch.optim.SGD(group) for group in groups)]
    for step in range(3):
        assert len(found) == 0, step
        F.cross_entropy(model(TOKENS), TOKENS).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(found[0].steps_ms) == 2


def test_a_compiled_model_is_timed_as_a_whole() -> None:
    """Its modules get no hooks."""
    found: list[MeasuredSteps] = []
    model = tower()
    model.body.layers[0].compile(backend="eager")
    FirstSteps(found.append, warm_up=1, steps=1).add(model)
    train(model, 3)
    assert found[0].units == () and len(found[0].steps_ms) == 1


def test_an_eager_model_writes_its_record(lab: Any, tmp_path: Path) -> None:
    """Beside what its plan promised; numbers out of range and places that cannot be written are wrong usage."""
    model = tower()
    plan, _ = lab.plan_keeping(model, lambda m: m(TOKENS), {"body.layers.0": {"aten.addmm.default"}})
    autosac.observe(autosac.apply(model, plan), tmp_path / "run.json", plan=plan, steps=2, warm_up=1)
    train(model, 4)
    record = RunRecord.load(tmp_path / "run.json")
    assert (len(record.steps_ms), record.plan_hash, record.job) == (2, plan.hash(), "")
    assert record.budget_bytes == plan.made_for.budget_bytes and len(record.units) == 4
    with pytest.raises(UsageError, match="must be at least 1"):
        autosac.observe(model, tmp_path / "run.json", warm_up=0)
    with pytest.raises(UsageError):
        autosac.observe(model, tmp_path / "no" / "run.json")


def test_a_model_changes_its_plan_between_steps(lab: Any) -> None:
    """From one layer under a plan to the other one, to both, and to none; same parameters."""
    keep = {"aten.addmm.default"}
    names = ["body.layers.0", "body.layers.1"]

    def plan_of(*chosen: str) -> Any:
        return lab.plan_keeping(tower(), lambda m: m(TOKENS), dict.fromkeys(chosen, keep))[0]

    plans = {1: plan_of(names[0]), 2: plan_of(names[1]), 3: plan_of(*names), 5: plan_of()}
    model = tower()
    again: list[list[int]] = []

    def between(step: int) -> None:
        if step in plans:
            switch(model, plans[step])
        with lab.counting(model, names) as ran:
            F.cross_entropy(model(TOKENS), TOKENS).backward()
        model.zero_grad()
        again.append([len(ran.again.get(name, ())) for name in names])

    assert same(train(model, 7, between), train(tower(), 7))
    assert again[0] == [0, 0] == again[5] == again[6]
    assert [[bool(n) for n in row] for row in again[1:5]] == [[True, False], [False, True], [True, True], [True, True]]


def test_a_plan_that_does_not_fit_changes_nothing(lab: Any) -> None:
    """Another model's plan is refused, and the present one goes on."""
    model = tower()
    plan, _ = lab.plan_keeping(model, lambda m: m(TOKENS), {"body.layers.0": {"aten.addmm.default"}})
    autosac.apply(model, plan)
    other = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    wrong, _ = lab.plan_keeping(other, lambda m: m(torch.ones(1, 3)), {"0": {"aten.addmm.default"}})
    with pytest.raises(PlanError, match="another model"):
        switch(model, wrong)
    with lab.counting(model, ["body.layers.0"]) as ran:
        F.cross_entropy(model(TOKENS), TOKENS).backward()
    assert ran.again["body.layers.0"]

"""Scripts that apply their plan: the step that the plan promises on the simulated GPU, and the same training on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining import stage as stages

from autosac.capture.jobs.script_model import ModelFinder, check_names
from autosac.errors import UsageError
from autosac.integrations.apply import apply
from autosac.integrations.operators.modules import parameters_of
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.plans import Decision, Plan, Settings, Unit
from autosac.scripts import captures
from plans import MADE_FOR

TRAINING = """
import hashlib, torch
from torch import nn
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(nn.functional.gelu(self.norm(self.conv(x))))

model = nn.Sequential(*(Block() for _ in range(6)), nn.Flatten(), nn.Linear(16 * 32 * 32, 10)).to(device)
# apply the plan
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    images, labels = torch.randn(16, 16, 32, 32).to(device), torch.randint(10, (16,)).to(device)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    if device == "cpu":
        tensors = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
        print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest())
    optimizer.step()
    optimizer.zero_grad()
if device == "cpu":
    print("forwards of units:", sum(m._autosac.forwards for m in model.modules() if hasattr(m, "_autosac")))
"""
PARAMETRIZED = TRAINING.replace(
    "nn.Conv2d(16, 16, 3, padding=1)", "spectral_norm(nn.Conv2d(16, 16, 3, padding=1))"
).replace("class Block", "from torch.nn.utils.parametrizations import spectral_norm\n\nclass Block")
PARALLEL = TRAINING.replace("# apply the plan\n", "# apply the plan\nparallel = nn.DataParallel(model)\n").replace(
    "model(images)", "parallel(images)"
)
LEAST_MORE_MS = 0.1


def _trained(source: str) -> list[str]:
    """What a script prints that trains on the CPU."""
    Path("real.py").write_text(source)
    return subprocess.run(
        [sys.executable, "real.py"], capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()


@pytest.mark.parametrize("training", [TRAINING, PARAMETRIZED, PARALLEL], ids=["plain", "parametrized", "parallel"])
def test_a_script_that_applies_its_plan(run: Any, training: str) -> None:
    """It is the step that the plan promises, what its units cost the host included; and really trained on the CPU its losses,
    gradients and buffers are the same to the bit. Parametrizations are tried while modules are made; a plan is applied
    before DataParallel.
    """
    applied = training.replace("# apply the plan", 'import autosac; model = autosac.apply(model, "plan.json")')
    ended = run(training, "--plan", "82MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    plan = Plan.load("plan.json")
    promised, plain = plan.predictions["autosac"], plan.predictions["none"]
    assert promised.step_ms > plain.step_ms + promised.recompute_ms + LEAST_MORE_MS  # the host decides
    ended = run(applied, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["step"]["step_ms"] == promised.step_ms
    assert found["step"]["recompute_ms"] == pytest.approx(promised.recompute_ms, rel=1e-9) and promised.recompute_ms > 0
    assert found["peak_active_bytes"] == promised.peak_active_bytes
    assert found["peak_reserved_bytes"] == promised.peak_reserved_bytes
    *before, none = _trained(training)
    *after, forwards = _trained(applied)
    assert len(before) == 3 and after == before
    assert none == "forwards of units: 0" and forwards == f"forwards of units: {3 * len(plan.units)}"


def test_what_is_called_while_modules_are_made_is_not_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parametrization is tried when it is registered: the model is the module that is called to be trained."""
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    finder = ModelFinder(lambda _: None, compiles=False)
    finder.meet_what_is_called()
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    assert finder.model is None
    model(torch.ones(1, 4))
    assert finder.model is model


@pytest.fixture
def single_rank() -> Iterator[None]:
    """The process group of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wraps", [False, True], ids=["bare", "wrapped"])
def test_all_pipeline_stages_of_a_rank_are_the_model(
    monkeypatch: pytest.MonkeyPatch, single_rank: None, *, wraps: bool
) -> None:
    """An interleaved schedule has several stages on a rank: a plan is for each of them, whichever was wrapped before."""
    monkeypatch.setattr(stages._PipelineStageBase, "__init__", stages._PipelineStageBase.__init__)
    changed: list[nn.Module] = []
    recorded: list[nn.Module] = []
    finder = ModelFinder(changed.append, compiles=False)
    finder.meet_stages(recorded.append)
    parts = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    if wraps:
        finder.meet(parts[0][0])
    for index, part in enumerate(parts):
        PipelineStage(part, index, len(parts), torch.device("cpu"))
    assert finder.parts == changed == recorded == parts
    assert finder.model is parts[0]


def test_a_stage_of_a_traced_pipeline_is_the_model(monkeypatch: pytest.MonkeyPatch, single_rank: None) -> None:
    """The front end keeps the whole traced model around its stages: a stage's names are those that it has by itself."""
    monkeypatch.setattr(stages._PipelineStageBase, "__init__", stages._PipelineStageBase.__init__)
    finder = ModelFinder(lambda _: None, compiles=False)
    finder.meet_stages(lambda _: None)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(whole, mb_args=(torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    PipelineStage(pipe.get_stage_module(1), 1, 2, torch.device("cpu"))
    assert finder.model is pipe.get_stage_module(1)
    assert [name for name, _ in finder.model.named_parameters()] == ["1.weight", "1.bias"]


def test_pipeline_stages_with_modules_that_one_plan_cannot_tell_apart() -> None:
    """Names that two stages of a rank have in common are names of parameters of the same shape, or there is no plan."""
    check_names([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))])
    with pytest.raises(UsageError, match=r"parameters 0\.weight of different shapes, \[4, 4\] and \[2, 4\]"):
        check_names([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 2))])


class _Summed(torch.autograd.Function):
    """The sum over all ranks, which is waited for where it is used, as in tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Reduced(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(super().forward(x))


def test_collectives_that_are_waited_for_after_the_unit(single_rank: None) -> None:
    """The simulation waits inside a unit, training after it, where the result is used: the plan fits all the same."""
    model = nn.Sequential(_Reduced(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    x = torch.ones(2, 4)
    outputs = {"linear": (2, 8), "gelu": (2, 8), "linear.1": (2, 4), "all_reduce": (2, 4), "wait_tensor": (2, 4)}
    names = ["aten.addmm", "aten.gelu", "aten.addmm", "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor"]
    decisions = [
        Decision(op=f"{name}.default", occurrence=names[:i].count(name), keep=False, outputs=((shape, "float32"),))
        for i, (name, shape) in enumerate(zip(names, outputs.values(), strict=True))
    ]
    unit = Unit(
        fqn="0",
        decisions=tuple(decisions),
        discard_fraction=1.0,
        kept_bytes=0,
        recompute_ms=0.0,
        parameters=parameters_of(model[0]),
    )
    plan = Plan(made_for=replace(MADE_FOR, parameters=parameters_of(model)), units=(unit,))
    (model(x) + 1).sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    applied = apply(model, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (applied(x) + 1).sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))


LARGE = """
import torch
from torch import nn
with torch.device("cuda"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(4)))
    rows = torch.randn(512, 8192)
# apply the plan
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(rows).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_whose_optimizer_works_in_slices(run: Any) -> None:
    """A gibibyte of parameters, as much of gradients and twice that of states leave no room for another one of square roots in
    4.9 GiB: the plan lets the optimizer work in slices, and the line that applies it is all that this needs.
    """
    ended = run(LARGE, "--plan", "4.9GiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    plan = Plan.load("plan.json")
    assert plan.settings.optimizer_slice_bytes == OPTIMIZER_SLICE_BYTES
    assert plan.units == () and 'model = autosac.apply(model, "plan.json")' in ended.stdout
    assert "works on 256.0 MiB of the parameters at a time" in " ".join(ended.stdout.split())
    ended = run(LARGE.replace("# apply the plan", 'import autosac; autosac.apply(model, "plan.json")'), "--json")
    found = json.loads(ended.stdout)
    assert found["peak_reserved_bytes"] == plan.predictions["autosac"].peak_reserved_bytes <= 4.9 * 2**30
    assert found["peak_active_bytes"] == plan.predictions["autosac"].peak_active_bytes
    assert found["step"]["step_ms"] == plan.predictions["autosac"].step_ms


def test_all_ranks_work_in_slices_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script has one plan: where a rank needs slices, the others are planned with them, too."""

    def rank(slice_bytes: int) -> Any:
        plan = Plan(made_for=MADE_FOR, units=(), settings=Settings(optimizer_slice_bytes=slice_bytes))
        return SimpleNamespace(plan=plan, sliced=lambda: rank(8))

    monkeypatch.setattr(captures, "make_plan", lambda planned, *_: planned)
    goal: Any = None
    for before, after in (((0, 0), (0, 0)), ((0, 8), (8, 8)), ((8, 0), (8, 8))):
        ranks = [rank(slice_bytes) for slice_bytes in before]
        found = captures._in_slices_alike(ranks, ranks, goal, print)
        assert tuple(each.plan.settings.optimizer_slice_bytes for each in found) == after

"""Scripts that train in other ways than a module's call and an optimizer of torch.optim."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autosac.trace import Op, Trace

BY_HAND = """
import io
import torch
from torch import nn

model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))).cuda()
x = torch.randn(16, 8).cuda()
for epoch in range(100):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    with open("model.pt", "wb") as file:
        torch.save({"epoch": epoch, "model": model.state_dict()}, file)
    print(f"epoch {epoch}: loss {loss:.2f}", flush=True)
    before = torch.cuda.memory_allocated()
    buffer = io.BytesIO()
    torch.save(torch.ones(2**20, device="cuda"), buffer)
    assert torch.cuda.memory_allocated() == before
    loaded = torch.load(buffer, map_location="cpu")
    assert loaded.shape == (2**20,) and loaded.device.type == "cpu" and torch.cuda.memory_allocated() == before
    if epoch == 1:
        with open("model.pt", "rb") as file:
            found = torch.load(file)
        model.load_state_dict(found["model"])
        print(f"loaded epoch {found['epoch']} of {len(found['model'])} tensors", flush=True)
"""
FUNCTIONS = """
import torch

weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD([weight, *layer.parameters()], lr=0.1)
x = torch.randn(16, 8, device="cuda")
for step in range(4):
    optimizer.zero_grad()
    layer.forward(x @ weight).sum().backward()
    optimizer.step()
"""
SEVERAL_GPUS = """
import torch

model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).cuda()
model(torch.randn(16, 8, device="cuda")).sum().backward()
"""


def test_a_script_without_optimizer_steps_when_parameters_change(run: Any) -> None:
    """Three steps run; DataParallel on one GPU is its module; what was saved can be loaded, and
    takes no memory of the device until then; a loss can be formatted.
    """
    ended = run(BY_HAND)
    assert ended.returncode == 0, ended.stderr
    assert [int(n) for n in re.findall(r"epoch (\d+): loss \d+\.\d\d\n", ended.stdout)] == [0, 1, 2]
    assert "loaded epoch 1 of 4 tensors" in ended.stdout
    assert "step 2 of the 3 that the script ran" in ended.stdout


def test_functions_in_place_of_modules(run: Any) -> None:
    """A step begins where a parameter is read: the first call of the optimizer only shows where steps end."""
    ended = run(FUNCTIONS)
    assert ended.returncode == 0, ended.stderr
    assert "step 2 of the 3 that the script ran" in ended.stdout


def test_no_plan_without_modules(run: Any, tmp_path: Path) -> None:
    """One line says so, though the step fits the budget as it is; no plan is written."""
    ended = run(FUNCTIONS, "--plan", "10GiB", "-o", "plan.json")
    assert ended.returncode == 1
    assert ended.stderr.endswith("calls no module that it trains: there is nothing that a plan could checkpoint\n")
    assert not (tmp_path / "plan.json").exists()


def test_several_gpus_in_one_process_are_refused(run: Any) -> None:
    """DataParallel over more than one says what to do."""
    ended = run(SEVERAL_GPUS, "--nproc", "2")
    assert ended.returncode == 1
    assert (
        "DataParallel over several GPUs of one process is not simulated: train with DistributedDataParallel"
        in ended.stderr
    )


PARTS = """
import torch

weights = [torch.nn.Parameter(torch.zeros(512, 512, device="cuda")) for _ in range(3)]
optimizer = torch.optim.SGD(weights, lr=0.1)
while True:
    loss = sum((weight @ weight).sum() for weight in weights)
    loss.backward()
    for weight in weights:  # as ZeRO-3 does with its groups
        torch.zeros(8, device="cuda")
        optimizer.param_groups[0]["params"] = [weight]
        optimizer.step()
    optimizer.param_groups[0]["params"] = weights
    optimizer.zero_grad()
"""


def test_an_optimizer_that_steps_for_one_part_after_the_other(run: Any, tmp_path: Path) -> None:
    """The step that is kept is a whole iteration: the products of the forward and of the backward, and three updates."""
    ended = run(PARTS, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    names = [trace.signatures[event.signature].name for event in trace.events if type(event) is Op]
    assert names.count("aten.mm.default") == 9
    assert sum(name in ("aten._foreach_add_.List", "aten.add_.Tensor") for name in names) == 3


SHARPNESS = """
import torch

layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3))).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
while True:
    x = torch.randn(64, 512, device="cuda")
    layers(x).pow(2).mean().backward()
    with torch.no_grad():  # SAM climbs, and takes the gradient there
        steps = [p.grad * 0.05 for p in layers.parameters()]
        for p, step in zip(layers.parameters(), steps):
            p.add_(step)
    optimizer.zero_grad()
    layers(x).pow(2).mean().backward()
    with torch.no_grad():
        for p, step in zip(layers.parameters(), steps):
            p.sub_(step)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parameters_that_change_between_two_backwards(run: Any, tmp_path: Path) -> None:
    """A change of parameters ends no step of a script whose optimizer only steps later: the kept step has both forwards and
    backwards, of 3 and 5 products each.
    """
    ended = run(SHARPNESS, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    names = [trace.signatures[event.signature].name for event in trace.events if type(event) is Op]
    assert names.count("aten.mm.default") == 16
    assert "steps differ" not in ended.stdout

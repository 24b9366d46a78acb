"""What people write in training loops: lazy layers, inference in between, optimizers in the backward, workers."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from autosac.plans import Plan
from autosac.trace import Op, Phase, Trace

LAZY = """
import torch
from torch import nn
model = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10)).to("cuda", torch.bfloat16)
model(torch.zeros(1, 3, 8, 8, device="cuda", dtype=torch.bfloat16))
print([(tuple(p.shape), p.dtype, p.device) for p in model.parameters()][2])
optimizer = torch.optim.AdamW(model.parameters())
scale = torch.linspace(0.1, 1, 4, device="cuda")

@torch.inference_mode()
def sample():
    x = torch.zeros(4, device="cuda")
    for _ in range(2):
        x = x * scale[1] - scale[1].sqrt()
    return x

while True:
    model(torch.zeros(2, 3, 8, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    print(tuple(sample().shape))
"""
IN_BACKWARD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)).cuda()
optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in layers.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in reversed(list(layers.parameters())):
    parameter.register_post_accumulate_grad_hook(update)
optimizers[layers[2][2].weight].step()  # it is the first one
for step in range(9):
    x = torch.randn(64, 256, device="cuda")
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    print("step", step)
"""
PARTS_CALLED = """
import autosac, torch
from torch import nn

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU())
        self.actor, self.critic = (nn.Sequential(*(hidden() for _ in range(6)), nn.Linear(256, 8)) for _ in range(2))

    def act(self, x):
        return self.actor(x).log_softmax(-1).mean() + self.critic(x).mean()

agent = Agent().cuda()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
for step in range(9):
    agent.act(torch.randn(65536, 256, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO_OPTIMIZERS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
optimizers = [torch.optim.AdamW(part.parameters(), fused=True) for part in model]
while True:
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
FROZEN_FIRST = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

encoder, model = nn.Sequential(nn.Linear(512, 512)).cuda().requires_grad_(False), Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(encoder(torch.randn(16384, 512, device="cuda"))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
write = tensorboard_trace_handler("traces", worker_name="one", use_gzip=True)

def ready(profiler):
    write(profiler)
    for row in profiler.key_averages():
        if "mm" in row.key:
            print(row.key, row.count, row.device_time_total > 0, row.cpu_time_total > 0)

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=1),
    on_trace_ready=ready,
) as profiler:
    for _ in range(9):
        model(torch.randn(512, 512, device="cuda")).sum().backward()
        optimizer.step()
        profiler.step()
"""
WORKERS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        return torch.ones(4)

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(Rows(), 8, num_workers=2, pin_memory=True, prefetch_factor=2):
    model(x.cuda(non_blocking=True)).sum().backward()
    optimizer.step()
"""

AVERAGED = """
import time, torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.Adam(model.parameters())
mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
slow = [p.detach().clone() for p in model.parameters()]
host = [p.detach().cpu() for p in model.parameters()]
for step in range(9):
    begun = time.perf_counter()
    loss = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for own in host:
        own.mul_(0.9)
    mean.update_parameters(model)
    for own, p in zip(slow, model.parameters()):
        own.mul_(0.9).add_(p.data, alpha=0.1)
    loss.item()
    print("took", 1e3 * (time.perf_counter() - begun))
"""

PLAYS = """
import numpy, torch

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    with torch.inference_mode():
        seen = torch.as_tensor(numpy.zeros(4, dtype=numpy.float32), device="cuda")
        action = model(torch.ones(4).to("cuda", torch.float32) + seen).argmax().item()
    model(seen.clone()[None]).sum().backward()
    optimizer.step()
    print(seen.device, action in (0, 1))
"""


def test_host_tensors_come_to_the_gpu_in_inference_mode(run: Any) -> None:
    """There ``to`` is not yet decomposed, and its device is among its positional arguments."""
    ended = run(PLAYS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["cuda:0 True"] * 2


def test_lazy_layers_and_inference(run: Any) -> None:
    """Parameters without a shape get one where the model is; views made in inference mode can be made again."""
    ended = run(LAZY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:4] == [
        "((10, 288), torch.bfloat16, device(type='cuda', index=0))",
        *["(4,)"] * 3,
    ]


def test_an_optimizer_in_the_backward(run: Any, tmp_path: Path) -> None:
    """What is computed again after its update begins no step: the kept one is a forward and the whole backward after it."""
    ended = run(IN_BACKWARD, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    assert "step 2 of the 3 that the script ran" in ended.stdout
    trace = Trace.load(tmp_path / "step.trace")
    operators = [event for event in trace.events if type(event) is Op]
    products = [event.phase for event in operators if trace.signatures[event.signature].name == "aten.addmm.default"]
    assert products == [Phase.FORWARD] * 6 + [Phase.RECOMPUTE] * 3


def test_two_optimizers(run: Any, tmp_path: Path) -> None:
    """The second one's first update, which makes its state, begins no step: the kept one has one update of each."""
    ended = run(TWO_OPTIMIZERS, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    names = [trace.signatures[event.signature].name for event in trace.events if type(event) is Op]
    assert names.count("aten._fused_adamw_.default") == 2


def test_averages_belong_to_the_step_before(run: Any, tmp_path: Path) -> None:
    """Neither `parameter.data` nor a number that comes from the host begins a step, nor what the host does by itself: the
    batch does. The script reads the reported step's time in each of its steps, though Adam's factors are others in each.
    """
    ended = run(AVERAGED, "--steps", "5", "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    called = [trace.signatures[event.signature] for event in trace.events if type(event) is Op]
    assert next(operator.name for operator in called if not operator.is_view) == "aten.randn.default"
    took = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("took")]
    step = re.search(r"step time +([\d.]+) ms", ended.stdout)
    assert step and took[1:] == pytest.approx([float(step[1])] * 4, rel=0.01, abs=0.06)


def test_what_is_not_trained_is_called_first(run: Any, tmp_path: Path) -> None:
    """The model that is planned is the one that is trained."""
    ended = run(FROZEN_FIRST, "--plan", "1.5GiB", "-o", "plan.json")
    assert ended.returncode == 0, ended.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.units and {unit.fqn.split(".")[0] for unit in plan.units} == {"blocks"}


def test_a_model_whose_parts_are_called(run: Any) -> None:
    """Nobody calls the agent itself: the plan is for it, and a script that applies it has its step, peak and recomputation."""
    ended = run(PARTS_CALLED, "--plan", "1.2GiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    plan = Plan.load("plan.json")
    assert {name.split(".")[0] for name, _ in plan.made_for.parameters} == {"actor", "critic"}
    assert plan.units and all(unit.fqn.startswith(("actor", "critic")) for unit in plan.units)
    ended = run(PARTS_CALLED.replace("agent = Agent()", 'agent = autosac.apply(Agent(), "plan.json")'), "--json")
    assert ended.returncode == 0, ended.stderr
    found, promised = json.loads(ended.stdout), plan.predictions["autosac"]
    assert found["step"]["step_ms"] == pytest.approx(promised.step_ms, rel=1e-6)
    assert found["step"]["recompute_ms"] == pytest.approx(promised.recompute_ms, rel=1e-6) and promised.recompute_ms > 0
    assert found["peak_active_bytes"] == promised.peak_active_bytes


def test_the_profiler_shows_kernels(run: Any, tmp_path: Path) -> None:
    """The file and the table of the script's own profiler are the simulated step: its two products run on the GPU."""
    ended = run(PROFILED, "--steps", "4")
    assert ended.returncode == 0, ended.stderr
    calls, kernels = ["aten::addmm 1 True True", "aten::mm 1 True True"], ["addmm 1 True False", "mm 1 True False"]
    assert sorted(ended.stdout.splitlines()[:4]) == [*calls, *(f"kernel of aten::{row}" for row in kernels)]
    (path,) = tmp_path.glob("traces/one.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert sum("mm" in name for name in kernels) == 2


def test_workers_end_without_a_word(run: Any) -> None:
    """Processes that load data do not complain when the script has been stopped."""
    ended = run(WORKERS)
    assert (ended.returncode, ended.stderr) == (0, "")

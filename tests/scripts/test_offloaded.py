"""Parameters that move between the host and the GPU while their gradients are computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from autosac.trace import Collective, Trace

OFFLOADED = """
import functools
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("nccl")
torch.cuda.set_device(0)
layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
model = FullyShardedDataParallel(
    layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), cpu_offload=CPUOffload(offload_params=True), device_id=0
)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("allocated", torch.cuda.memory_allocated())
"""


def test_fsdp_with_its_parameters_on_the_host(run: Any, tmp_path: Path) -> None:
    """The gradients of its four units are reduced and leave the GPU in every step: no memory stays behind."""
    ended = run(OFFLOADED, "--nproc", "4", "--rank", "0", "--steps", "4", "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    events = Trace.load(tmp_path / "step.trace").events
    assert Counter(event.kind for event in events if type(event) is Collective)["reduce_scatter"] == 4
    allocated = [line for line in ended.stdout.splitlines() if line.startswith("allocated")]
    assert allocated[1] == allocated[2] == allocated[3]


MOVED = """
import torch
weight = torch.nn.Parameter(torch.ones(64, 64))
on_host = weight.data
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    weight.data = on_host.cuda()
    loss = (torch.randn(4, 64, device="cuda") @ weight).sum()
    weight.data = on_host
    print(weight.device, end=" ")
    weight.data = on_host.cuda()
    loss.backward()
    print(weight.device, weight.grad.device)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_parameter_that_leaves_the_gpu_between_forward_and_backward(run: Any) -> None:
    """It stays the leaf of the graph, so that the gradient comes to it."""
    ended = run(MOVED)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:3] == ["cpu cuda:0 cuda:0"] * 3

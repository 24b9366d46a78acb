"""Scripts that compile, and what of PyTorch is not simulated: each says so in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from autosac.trace import Collective, Phase, Trace

COMPILED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)).cuda()
model = torch.compile(model, mode="max-autotune")
optimizer = torch.optim.AdamW(model.parameters())
update = torch.compile(optimizer.step, fullgraph=False)
for step in range(3):
    torch.compiler.cudagraph_mark_step_begin()
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    update()
    optimizer.zero_grad()
"""
IN_FUNCTIONS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)


@torch.compile
def train(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@torch.compile
def update():
    optimizer.step()


for step in range(3):
    optimizer.zero_grad()
    loss = train(torch.randn(32, 64, device="cuda"))
    update()
    print(step, loss.item())
"""
IN_PLACE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        least, none = torch.tensor(0.5, dtype=x.dtype, device=x.device), torch.tensor([], device="cuda")
        y = self.linear(x)
        return torch.cat([none, torch.where(y > 0, y, least).flatten()])


model = Model().cuda()
model.compile()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
try:
    model(torch.randn(32, 63, device="cuda"))
except RuntimeError:
    print("refused")
"""
WRAPPED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0, use_orig_params=True)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
hosts = dist.new_group(backend="gloo")
for step in range(9):
    model(torch.randn(32, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hosts.monitored_barrier()
"""
BROKEN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = torch.compile(DistributedDataParallel(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(2, 16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FUSED_OPTIMIZER = """
import os
import torch


@torch.compile(dynamic=False, fullgraph=True)
def update(parameter, gradient, average, rate, decay):
    average.lerp_(gradient, 1 - decay)
    parameter.add_(average * -rate)


class Optimizer(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.rate, self.decay = torch.tensor(0.1, device="cpu"), torch.tensor(0.9, device="cpu")
        self.averages = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        for parameter, average in zip(self.param_groups[0]["params"], self.averages):
            update(parameter, parameter.grad, average, self.rate, self.decay)


model = torch.nn.Linear(64, 64, bias=False).cuda()
optimizer = Optimizer(model.parameters())
for step in range(3):
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(os.environ["WANDB_MODE"])
"""
TRANSFORMED = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = dict(model.named_parameters())


def loss_of(values, x):
    return functional_call(model, values, (x,)).sum()


def task(x):
    gradients = grad(loss_of)(parameters, x)
    return loss_of({name: value - 0.1 * gradients[name] for name, value in parameters.items()}, x)


for step in range(3):
    vmap(task)(torch.randn(4, 16, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
REFUSED = """
import torch

torch.eye(4).to_sparse().cuda()
"""
LAST_RANK_PRINTS = """
import logging, sys
import torch, torch.distributed as dist

logging.basicConfig(level=logging.INFO)
dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    (weight @ weight).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    if dist.get_rank() == 1:
        print("step", step)
    elif len(sys.argv) > 1:
        logging.log(getattr(logging, sys.argv[1]), "step")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Inductor generates Triton code only with Triton"
)
def test_a_model_that_is_compiled_in_place(run: Any, tmp_path: Path) -> None:
    """Its calls begin the steps, though Dynamo traces their hooks. Constants that its forward puts on the GPU are compiled,
    and an error in it is PyTorch's own.
    """
    ended = run(IN_PLACE, "--steps", "0", "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("refused\n") and "step 2 of the 9 that the script ran" in ended.stdout
    assert "Inductor could not compile" not in ended.stdout
    trace = Trace.load(tmp_path / "step.trace")
    assert trace.info.compiled
    assert [s.name for s in trace.signatures if s.name.startswith("triton.") and "where" in s.name]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Inductor generates Triton code only with Triton"
)
def test_inductor_takes_all_graphs_of_a_script(run: Any, tmp_path: Path) -> None:
    """Its attention patterns, traced with constants on ``cuda``, do not stop it; tuning and CUDA graphs are named.

    A compiled optimizer makes its states, and is one kernel over lists of tensors. A script that runs again compiles nothing
    anew, and takes the same step.
    """
    written = "from torch._inductor import metrics\nprint('kernels written:', metrics.generated_kernel_count)\n"

    def trained(file: str) -> tuple[str, Trace]:
        ended = run(COMPILED + written, "--steps", "0", "--save-capture", file)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, Trace.load(tmp_path / file)

    said, trace = trained("step.trace")
    assert "Inductor could not compile" not in said and "kernels written: 0\n" not in said
    assert "the CUDA graphs of compiled code are launched from their first call on" in said
    assert "the kernels that Inductor chooses without tuning" in said
    names = [trace.signatures[op.signature].name for _, op in trace.operators() if op.phase is Phase.OPTIMIZER]
    assert any(name.startswith("triton.triton_for") for name in names)
    assert not any("_foreach" in name for name in names)
    said, again = trained("again.trace")
    assert "kernels written: 0\n" in said
    assert (again.events, again.signatures, again.storages) == (trace.events, trace.signatures, trace.storages)


def test_a_wrapper_that_is_compiled_from_outside(run: Any, tmp_path: Path) -> None:
    """The first FSDP makes streams and asks for the data of tensors where the graph breaks: none of that is compiled. Each of
    the two layers is gathered twice, and its gradient is scattered.
    """
    ended = run(WRAPPED, "--nproc", "2", "--rank", "0", "--save-capture", "step.trace", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ".grad attribute" not in ended.stderr
    kinds = [event.kind for event in Trace.load(tmp_path / "step.trace").events if type(event) is Collective]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == (4, 2)


def test_operators_between_graphs(run: Any) -> None:
    """Dynamo compiles nothing of PyTorch's own layer under DDP, nor of what stands for kernels here."""
    ended = run(BROKEN, "--nproc", "1")
    assert ended.returncode == 0, ended.stderr
    assert "step 3 of the 3 that the script ran" in ended.stdout
    assert "Dynamo does not know how to trace" not in ended.stderr


def test_transformed_functions(run: Any) -> None:
    """Modules that are called inside of vmap and grad get tensors that wrap others."""
    ended = run(TRANSFORMED)
    assert ended.returncode == 0, ended.stderr
    assert "step 2 of the 3 that the script ran" in ended.stdout


def test_what_is_not_simulated(run: Any) -> None:
    """Sparse tensors are refused in one line."""
    ended = run(REFUSED)
    assert ended.returncode == 1
    assert "sparse tensors cannot be simulated" in ended.stderr


@pytest.mark.parametrize(("logs", "is_silent"), [((), True), (("WARNING",), True), (("INFO",), False)])
def test_a_silent_rank_points_to_one_that_prints(run: Any, logs: tuple[str, ...], is_silent: bool) -> None:
    """Where only the last rank prints, the report says how to see it; a rank that logs its steps is not silent."""
    ended = run(LAST_RANK_PRINTS, "--nproc", "2", arguments=logs)
    assert ended.returncode == 0, ended.stderr
    assert ("rank 0 prints nothing: --rank 1 shows the output of rank 1" in ended.stdout) == is_silent
    assert "step 0" not in ended.stdout


FLEXIBLE = """
import sys
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attend = torch.compile(flex_attention) if sys.argv[1] == "alone" else flex_attention


def block(x):
    q, k, v = layer(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)


layer = nn.Linear(64, 192).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
call = block if sys.argv[1] == "alone" else torch.compile(block)
for step in range(3):
    call(torch.randn(2, 256, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Inductor needs Triton")
@pytest.mark.parametrize("way", ["alone", "in a block"])
def test_flexible_attention_is_one_kernel(run: Any, way: str) -> None:
    """Nothing about it is approximate, neither alone nor with other code around it, and it has a price."""
    ended = run(FLEXIBLE, arguments=(way,))
    assert ended.returncode == 0, ended.stderr
    assert "approximate" not in ended.stdout
    assert "without a cost model" not in ended.stdout


def test_steps_within_compiled_functions(run: Any) -> None:
    """Backward and optimizer run in compiled code, which reads the clock and runs hooks: nothing of AutoSAC is compiled."""
    ended = run(IN_FUNCTIONS, "--steps", "0")
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[:3]] == ["0", "1", "2"]
    assert "step 2 of the" in ended.stdout and "generated" in ended.stdout
    assert "does not know how to trace" not in ended.stderr and "autosac" not in ended.stderr


def test_an_optimizer_with_rates_on_the_host(run: Any) -> None:
    """Its compiled update takes single numbers in tensors on the host (nanochat's AdamW). Nothing is told to W&B."""
    ended = run(FUSED_OPTIMIZER, "--steps", "0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("disabled\n")
    assert "generated" in ended.stdout

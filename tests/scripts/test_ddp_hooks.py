"""Communication hooks of DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosac.memory_sim import WorkspaceModel, simulate_memory
from autosac.trace import Collective, Trace

WIDTH, LAYERS = 1024, 4
SCRIPT = f"""
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
layers = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))).cuda()
model = DistributedDataParallel(layers, device_ids=[0], bucket_cap_mb=4)
if sys.argv[1] == "half":
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
elif sys.argv[1] == "builtin":
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
elif sys.argv[1] == "power":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
elif sys.argv[1] == "twice":
    for _ in range(2):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(64, {WIDTH}, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("allocated", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
"""


def _allocated(output: str) -> tuple[list[int], int]:
    """Bytes after each step, and at the peak of the last one."""
    lines = [line.split() for line in output.splitlines() if line.startswith("allocated")]
    return [int(line[1]) for line in lines], int(lines[-1][2])


@pytest.mark.parametrize(
    ("hook", "reduced"),
    [
        ("none", 4 * WIDTH * WIDTH * LAYERS),
        ("half", 2 * WIDTH * WIDTH * LAYERS),
        ("builtin", 2 * WIDTH * WIDTH * LAYERS),
        ("power", 4 * (2 * WIDTH * 2) * LAYERS),  # P and Q of rank 2 in place of each gradient
    ],
)
def test_a_hook_decides_what_is_reduced(run: Any, tmp_path: Path, hook: str, reduced: int) -> None:
    """All-reduces move the hook's bytes, and no tensor outlives its step.

    PowerSGD's products run on 32 streams in turn, where each gets a workspace of cuBLAS: these stay, and the reported step has
    all of them.
    """
    options = ("--nproc", "2", "--rank", "0", "--steps", "4", "--save-capture", "step.trace")
    ended = run(SCRIPT, *options, arguments=(hook,))
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    assert sum(event.nbytes for event in trace.events if type(event) is Collective) == reduced
    (*_, before, last), peak = _allocated(ended.stdout)
    assert before == last
    if hook == "power":
        assert last > 32 * 32 * 2**20
        assert simulate_memory(trace, workspaces=WorkspaceModel.for_gpu((9, 0), 132)).peak_bytes == peak


def test_a_hook_is_registered_once(run: Any) -> None:
    """A second one is PyTorch's own error."""
    ended = run(SCRIPT, "--nproc", "2", "--rank", "0", arguments=("twice",))
    assert ended.returncode == 1
    assert "can only be called once" in ended.stderr

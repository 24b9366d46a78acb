"""What scripts do besides plain training: `torch.multiprocessing`, masks, profilers, pinned memory, host collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosac.trace import Op, Trace

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x):
        return self.norm(self.first(x))


def main(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world, init_method="tcp://localhost:29500")
    torch.cuda.set_device(rank)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).cuda()
    model = DistributedDataParallel(model, device_ids=[rank], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.device("cuda"):
        print(torch.tensor(1.0).device)
    pinned = torch.randn(32, 64).pin_memory()
    print(pinned.is_pinned(), torch.randn(4).is_pinned())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]):
        for _ in range(5):
            dist.barrier(async_op=True).wait()
            x = pinned.cuda(non_blocking=True)
            y = model(x)
            top = (y @ y.T).topk(2, dim=1).indices
            known = torch.zeros_like(y[:, :32]).int().scatter(1, top, 1).bool()
            unknown = y > 0
            print(y[:, :32].masked_select(known).shape, y[unknown].shape, torch.cuda.max_memory_allocated() > 0)
            y[unknown].sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(2,), nprocs=2)
"""


def test_an_odd_script_runs(run: Any) -> None:
    """A known mask selects what it selects and an unknown one everything, which the report says."""
    ended = run(SCRIPT, "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["cuda:0", "True False"]
    assert lines[2:5] == ["torch.Size([64]) torch.Size([2048]) True"] * 3
    assert "masks that depend on activations are assumed to select everything" in ended.stdout
    assert (
        "files and tables of the script's profiler, and --trace FILE, show one simulated step, with kernels"
        in ended.stdout
    )


def test_a_script_that_starts_more_processes_than_asked_for(run: Any) -> None:
    """One line says what to give."""
    ended = run(SCRIPT)
    assert ended.returncode == 1
    assert ended.stderr == "autosac: the script starts 2 processes, one for each GPU: say how many with --nproc 2\n"


JAGGED = """
import torch
from torch import nn
from torch.nn import functional as F

lengths = (512, 100, 333)
layer, out = nn.Linear(64, 192).cuda(), nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD([*layer.parameters(), *out.parameters()], lr=0.1)
for step in range(3):
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in lengths], layout=torch.jagged, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in layer(x).chunk(3, -1))
        y = out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
    assert y.size(1) == x.size(1) and y.values().shape == (sum(lengths), 64) and x._get_max_seqlen() == max(lengths)
    (x + y).values().float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_jagged_tensors_take_the_memory_of_their_tokens(run: Any, tmp_path: Path) -> None:
    """Sequences of several lengths go through one attention of variable length, without any padding."""
    ended = run(JAGGED, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    calls = [trace.signatures[event.signature] for event in trace.events if type(event) is Op]
    forward = [call for call in calls if call.name == "aten._flash_attention_forward.default"]
    assert len(forward) == 1
    assert forward[0].inputs[0].shape == (945, 2, 32)


JAGGED_LAYERS = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in (512, 100)], layout=torch.jagged, device="cuda")
    model(x).values().sum().backward()
    optimizer.step()
"""


def test_no_plan_for_modules_of_jagged_tensors(run: Any) -> None:
    """One line says so: their sizes are no numbers."""
    ended = run(JAGGED_LAYERS, "--plan", "1MiB", "-o", "plan.json")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        "autosac: no plan can be made for modules that compute with nested (jagged) tensors: plan the script without them"
    )

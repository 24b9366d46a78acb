"""What scripts do besides plain training: `torch.multiprocessing`, masks, profilers, pinned memory, host collectives."""

from __future__ import annotations

from typing import Any

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
    assert "the script's profiler sees the host only" in ended.stdout


def test_a_script_that_starts_more_processes_than_asked_for(run: Any) -> None:
    """One line says what to give."""
    ended = run(SCRIPT)
    assert ended.returncode == 1
    assert ended.stderr == "autosac: the script starts 2 processes, one for each GPU: say how many with --nproc 2\n"

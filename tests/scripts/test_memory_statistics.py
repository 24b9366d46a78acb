"""`torch.cuda.memory_stats` and `memory_summary` in a script: numbers of the simulated allocator, of all pools and of each."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import torch

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(1000, 512).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
found = torch.cuda.memory_stats()
for name in ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes"):
    print(name, found[f"{name}.all.current"], found[f"{name}.small_pool.current"])
print("freed", found["allocation.all.allocated"] - found["allocation.all.freed"])
print("reserved", found["reserved_bytes.all.current"] - torch.cuda.memory_reserved())
print("left", found["reserved_bytes.small_pool.current"] - found["active_bytes.small_pool.current"]
      - found["inactive_split_bytes.small_pool.current"])
print("segments", found["segment.small_pool.current"] * 2**21 - found["reserved_bytes.small_pool.current"])
segments = torch.cuda.memory_snapshot()
print("snapshot", sum(s["total_size"] for s in segments) - torch.cuda.memory_reserved(),
      sum(s["allocated_size"] for s in segments), sum(len(s["blocks"]) for s in segments))
before = found["allocation.all.peak"]
torch.cuda.reset_peak_memory_stats()
print("peaks", before, torch.cuda.memory_stats()["allocation.all.peak"])
print(torch.cuda.memory_summary())
"""


def test_statistics_of_allocations(run: Any) -> None:
    """A weight of 1 MiB and a bias of 2 KiB, two moments of each, and cuBLAS's workspaces of 32 MiB for two threads: eight
    allocations. The smaller ones lie in segments of 2 MiB.
    """
    small = 3 * (2**20 + 2048)
    all_of_it = small + 2 * 2**25
    ended = run(SCRIPT, "--quiet")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    found = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in lines[:11]}
    assert found["allocation"] == found["active"] == [8, 6]
    assert found["allocated_bytes"] == found["active_bytes"] == found["requested_bytes"] == [all_of_it, small]
    assert found["freed"] == [8]
    assert found["reserved"] == found["left"] == found["segments"] == [0]
    assert found["snapshot"][:2] == [0, all_of_it] and found["snapshot"][2] > 8
    before, after = found["peaks"]
    assert before > after == 8
    assert any("Allocations" in line and " 8 " in line for line in lines)

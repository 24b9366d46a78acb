"""Process groups that scripts make."""

from __future__ import annotations

from typing import Any

import pytest

from autosac.trace import ALONE, IN_TURN, Collective, Trace

CONNECTED = """
import torch, torch.distributed as dist
device = torch.device("cuda:0")
dist.init_process_group("nccl", device_id=DEVICE)
try:
    pair = dist.split_group(split_ranks=[[1, 2], [3, 0]])
    print(dist.get_process_group_ranks(pair), dist.split_group(split_ranks=[[1, 2]]))
except RuntimeError as error:
    print(error)
    pair = dist.new_group([0, 3])
model = torch.nn.Linear(8, 8, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = model(torch.ones(8, 8, device=device))
    dist.isend(x.detach(), 1)
    dist.isend(x.detach(), 3, group=pair)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x.detach(), 1)])
    dist.all_reduce(x.detach(), group=pair)
    x.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("device", "printed", "alone"),
    [("device", "[0, 3] None", IN_TURN), ("None", "No device associated", ALONE)],
    ids=["at once", "lazily"],
)
def test_groups_that_are_connected_at_once(run: Any, device: str, printed: str, alone: int) -> None:
    """`init_process_group(device_id=...)` connects the group, and those that are split off it: a transfer by itself takes its
    turn on the group's stream. Without it pairs of ranks have streams of their own, and nothing can be split off.
    """
    options = ("--nproc", "4", "--rank", "0", "--save-capture", "step.trace")
    ended = run(CONNECTED.replace("DEVICE", device), *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(printed)
    first, second, batched, reduced = (event for event in Trace.load("step.trace").events if type(event) is Collective)
    assert (first.batch, second.batch, reduced.batch) == (alone, alone, ALONE) and batched.batch == batched.work

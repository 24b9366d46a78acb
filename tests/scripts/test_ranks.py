"""Several distinct ranks of a script: pipeline stages that send to each other, and ranks that do other things."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

PIPELINE = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
part = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2))).cuda()
stage = PipelineStage(part, rank, world, torch.device("cuda", rank))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).pow(2).mean())
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
begin = time.time()
for step in range(100):
    x = torch.randn(8192, 4096, device="cuda")
    schedule.step(*[x] * (rank == 0), **({"target": x} if rank == world - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    now = time.time()
    print(f"rank {rank} step {step}: {1e3 * (now - begin):.3f} ms", flush=True)
    begin = now
"""
SAME_BATCH = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
part = nn.Linear(512, 512, bias=False).cuda()
schedule = Schedule1F1B(PipelineStage(part, rank, world, torch.device("cuda", rank)), 4, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
x = torch.randn(1024, 512, device="cuda")
while True:
    losses = []
    optimizer.zero_grad()
    schedule.step(*[x] * (rank == 0), **({"target": x, "losses": losses} if rank == world - 1 else {}))
    optimizer.step()
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device="cuda")
    if rank == 0:
        dist.recv(loss, src=world - 1)
        print(f"loss {loss.item():.2f}", flush=True)
    elif rank == world - 1:
        dist.send(loss, dst=0)
"""
TRACED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
x = torch.randn(64, 256)
pipe = pipeline(model, mb_args=(x[:16],), split_spec={"1": SplitPoint.BEGINNING})
stage = pipe.build_stage(rank, device)
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
x = x.to(device)
for step in range(9):
    schedule.step(*[x] * (rank == 0), **({"target": x} if rank == world - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}", flush=True)
"""
ROUND = """
import pathlib
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == world - 1:
    pathlib.Path("begun").touch()
while not pathlib.Path("begun").exists():
    pass
torch.cuda.set_device(rank)
number = torch.full((1,), 5, dtype=torch.int32, device="cuda")
for order in (range(world), range(world - 1, -1, -1)):
    place = order.index(rank)
    if place > 0:
        dist.recv(number, src=order[place - 1])
    if place < world - 1:
        dist.send(number * 2, dst=order[place + 1])
print(f"{number.item()} is the number", flush=True)
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
RANK_DEPENDENT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
objects = [{"width": 1024 * (rank + 1)}]
dist.broadcast_object_list(objects, src=0)  # all have rank 0's
width = objects[0]["width"]
model = nn.Linear(width, width).cuda(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = torch.randn(2048, width, device=f"cuda:{rank}")
    loss = model(x).sum()
    if rank == 0:
        loss = loss + model(x).pow(2).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} of width {width}", flush=True)
"""
PAIRS = """
import sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
same = halves[rank // 2] if sys.argv[1] == "halves" else None
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
peer = rank ^ int(sys.argv[2])
for step in range(100):
    x = torch.randn(64, 1024, device="cuda")
    dist.send(x, peer) if rank < peer else dist.recv(x, peer)
    model(x).sum().backward()
    dist.all_reduce(model.weight.grad, group=same)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_pipeline_stages_run_together(run: Any) -> None:
    """Both stages run, exchange their shapes, and meet; the shown rank prints the time of the whole pipeline."""
    ended = run(PIPELINE, "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    printed = [line for line in ended.stdout.splitlines() if line.startswith("rank")]
    assert [line.split(":")[0] for line in printed] == ["rank 0 step 0", "rank 0 step 1", "rank 0 step 2"]
    assert "of 2 ranks, 0, 1 ran" in ended.stdout
    assert " waiting for peers " in ended.stdout
    step_ms = float(ended.stdout.split("step time")[1].split()[0])
    assert abs(float(printed[-1].split()[-2]) - step_ms) < 0.1


def test_a_receive_begins_the_step_of_a_stage(run: Any) -> None:
    """Stages that draw nothing receive into buffers that they have; the loss that is sent afterwards is of the step before."""
    ended = run(SAME_BATCH, "--nproc", "3", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[:3]] == ["loss"] * 3
    assert "of 3 ranks, 0, 1, 2 ran" in ended.stdout


def test_a_traced_stage_is_on_its_device(run: Any) -> None:
    """The frontend that splits an exported model moves its part of it, whose parameters were made on the host."""
    ended = run(TRACED, "--nproc", "2", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("step 0\nstep 1\nstep 2\n") and "of 2 ranks, 0, 1 ran" in ended.stdout


def test_the_last_rank_is_waited_for(run: Any) -> None:
    """It began as the rank that is compared with rank 0 and was put off; what it sends in the end reaches all before it."""
    ended = run(ROUND, "--nproc", "4", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("320 is the number")


def test_only_distinct_ranks_run(run: Any) -> None:
    """Of eight ranks the first is unlike the last, and the one in the middle is like the last: three run, two are priced."""
    ended = run(RANK_DEPENDENT, "--nproc", "8", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["script"]["ran"] == [0, 4, 7]
    ranks = found["ranks"]
    assert len(ranks) == 2 and ranks[0]["rank"] == 0 and ranks[1]["rank"] in (4, 7)
    assert ranks[0]["step_ms"] == ranks[1]["step_ms"]
    assert ranks[0]["peak_active_bytes"] > ranks[1]["peak_active_bytes"]


def test_a_rank_that_is_tried_late_may_fail(run: Any) -> None:
    """It finds what others have left (folders of checkpoints): the result is that without it, and says so."""
    fails = 'rank = dist.get_rank()\nif rank == 2:\n    raise FileExistsError("a folder of rank 0")'
    ended = run(RANK_DEPENDENT.replace("rank = dist.get_rank()", fails), "--nproc", "4", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "autosac: rank 2, which ran after the others" in ended.stderr
    assert [rank["rank"] for rank in json.loads(ended.stdout)["ranks"]] == [0, 3]


@pytest.mark.parametrize(
    ("groups", "to_peer", "ran"),
    [("halves", "2", [0, 2]), ("world", "1", [0, 1, 2, 3])],
    ids=["a rank of each stage", "ranks that are alike"],
)
def test_ranks_like_the_last_one_run_where_all_communicate_with_all(
    run: Any, groups: str, to_peer: str, ran: list[int]
) -> None:
    """A second rank of each stage does not run, unless the last is to be compared with the first: then its peer runs, too."""
    ended = run(PAIRS, "--nproc", "4", "--json", "--", groups, to_peer)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["script"]["ran"] == ran


ENDS_EARLY = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    if step == 2 and dist.get_rank() == 1:
        raise ValueError("the folder exists already")
    optimizer.step()
"""


def test_a_silent_rank_that_fails_before_its_step_is_reported(run: Any) -> None:
    """Its earlier steps do not stand for the one that is compared, the third: its own error is shown, and who it was."""
    ended = run(ENDS_EARLY, "--nproc", "2")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "ValueError: the folder exists already" in ended.stderr
    assert "autosac: this was rank 1 (--rank 0 runs only that one)" in ended.stderr


CONSOLIDATED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
sizes = [64, 48, 32, 16, 8, 4]
model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in zip(sizes, sizes[1:]))).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
for step in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.consolidate_state_dict(0)
if rank == 0:
    found = optimizer.state_dict()
    print([list(state["exp_avg_sq"].shape) for state in found["state"].values()], found["state"][0]["exp_avg"].device)
    optimizer.load_state_dict(found)
"""


def test_sharded_states_come_together(run: Any) -> None:
    """Rank 0 receives the states that the other ranks have of their own parameters, and loads them again."""
    ended = run(CONSOLIDATED, "--nproc", "2", "--steps", "9")
    assert ended.returncode == 0, ended.stderr
    assert "[[48, 64], [32, 48], [16, 32], [8, 16], [4, 8]] cpu" in ended.stdout


LOGS = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3))).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.randn(8192, 512, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == int(sys.argv[1]):
        print(f"loss {loss.item():.3f}")
"""


def test_the_rank_that_logs_stands_for_all(run: Any) -> None:
    """Its host waits for the loss, and the others do the same work: only the last of them runs, and is not priced."""
    ended = run(LOGS, "--nproc", "8", "--json", arguments=("0",))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["script"]["ran"] == [0, 7] and [rank["rank"] for rank in found["ranks"]] == [0]


def test_ranks_that_only_wait_share_a_plan(run: Any) -> None:
    """The last rank reads the loss: the step is that of both, and the plan is made for the one that waits, with its step."""
    ended = run(LOGS, "--nproc", "8", "--plan", "520MiB", "--json", "--quiet", arguments=("7",))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["script"]["ran"] == [0, 7] and [rank["rank"] for rank in found["ranks"]] == [0, 7]
    assert found["plan"]["made_for"]["pipeline_stages"] == 1 and found["plan"]["units"]
    assert found["plan"]["predictions"]["none"]["step_ms"] == found["step"]["step_ms"]


GATHERS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        whole = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        return x + self.down(nn.functional.gelu(self.up(whole)))[: len(x)]

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = nn.Sequential(*(Block() for _ in range(3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.randn(4096, 256, device="cuda")).square().mean()
    if rank == 0:
        loss = loss.relu()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_plan_of_distinct_ranks_gathers_again(run: Any) -> None:
    """While a rank runs under a plan that recomputes collectives, nobody compares it with steps without that plan."""
    ended = run(GATHERS, "--nproc", "2", "--plan", "300MiB", "--json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    predicted = found["plan"]["predictions"]
    assert found["plan"]["units"] and predicted["none"]["peak_reserved_bytes"] > 300 * 2**20
    assert predicted["autosac"]["peak_reserved_bytes"] <= 300 * 2**20


EVALUATES = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
net = torch.nn.Linear(64, 64).cuda()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = [None]
    if rank == 0:
        with torch.no_grad():
            net(torch.randn(8, 64, device="cuda"))
        found = [{"best": step}]
    dist.broadcast_object_list(found, src=0)
    if rank == 0:
        print(found[0]["best"], flush=True)
"""


SAVES = EVALUATES.replace(
    "dist.broadcast_object_list(found, src=0)",
    """
    if rank == 0:
        torch.save(net.state_dict(), f"{step}.pt")
    dist.barrier()
    assert len(torch.load(f"{step}.pt")) == 2
    found = [{"best": step * (rank == 3)}]
    dist.broadcast_object_list(found, src=3)""",
)


def test_a_rank_that_evaluates_alone_and_saves(run: Any) -> None:
    """The others find its file after the barrier, though its step has ended before; it hears of the last rank, too."""
    ended = run(SAVES, "--nproc", "4", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("0\n1\n2\n") and "of 4 ranks, 0, 3 ran" in ended.stdout


def test_a_rank_that_evaluates_alone_and_tells_the_others(run: Any) -> None:
    """Their step goes on until they hear of it, and rank 0's has ended: it does not wait for theirs, which come later."""
    ended = run(EVALUATES, "--nproc", "4", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("0\n1\n2\n") and "of 4 ranks, 0, 3 ran" in ended.stdout


INTERLEAVED = """
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
indices = rank, rank + 2
parts = [nn.Sequential(OrderedDict({f"block{i}": Block(), f"last{i}": Block()})).to(device) for i in indices]
stages = [PipelineStage(part, i, 4, device) for part, i in zip(parts, indices)]
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(8192, 512, device=device)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_plan_is_for_all_stages_of_a_rank(run: Any) -> None:
    """Two ranks have two pipeline stages each: modules of all four are checkpointed, and either rank fits the budget."""
    ended = run(INTERLEAVED, "--nproc", "2", "--plan", "560MiB", "--json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)["plan"]
    assert {f"block{i}" for i in range(4)} <= {unit["fqn"] for unit in plan["units"]}
    predicted = plan["predictions"]
    assert predicted["autosac"]["peak_reserved_bytes"] <= 560 * 2**20 < predicted["none"]["peak_reserved_bytes"]


def test_the_error_names_all_ranks_that_have_no_plan(run: Any) -> None:
    """With the largest of the budgets that it names both ranks have one; the first rank's is too small for the other."""
    uneven = INTERLEAVED.replace(
        "x = torch.randn", "ballast = torch.empty(rank * 2**26, device=device)\n    x = torch.randn"
    )
    ended = run(uneven, "--nproc", "2", "--plan", "1MiB", "--quiet")
    assert ended.returncode == 1
    needed = re.findall(
        r"rank (\d): no plan meets 1\.0 MiB reserved: the smallest budget found to work is (\S+) MiB", ended.stderr
    )
    assert [rank for rank, _ in needed] == ["0", "1"]
    assert float(needed[0][1]) + 256 <= float(needed[1][1])


LOSS_OF_THE_LAST = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if rank == 0:
        sent = model(torch.randn(256, 64).cuda())
        dist.send(sent.detach(), 1)
        gradient = torch.empty(256, 64, device="cuda")
        dist.recv(gradient, 1)
        sent.backward(gradient); loss = torch.zeros((), device="cuda")
    else:
        got = torch.empty(256, 64, device="cuda", requires_grad=True)
        dist.recv(got.data, 0)
        loss = model(got).square().mean()
        loss.backward()
        dist.send(got.grad, 0)
    optimizer.step()
    loss = loss.detach()
    dist.broadcast(loss, src=1)
    if rank == 0:
        print(f"loss {loss.item():.3f}", flush=True)
"""


def test_a_loss_that_the_last_rank_computes_is_not_the_first_ones_zero(run: Any) -> None:
    """The first rank receives it in place of its zero: a number that it does not know, and that falls."""
    ended = run(LOSS_OF_THE_LAST, "--nproc", "2", "--quiet")
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("loss")]
    assert losses[0] == 10.0 and losses == sorted(losses, reverse=True) and losses[-1] > 5

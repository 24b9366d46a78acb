"""A canary for each patch of distributed training: the replacement takes effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autosac.capture.patches import process_group
from autosac.trace import Alloc, Free, HostWait, Label, Phase, WorkWait

Capture = Callable[..., Any]
WORLD = 4
FLOAT = 4  # bytes


def make_ddp(device: torch.device) -> Any:
    """Two layers under DistributedDataParallel."""
    process_group.initialise(WORLD, 0)
    with device:
        model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.zeros(2, 8)
    replicated = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        replicated(x).sum().backward()
        replicated.zero_grad()

    return model, step


def test_ddp(capture: Capture) -> None:
    """DDP reduces both gradients in one bucket beside the backward, waits at its end, then copies them back.

    The kept step is one in which it does not sort its buckets (two broadcasts).
    """
    reading = capture(make_ddp)
    (reduction,) = reading.collectives()
    assert reduction.kind == "all_reduce" and reduction.nbytes == 2 * 64 * FLOAT
    assert reduction.phase is Phase.BACKWARD and reduction.asynchronous
    (wait,) = reading.of(WorkWait)
    assert wait == WorkWait(reduction.work, 0)
    into, out_of = reading.operators("copy_", Phase.BACKWARD)[:2], reading.operators("copy_", Phase.BACKWARD)[2:]
    events = reading.trace.events
    order = [*into, reduction, wait, *out_of]
    assert [events.index(event) for event in order] == sorted(events.index(event) for event in order)
    assert len(out_of) == 2 and not reading.of(HostWait)


def make_fsdp(device: torch.device) -> Any:
    """Two layers, 8 to 10 to 8, under FSDP2, each a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    process_group.initialise(WORLD, 0)
    mesh = init_device_mesh(device.type, (WORLD,))
    with device:
        model, x = nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 8, bias=False)), torch.zeros(2, 8)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def fsdp(capture: Capture) -> Any:
    """Of `make_fsdp`."""
    return capture(make_fsdp)


def test_fsdp_shards(fsdp: Any) -> None:
    """Rank 0 holds 3 of 10 and 2 of 8 rows; transfers are padded to equal shards; reductions run on their own stream."""
    padded = [12 * 8 * FLOAT, 8 * 10 * FLOAT]
    assert sorted(fsdp.labelled(Label.PARAMETER)) == [2 * 10 * FLOAT, 3 * 8 * FLOAT]
    assert [(c.kind, c.nbytes, c.phase) for c in fsdp.collectives()] == [
        ("all_gather", padded[0], Phase.FORWARD),
        ("all_gather", padded[1], Phase.FORWARD),
        ("all_gather", padded[1], Phase.BACKWARD),
        ("all_gather", padded[0], Phase.BACKWARD),
        ("reduce_scatter", padded[1], Phase.BACKWARD),
        ("reduce_scatter", padded[0], Phase.BACKWARD),
    ]
    gathers, reductions = fsdp.collectives("all_gather"), fsdp.collectives("reduce_scatter")
    assert len({c.stream for c in gathers}) == len({c.stream for c in reductions}) == 1
    assert len({gathers[0].stream, reductions[0].stream, 0}) == 3
    assert fsdp.trace.groups[gathers[0].group].ranks() == tuple(range(WORLD))


def test_fsdp_unsharded_parameters(fsdp: Any) -> None:
    """Unsharded parameters are allocated and freed by resizing, for the forward and again for the backward."""
    storages = [e.storage for e in fsdp.of(Alloc) if fsdp.trace.storages[e.storage].label is Label.UNSHARDED_PARAMETER]
    sizes = [(fsdp.trace.storages[s].nbytes, fsdp.trace.storages[s].phase) for s in storages]
    first, second = 10 * 8 * FLOAT + 2 * 8 * FLOAT, 8 * 10 * FLOAT  # all shards of three rows
    assert sizes == [(first, Phase.FORWARD), (second, Phase.FORWARD), (second, Phase.BACKWARD), (first, Phase.BACKWARD)]
    freed = {event.storage for event in fsdp.of(Free)}
    assert freed >= set(storages)
    assert fsdp.labelled(Label.UNSHARDED_PARAMETER) == []


def test_fsdp_waits(fsdp: Any) -> None:
    """Every transfer of FSDP is waited for on the stream that it was issued to."""
    assert [(w.work, w.stream) for w in fsdp.of(WorkWait)] == [(c.work, c.stream) for c in fsdp.collectives()]


def make_dtensor(device: torch.device) -> Any:
    """A sharded product, made whole by a functional all-gather."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    process_group.initialise(WORLD, 0)
    mesh = init_device_mesh(device.type, (WORLD,))
    a = distribute_tensor(torch.zeros(8, 8, device=device), mesh, [Shard(0)])
    b = distribute_tensor(torch.zeros(8, 8, device=device), mesh, [Replicate()])

    def step() -> None:
        (a @ b).relu().redistribute(mesh, [Replicate()]).to_local() + 1

    return step


def test_dtensor_makes_no_phantom_operators(capture: Capture) -> None:
    """A DTensor program runs its local operators and nothing else: shape propagation is not recorded."""
    reading = capture(make_dtensor)
    assert [
        (name, reading.signature(o).outputs[0].shape)
        for (_, _, name), o in zip(reading.placed(), reading.operators(), strict=True)
    ] == [("mm", (2, 8)), ("relu", (2, 8)), ("add", (8, 8))]
    assert sum(type(event) is Alloc for event in reading.trace.events) == 4


def test_functional_collectives(capture: Capture) -> None:
    """Waiting for a functional collective allocates nothing: it gives back the collective's own result."""
    reading = capture(make_dtensor)
    (gather,) = reading.collectives()
    (wait,) = reading.of(WorkWait)
    assert gather.kind == "all_gather" and gather.nbytes == 8 * 8 * FLOAT and gather.asynchronous
    assert wait == WorkWait(gather.work, 0)
    (add,) = reading.operators("add")
    assert add.inputs == gather.outputs


def test_collectives_of_the_compute_stream(capture: Capture) -> None:
    """The gather is issued on stream 0, and what it makes is for communication all the same; the other results are not."""
    reading = capture(make_dtensor)
    (gather,) = reading.collectives()
    made = [reading.trace.storages[event.storage] for event in reading.of(Alloc)]
    assert (gather.stream, gather.peer, gather.batch) == (0, -1, -1) and {storage.stream for storage in made} == {0}
    assert [storage.label for storage in made] == [Label.NONE, Label.NONE, Label.COMMUNICATION, Label.NONE]
    assert made[2] == reading.trace.storages[gather.outputs[0]]


def make_point_to_point(device: torch.device) -> Any:
    """Two transfers as one batch, and one alone."""
    process_group.initialise(WORLD, 1)
    sent, received = torch.zeros(6, device=device), torch.zeros(4, device=device)

    def step() -> None:
        batch = [dist.P2POp(dist.isend, sent, 2), dist.P2POp(dist.irecv, received, 0)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.isend(sent, 3).wait()

    return step


def test_point_to_point(capture: Capture) -> None:
    """Transfers of a batch share it; peers are global ranks; waits name their work."""
    reading = capture(make_point_to_point)
    send, receive, alone = reading.collectives()
    assert (send.kind, send.peer, send.nbytes) == ("send", 2, 6 * FLOAT)
    assert (receive.kind, receive.peer, receive.nbytes) == ("recv", 0, 4 * FLOAT)
    assert send.batch == receive.batch == send.work == receive.work >= 0
    assert (alone.kind, alone.peer, alone.batch) == ("send", 3, -1) and alone.work != send.work
    waits = [wait.work for wait in reading.of(WorkWait)]
    assert waits[-1] == alone.work and set(waits) == {send.work, alone.work}

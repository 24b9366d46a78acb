"""Values that collectives bring: c10d's operators on small integers, over a group of four ranks that nobody is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.capture.device.exchanged import (
    collective_in_place,
    exchange_on_host,
    exchange_with,
    functional_collective,
)
from autosac.capture.device.shadows import MOST_KNOWN, overwrite, shadow

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


class Recording:
    """Notes what is asked of it; what comes from another rank is ten times that rank, wherever an element is wanted."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.owns = False

    def send(self, group: str, peer: int, known: torch.Tensor | None) -> None:
        self.asked.append(("send", peer, None if known is None else known.tolist()))

    def receive(self, group: str, peer: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        self.asked.append(("receive", peer, dtype))
        return lambda: torch.tensor([10 * peer, 10 * peer + 1], dtype=dtype)

    def needs(self, peer: int) -> None:
        self.asked.append(("needs", peer))

    def barrier(self, group: str, ranks: Sequence[int]) -> None:
        self.asked.append(("barrier", tuple(ranks)))

    def broadcast(
        self, group: str, root: int, known: torch.Tensor | None, dtype: torch.dtype
    ) -> Callable[[], torch.Tensor] | None:
        self.asked.append(("broadcast", root, None if known is None else known.tolist()))
        return None if self.owns else lambda: torch.tensor([10 * root, 10 * root + 1], dtype=dtype)


@pytest.fixture
def group() -> Iterator[Any]:
    """Ranks 4 to 7 of eight, seen by rank 4."""
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=8)
    try:
        yield dist.new_group([4, 5, 6, 7])
    finally:
        dist.destroy_process_group()


@pytest.fixture
def peers() -> Recording:
    """Ranks that run beside this one."""
    found = Recording()
    exchange_with(found)
    return found


def test_messages_between_ranks(group: Any, peers: Recording) -> None:
    """Ranks are global; what is received is there at once on the host."""
    sent, received = torch.tensor([1, 2]), torch.tensor([0, 0], dtype=torch.int32)
    exchange_on_host(c10d.send.default, ([sent], group.boxed(), 2, 0))
    exchange_on_host(c10d.recv_.default, ([received], group.boxed(), 3, 0))
    assert peers.asked == [("send", 6, [1, 2]), ("receive", 7, torch.int32)]
    assert received.tolist() == [70, 71]


def test_broadcasts(group: Any, peers: Recording) -> None:
    """From another rank its values come, from the own one nothing."""
    values = torch.tensor([8, 9])
    exchange_on_host(c10d.broadcast_.default, ([values], group.boxed(), 1, 0, True, -1))
    assert values.tolist() == [50, 51]
    peers.owns = True
    exchange_on_host(c10d.broadcast_.default, ([values], group.boxed(), 0, 0, True, -1))
    assert values.tolist() == [50, 51]
    assert peers.asked == [("broadcast", 5, [8, 9]), ("broadcast", 4, [50, 51])]


def test_large_tensors_are_no_messages(group: Any, peers: Recording) -> None:
    """Their rank is only needed; at a barrier all of the group meet."""
    large = torch.zeros(1, dtype=torch.int64).expand(MOST_KNOWN + 1)
    exchange_on_host(c10d.send.default, ([large], group.boxed(), 1, 0))
    exchange_on_host(c10d.recv_.default, ([large], group.boxed(), 1, 0))
    exchange_on_host(c10d.barrier.default, (large, group.boxed(), [0]))
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    assert peers.asked == [("needs", 5), ("needs", 5), ("barrier", ranks)]


def test_functional_collectives_of_equal_ranks(group: Any) -> None:
    """All four hold the same: a sum is four times as much, a maximum the same, a gather four copies; a broadcast, and waiting,
    change nothing; what is scattered is not known.
    """
    values, name = torch.tensor([3, 5]), group.group_name
    total = functional_collective(functional.all_reduce.default, (values, "SUM", name), values)
    highest = functional_collective(functional.all_reduce.default, (values, "max", name), values)
    assert total.tolist() == [12, 20]
    assert highest.tolist() == [3, 5] and highest is not values
    whole = torch.empty(8, dtype=torch.int64)
    gathered = functional_collective(functional.all_gather_into_tensor.default, (values, 4, name), whole)
    assert gathered.tolist() == [3, 5] * 4
    assert functional_collective(functional.wait_tensor.default, (values,), values) is values
    assert functional_collective(functional.broadcast.default, (values, 0, name), values) is values
    assert functional_collective(functional.wait_tensor.default, (values,), whole) is None
    scattered = (values, "sum", 2, name)
    assert functional_collective(functional.reduce_scatter_tensor.default, scattered, values[:1]) is None
    exchanged = (values, [1, 1], [1, 1], name)
    same = functional_collective(functional.all_to_all_single.default, exchanged, values)
    assert same.tolist() == [3, 5]


def fake(values: list[int] | None, count: int = 2) -> FakeTensor:
    """A tensor of the device, of which these values are known."""
    with FakeTensorMode():
        tensor = torch.empty(count, dtype=torch.int64)
    assert isinstance(tensor, FakeTensor)
    if values is not None:
        overwrite(tensor, torch.tensor(values))
    return tensor


def test_gathered_lists_of_equal_ranks(group: Any) -> None:
    """Each rank's tensor has this rank's values, each copy of its own; what is not known here is known nowhere."""
    own, gathered = fake([3, 5]), [fake(None) for _ in range(4)]
    collective_in_place(c10d.allgather_.default, ([gathered], [own], group.boxed()))
    overwrite(own, torch.tensor([0, 0]))
    overwrite(gathered[0], torch.tensor([7, 7]))
    found = [shadow(tensor) for tensor in gathered]
    assert [None if values is None else values.tolist() for values in found] == [[7, 7], [3, 5], [3, 5], [3, 5]]
    collective_in_place(c10d.allgather_.default, ([gathered], [fake(None)], group.boxed()))
    assert [shadow(tensor) for tensor in gathered] == [None] * 4


def test_an_exchange_keeps_no_hold_of_what_was_sent(group: Any) -> None:
    """What an all-to-all brought stays when the sender's tensor changes."""
    sent, received = fake([3, 5, 7, 9], 4), fake(None, 4)
    collective_in_place(c10d.alltoall_base_.default, (received, sent, group.boxed(), [], []))
    overwrite(sent, torch.tensor([0, 0, 0, 0]))
    found = shadow(received)
    assert found is not None and found.tolist() == [3, 5, 7, 9]

"""Process groups of one process that stands for the first rank of many: collectives copy what this rank has.

PyTorch's own backend ``fake`` leaves the results of most collectives as they lay in memory, and numbers that are none make
products draw less power. These groups do what a rank whose peers have the same data would see: an all-gather repeats the
rank's part, a reduce-scatter keeps its own part, an all-to-all gives back what was sent. So one GPU trains one rank of a
large job, with all that it computes and all the memory that it takes, and nothing that it would wait for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

BACKEND = "alone"


_ProcessGroup: Any = dist.ProcessGroup  # its overloads differ by release


class _Alone(_ProcessGroup):
    """Methods under the names of PyTorch 2.11 and of 2.13."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._ranks = rank, world_size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """PyTorch's own class knows only names of groups that have backends."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    pg_name = group_name

    def size(self) -> int:
        return self._ranks[1]

    def rank(self) -> int:
        return self._ranks[0]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    allreduce_coalesced = broadcast = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        output.view(self.size(), -1).copy_(own.reshape(1, -1).expand(self.size(), -1))
        return _done(output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self.rank()])
        return _done(outputs)

    reduce_scatter = scatter

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        output.view(-1).copy_(whole.reshape(self.size(), -1)[self.rank()])
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done(outputs)

    def all_to_all_single(
        self, output: torch.Tensor, sent: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        if output.numel() != sent.numel():
            raise ValueError(f"an all-to-all that sends {sent.numel()} numbers and receives {output.numel()}")
        output.view(-1).copy_(sent.reshape(-1))
        return _done(output)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for output, sent in zip(outputs, inputs, strict=True):
            output.copy_(sent)
        return _done(outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


def initialise(world_size: int) -> None:
    """Make this process rank 0 of `world_size`, eight to a node, in groups of this kind."""
    from torch.testing._internal.distributed import fake_pg

    local = min(world_size, 8)
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    os.environ.update(ranks, WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local))
    dist.Backend.register_backend(BACKEND, lambda _, rank, size, __: _Alone(rank, size), devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=fake_pg.FakeStore())

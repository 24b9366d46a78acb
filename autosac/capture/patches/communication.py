"""torch.distributed on a process group without peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from autosac.capture.patches.registry import Patched, patch

_COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_")
_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library


@patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    distributed=True,
)
def sharding_propagation(capture: Patched) -> None:
    """DTensor infers global output shapes by running operators on fake tensors under the active fake mode, ours.

    They are no work of the device (120 GiB of phantom tensors on Llama-3 8B).
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, op_schema: Any) -> Any:
        with capture.mode.unrecorded():
            return original(self, op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate


@patch(
    "torch.distributed:ProcessGroup.send",
    "torch.distributed:ProcessGroup.recv",
    "torch.distributed:ProcessGroup.allreduce",
    "torch.distributed:ProcessGroup.broadcast",
    "torch.distributed:ProcessGroup._allgather_base",
    "torch.distributed:ProcessGroup._reduce_scatter_base",
    "torch.distributed:ProcessGroup.alltoall_base",
    "torch.distributed:ProcessGroup.barrier",
    "torch._C._distributed_c10d:FakeWork.wait",
    "torch.distributed.distributed_c10d:batch_isend_irecv",
    distributed=True,
)
def work_wait(capture: Patched) -> None:
    """Work.wait() and the grouping of batched transfers are invisible to the dispatcher: link a Work to its collective."""
    works: dict[int, tuple[Any, int]] = {}  # holds the Work, so that its id stays its own

    def link(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = capture.recorder.last_work
            work = method(self, *args, **kwargs)
            if work is not None and (capture.recorder.last_work > before or capture.recorder.in_batch):
                works[id(work)] = (work, capture.recorder.last_work)
            return work

        return call

    for name in (
        "send",
        "recv",
        "allreduce",
        "broadcast",
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "alltoall_base",
        "alltoall",
        "allgather",
        "reduce_scatter",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        "allreduce_coalesced",
        "barrier",
    ):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, link(getattr(dist.ProcessGroup, name)))
    fake_work: Any = torch._C._distributed_c10d.FakeWork
    original_wait = fake_work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = works.pop(id(self), None)
        if known is not None:
            capture.recorder.work_wait(known[1])
        return original_wait(self, *args, **kwargs)

    fake_work.wait = wait
    original_batch = distributed_c10d.batch_isend_irecv

    def batch_isend_irecv(operations: Any) -> Any:
        capture.recorder.begin_batch()
        try:
            return original_batch(operations)
        finally:
            capture.recorder.end_batch()

    modules: tuple[Any, ...] = (distributed_c10d, dist)
    for module in modules:
        module.batch_isend_irecv = batch_isend_irecv


@patch("torch._C._distributed_c10d:FakeWork.boxed", distributed=True)
def coalesced_collectives(_: Patched) -> None:
    """The collectives of several tensors at once (a distributed optimizer's) have no kernels for fake tensors."""
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for name in _COALESCED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_: torch._C._distributed_c10d.FakeWork().boxed(), "Meta")


@patch(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "torch.nn.parallel.distributed:DistributedDataParallel.register_comm_hook",
    distributed=True,
)
def ddp(capture: Patched) -> None:
    """DDP compares parameter shapes by reading data in C++, and its reducer wants tensors in the all-reduce's future.

    The fake process group's future is empty: a communication hook in Python issues the same collective.
    """
    import torch.nn.parallel.distributed as ddp

    module: Any = ddp
    module._verify_param_shape_across_processes = lambda *_, **__: None
    wrapper: Any = ddp.DistributedDataParallel
    original = wrapper.__init__

    def hook(group, bucket):  # type: ignore[no-untyped-def] # DDP checks the annotations of its hooks
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, group=group, async_op=True)
        # At the backward's end, before the reducer's own callback copies the results into the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        capture.recorder.uses_ddp = True
        self.register_comm_hook(self.process_group, hook)
        self.logger = _Logger(self.logger)

    wrapper.__init__ = init


class _Logger:
    """DDP's logger without its statistics: it would take the times of CUDA events in C++."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

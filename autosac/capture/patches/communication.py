"""torch.distributed on a process group without peers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from autosac.capture.device.exchanged import added_up
from autosac.capture.patches.futures import Future
from autosac.capture.patches.registry import Patched, patch

_COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_")
_ISSUING = (  # methods of ProcessGroup that return a Work
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
)
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
    "torch.distributed:ProcessGroup.allreduce_coalesced",
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
    """Work.wait() and the grouping of batched transfers are invisible to the dispatcher: link a Work to its collective.

    The future of a Work without peers would be empty: it holds what the collective has written to.
    """
    works: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()

    def link(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = capture.recorder.last_work
            work = method(self, *args, **kwargs)
            if work is not None and (capture.recorder.last_work > before or capture.recorder.in_batch):
                works[work] = capture.recorder.last_work, args[0] if args else []
            return work

        return call

    def adding(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            work = method(self, tensors, *args, **kwargs)
            options = args[0] if args else kwargs.get("opts")
            operation = getattr(options, "reduceOp", options)
            added_up(
                [tensors] if isinstance(tensors, torch.Tensor) else tensors, operation or dist.ReduceOp.SUM, self.size()
            )
            return work

        return call

    for name in ("allreduce", "allreduce_coalesced"):
        setattr(dist.ProcessGroup, name, adding(getattr(dist.ProcessGroup, name)))
    for name in _ISSUING:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, link(getattr(dist.ProcessGroup, name)))
    fake_work: Any = torch._C._distributed_c10d.FakeWork
    original_wait = fake_work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = works.pop(self, None)
        if known is not None:
            capture.recorder.work_wait(known[0])
        return original_wait(self, *args, **kwargs)

    def get_future(self: Any) -> Future:
        number, tensors = works.get(self, (None, []))
        value = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        return Future(value, lambda: None if number is None else capture.recorder.work_wait(number))

    fake_work.wait, fake_work.get_future = wait, get_future
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

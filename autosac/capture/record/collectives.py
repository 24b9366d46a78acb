"""Which operators are collectives, over which group, and how many bytes they move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autosac.capture.device.operators import per_operator
from autosac.trace import ALONE, IN_TURN

_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "wait_tensor": "wait",
}
_C10D = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "reduce_": "all_reduce",
    "scatter_": "broadcast",
    "gather_": "all_gather",
}


class CollectiveCall(NamedTuple):
    """One collective as its arguments describe it."""

    kind: str
    group_name: str
    ranks: tuple[int, ...]
    asynchronous: bool
    peer: int
    functional: bool
    alone: int = ALONE

    def nbytes(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        """The message size as nccl-tests counts it (see autosac.trace.Collective)."""
        sizes = [_bytes(t) for t in inputs]
        if self.functional:
            return sum(map(_bytes, outputs)) if self.kind == "all_gather" else sum(sizes)
        if self.kind in ("all_gather", "reduce_scatter"):
            # c10d passes (outputs, inputs); the gathered side is the larger one.
            return max(sum(sizes) - min(sizes, default=0), max(sizes, default=0)) if len(sizes) > 2 else max(sizes)
        if self.kind == "all_to_all":
            return sum(sizes) // 2
        return sum(sizes)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@per_operator
def _kind(func: Any) -> tuple[str, bool] | None:
    """(kind, functional) of an operator, or None."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    namespace, _, name = schema.name.partition("::")
    if namespace == "c10d" and name in _C10D:
        return _C10D[name], False
    if namespace in ("_c10d_functional", "_c10d_functional_autograd") and name in _FUNCTIONAL:
        return _FUNCTIONAL[name], True
    return None


@cache
def _argument(func: Any, name: str) -> int:
    names = [a.name for a in func._schema.arguments]
    return names.index(name) if name in names else -1


def describe_collective(func: Any, args: Any) -> CollectiveCall | None:
    """The collective that a call of `func` is, or None."""
    known = _kind(func)
    if known is None:
        return None
    kind, functional = known
    if kind == "wait":
        return CollectiveCall("wait", "", (), False, -1, True)
    if functional:
        c10d: Any = dist.distributed_c10d
        group = c10d._resolve_process_group(args[_argument(func, "group_name")])
        return CollectiveCall(kind, group.group_name, _ranks(group), True, -1, True)
    group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
    ranks = _ranks(group)
    position = _argument(func, "async_op")
    asynchronous = bool(args[position]) if 0 <= position < len(args) else True
    peer = -1
    for name in ("dst", "src"):
        position = _argument(func, name)
        if kind in ("send", "recv") and position >= 0:
            peer = ranks[args[position]]
    alone = IN_TURN if peer >= 0 and group.group_name in _connected else ALONE
    return CollectiveCall(kind, group.group_name, ranks, asynchronous, peer, False, alone)


_connected: set[str] = set()  # names of groups


def connected_at_once(group_name: str) -> None:
    """The group has its communicator from the start, and makes no others for pairs of its ranks."""
    _connected.add(group_name)


def is_connected(group_name: str) -> bool:
    """Whether it has."""
    return group_name in _connected


_rank_cache: dict[str, tuple[int, ...]] = {}


def _ranks(group: Any) -> tuple[int, ...]:
    known = _rank_cache.get(group.group_name)
    if known is None:
        known = _rank_cache[group.group_name] = tuple(dist.get_process_group_ranks(group))
    return known

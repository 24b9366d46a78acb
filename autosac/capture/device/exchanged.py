"""Shadow values that collectives bring: ranks are symmetric, but for counts of routed tokens and for ranks that run beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device import typical
from autosac.capture.device.shadows import MOST_KNOWN, Later, arrived, forget, overwrite, shadow
from autosac.capture.moe_load import Routing


class Peers(Protocol):
    """Other ranks that run beside this one. Ranks are global; `known` is None for unknown values."""

    def send(self, group: str, peer: int, known: torch.Tensor | None) -> None:
        """A small integer tensor goes to `peer`."""

    def receive(self, group: str, peer: int, dtype: torch.dtype) -> Later:
        """A small integer tensor comes from `peer`."""

    def needs(self, peer: int) -> None:
        """Another tensor goes to `peer`, or comes from it."""

    def broadcast(self, group: str, root: int, known: torch.Tensor | None, dtype: torch.dtype) -> Later | None:
        """A small integer tensor goes from `root` to all of the group. None if this rank's own values are taken."""

    def barrier(self, group: str, ranks: Sequence[int]) -> None:
        """All of the group meet."""


routing_in_use: list[Routing] = []  # one at most
_peers: list[Peers] = []  # one at most


def exchange_with(peers: Peers) -> None:
    """Small integer tensors are sent to other ranks, and received from them, from now on."""
    _peers[:] = [peers]


def added_up(tensors: Iterable[torch.Tensor], operation: Any, size: int) -> None:
    """An all-reduce of so many ranks has changed these in place. Maxima and means of equal numbers are these numbers."""
    if operation != torch.distributed.ReduceOp.SUM:
        return
    for tensor in tensors:
        known = shadow(tensor) if isinstance(tensor, FakeTensor) else tensor
        if known is None and isinstance(tensor, FakeTensor):
            typical.scale(tensor, size)
        elif known is not None and known.dtype is not torch.bool:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                known.mul_(size)


def exchanged(values: torch.Tensor, group: Any) -> torch.Tensor:
    """What an all-to-all of equal parts brings."""
    for routing in routing_in_use:
        if values.dim() == 1 and values.numel() % group.size() == 0:
            received = routing.exchanged(values.long().numpy(), torch.distributed.get_process_group_ranks(group))
            return torch.from_numpy(received).to(values.dtype)
    return values


def collective_in_place(func: Any, args: Any) -> None:
    """c10d's operators under symmetric ranks."""
    name = func._schema.name.split("::")[1]
    if name == "barrier":
        meet(torch.distributed.ProcessGroup.unbox(args[1]))
        return
    target = args[0]
    if name in ("send", "recv_", "broadcast_"):
        for peers in _peers:
            _exchange(peers, name, args)
            return
    if name in ("alltoall_base_", "_allgather_base_") and isinstance(target, FakeTensor):
        values = shadow(args[1])
        if values is not None and name == "alltoall_base_" and values.shape == target.shape:
            overwrite(target, exchanged(values, torch.distributed.ProcessGroup.unbox(args[2])))
        elif values is not None and values.numel() and target.numel() % values.numel() == 0:
            overwrite(target, values.reshape(-1).repeat(target.numel() // values.numel()).view(target.shape))
        else:
            forget(target)
    elif name == "allgather_":
        for outputs, tensor in zip(args[0], args[1], strict=True):
            _copies(tensor, outputs)
    elif name in ("recv_", "_reduce_scatter_base_"):
        for leaf in pytree.tree_leaves(args):
            if isinstance(leaf, FakeTensor):
                forget(leaf)


def _copies(tensor: torch.Tensor, outputs: Iterable[torch.Tensor]) -> None:
    """Every rank's tensor is the same as this one's."""
    values = shadow(tensor) if isinstance(tensor, FakeTensor) else tensor
    for output in outputs:
        if not isinstance(output, FakeTensor):
            continue
        if values is not None and values.shape == output.shape:
            overwrite(output, values)
        else:
            forget(output)


def meet(group: Any) -> None:
    """The ranks of a group wait for each other."""
    for peers in _peers:
        peers.barrier(group.group_name, torch.distributed.get_process_group_ranks(group))


def _exchange(peers: Peers, name: str, args: Any) -> None:
    """``send(tensors, group, rank, ...)``, ``recv_`` and ``broadcast_``: the rank is that within the group."""
    process_group = torch.distributed.ProcessGroup.unbox(args[1])
    group = process_group.group_name
    peer = torch.distributed.get_process_group_ranks(process_group)[args[2]]
    for tensor in args[0]:
        is_real = not isinstance(tensor, FakeTensor)
        is_message = (is_real or not tensor.dtype.is_floating_point) and tensor.numel() <= MOST_KNOWN
        known = tensor if is_real else shadow(tensor)
        if name == "broadcast_":
            found = peers.broadcast(group, peer, known, tensor.dtype) if is_message else None
            if found is not None:
                _expect(tensor, found)
            elif not is_message and peer != torch.distributed.get_rank() and _is_empty(known):
                forget(tensor)
        elif not is_message:
            peers.needs(peer)
            if name == "recv_":
                forget(tensor)
        elif name == "send":
            peers.send(group, peer, known)
        else:
            _expect(tensor, peers.receive(group, peer, tensor.dtype))


def _is_empty(known: torch.Tensor | None) -> bool:
    """Whether values are zeros, as of a tensor that only waits for another rank's (a loss that the last stage computes)."""
    if known is None or known.is_meta:
        return False
    with torch._C._DisableTorchDispatch():
        return not bool(known.count_nonzero())


def _expect(tensor: Any, later: Later) -> None:
    """The tensor's values come from another rank, as soon as somebody reads them."""
    if not isinstance(tensor, FakeTensor):
        found = arrived(later, tensor)
        if found is not None:
            tensor.copy_(found)
        return
    forget(tensor)
    vars(tensor)["_shadow"] = later


def exchange_on_host(func: Any, args: Any) -> None:
    """A c10d operator on real tensors."""
    name = func._schema.name.split("::")[1]
    if name == "barrier":
        meet(torch.distributed.ProcessGroup.unbox(args[1]))
    if name in ("send", "recv_", "broadcast_"):
        for peers in _peers:
            _exchange(peers, name, args)


def functional_collective(func: Any, args: Any, out: Any) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    name = func._schema.name.split("::")[1]
    if name == "all_to_all_single" and args[0].shape == out.shape:
        return exchanged(args[0], c10d._resolve_process_group(args[3]))
    if name in ("wait_tensor", "broadcast", "broadcast_"):
        return args[0] if args[0].shape == out.shape else None
    if name in ("all_reduce", "all_reduce_"):
        return args[0] * c10d._resolve_process_group(args[2]).size() if args[1].lower() == "sum" else args[0].clone()
    if name == "all_gather_into_tensor":
        return torch.cat([args[0]] * args[1])
    return None

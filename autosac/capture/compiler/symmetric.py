"""Micro-pipelined tensor parallelism: products that are fused with the collective before or after them.

Inductor's pass puts operators of ``torch.ops.symm_mem`` into a graph. PyTorch's own implementations run here, and so do their
products and sums. What differs is how a chunk gets from one GPU to another: they copy it over NVLink from symmetric memory,
on two streams in turn; here it is a part of an asynchronous all-gather of the same size on the group's stream, while the
product of the chunk before runs. Two products never run at a time, which they hardly do on a GPU that one of them fills.

The workspaces in symmetric memory are allocated once and stay, as PyTorch's do.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.device.device import device_type

_workspaces: dict[str, torch.Tensor] = {}


def _symmetric_memory() -> Any:
    """PyTorch's module, which is there where torch.distributed is."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def _group(name: str) -> Any:
    groups: Any = dist.distributed_c10d
    return groups._resolve_process_group(name)


def into(packet: Any) -> Callable[..., Any]:
    """The operator with a buffer for its result: recorded as the operator, which returns this buffer."""

    def call(*args: Any, out: Any, **kwargs: Any) -> Any:
        assert isinstance(out, FakeTensor)
        mode: Any = out.fake_mode
        mode.log.operator(packet.default, args, kwargs, out, None, None)
        return out

    return call


def _workspace(group_name: str, nbytes: int) -> torch.Tensor:
    """The group's, made larger if it is too small."""
    known = _workspaces.get(group_name)
    if known is None or known.numel() < nbytes:
        known = _workspaces[group_name] = torch.empty(nbytes, dtype=torch.uint8, device=device_type())
    return known


def _transfer(chunk: torch.Tensor, group: Any) -> Any:
    """A chunk comes from another rank: the work to wait for."""
    count = chunk.numel() // group.size()
    flat = torch.empty_like(chunk.flatten()[: count * group.size()]) if not chunk.is_contiguous() else chunk.view(-1)
    return dist.all_gather_into_tensor(flat[: count * group.size()], flat[:count], group=group, async_op=True)


def _gather_and_consume(
    shard: list[torch.Tensor],
    consume: Callable[[list[torch.Tensor], int], None],
    gathered: list[torch.Tensor],
    group_name: str,
    gathered_needed: bool = True,
) -> None:
    """For ``_pipelined_multi_all_gather_and_consume``: each chunk is consumed while the next ones come."""
    group = _group(group_name)
    size, rank = group.size(), group.rank()
    workspace = _workspace(group_name, sum(x.nbytes for x in shard))
    for x in shard:
        workspace[: x.nbytes].copy_(x.view(torch.uint8).view(-1))
    chunks = [list(parts) for parts in zip(*(x.chunk(size) for x in gathered), strict=True)]
    remote = [(rank + step) % size for step in range(1, size)]
    works = {source: [_transfer(x, group) for x in chunks[source]] for source in remote}
    consume(shard, rank)
    for source in remote:
        for work in works[source]:
            work.wait()
        consume(chunks[source], source)
    if gathered_needed:
        for own, x in zip(chunks[rank], shard, strict=True):
            own.copy_(x)


def _produce_and_exchange(
    produce: Callable[[int, torch.Tensor], None], output: torch.Tensor, group_name: str, out_chunk_dim: int = 0
) -> None:
    """For ``_pipelined_produce_and_all2all``: each chunk leaves while the next one is produced, from two buffers in turn."""
    group = _group(group_name)
    size, rank = group.size(), group.rank()
    chunks = output.chunk(size, dim=out_chunk_dim)
    nbytes = math.prod(chunks[0].shape) * output.element_size()
    workspace = _workspace(group_name, 2 * nbytes)
    works: list[Any] = []
    for step in range(1, size):
        if step > 2:
            works[step - 3].wait()
        start = nbytes * (step % 2)
        produce((rank + step) % size, workspace[start : start + nbytes].view(output.dtype).view(chunks[0].shape))
        works.append(_transfer(chunks[(rank - step) % size], group))
    produce(rank, chunks[rank])
    for work in works[-2:]:
        work.wait()


def _all_gather_matmul(
    shard: Any, factors: Any, gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Any, list[Any]]:
    symmetric = _symmetric_memory()
    dtypes = [factor.dtype for factor in factors]
    product = into(torch.ops.aten.mm)
    each: list[dict[str, Any]] = [{} for _ in factors]
    results: tuple[Any, list[Any]] = symmetric._fused_all_gather_matmul_impl(
        product, shard, factors, None, each, dtypes, gather_dim, group_name, return_A
    )
    return results


def _all_gather_scaled_matmul(
    shard: Any,
    factors: Any,
    scale: Any,
    scales: Any,
    gather_dim: int,
    group_name: str,
    biases: Any,
    result_scales: Any,
    out_dtypes: Any,
    use_fast_accum: Any,
) -> tuple[Any, list[Any]]:
    symmetric = _symmetric_memory()
    dtypes = symmetric._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    names = ("scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
    values = zip(scales, biases, result_scales, dtypes, use_fast_accum, strict=True)
    each = [dict(zip(names, value, strict=True)) for value in values]
    product = into(torch.ops.aten._scaled_mm)
    results: tuple[Any, list[Any]] = symmetric._fused_all_gather_matmul_impl(
        product, shard, factors, scale, each, dtypes, gather_dim, group_name, True
    )
    return results


def _matmul_reduce_scatter(a: Any, b: Any, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
    symmetric = _symmetric_memory()
    return symmetric._fused_matmul_reduce_scatter_impl(
        mm_out_op=into(torch.ops.aten.mm),
        A=a,
        B=b,
        kwargs={},
        out_dtype=a.dtype,
        reduce_op=reduce_op,
        scatter_dim=scatter_dim,
        group_name=group_name,
    )


def _scaled_matmul_reduce_scatter(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Any,
    bias: Any = None,
    result_scale: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    symmetric = _symmetric_memory()
    return symmetric._fused_scaled_matmul_reduce_scatter_impl(
        mm_out_op=into(torch.ops.aten._scaled_mm),
        A=a,
        B=b,
        A_scale=a_scale,
        kwargs={
            "scale_b": b_scale,
            "bias": bias,
            "scale_result": result_scale,
            "out_dtype": out_dtype,
            "use_fast_accum": use_fast_accum,
        },
        out_dtype=out_dtype,
        reduce_op=reduce_op,
        orig_scatter_dim=orig_scatter_dim,
        scatter_dim_after_maybe_reshape=scatter_dim_after_maybe_reshape,
        group_name=group_name,
        output_shape=output_shape,
    )


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor in a block of the allocator, all of which begin at multiples of 512 bytes.

    Scales by rows are cloned where a rank's part does not begin at a multiple of 16.
    """
    return int(tensor.storage_offset()) * tensor.element_size()


def _pipelined(operator: Callable[..., Any]) -> SimpleNamespace:
    def call(*args: Any, **kwargs: Any) -> Any:
        with (
            mock.patch.object(torch.Tensor, "data_ptr", _address),
            mock.patch.multiple(
                "torch.distributed._symmetric_memory",
                _pipelined_multi_all_gather_and_consume=_gather_and_consume,
                _pipelined_produce_and_all2all=_produce_and_exchange,
            ),
        ):
            return operator(*args, **kwargs)

    return SimpleNamespace(default=call)


OPERATORS = SimpleNamespace(
    fused_all_gather_matmul=_pipelined(_all_gather_matmul),
    fused_all_gather_scaled_matmul=_pipelined(_all_gather_scaled_matmul),
    fused_matmul_reduce_scatter=_pipelined(_matmul_reduce_scatter),
    fused_scaled_matmul_reduce_scatter=_pipelined(_scaled_matmul_reduce_scatter),
)
"""What generated modules call in the place of ``torch.ops.symm_mem``."""

"""What Inductor would make one kernel of: the elementwise operators and reductions between the large ones of a compiled graph.

`fuse` finds the maximal convex and connected sets of operators that Inductor generates code for (elementwise, reductions,
views, casts, fills, concatenations) and leaves the others (matrix products, attention, convolutions, collectives, complex
numbers) as they are. When the graph runs, each set is one kernel: it reads what comes from outside and writes what goes
outside; what is made and used inside takes no memory.

Inductor's scheduler is not reproduced: it would make two kernels of a set whose reductions run over different dimensions,
and read its inputs again in the second.
"""

from __future__ import annotations

import itertools
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

_PREFIX = "generated_"
_REDUCTIONS = frozenset(
    ("sum", "mean", "max", "min", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
)
_GENERATED = frozenset(
    (
        *("convert_element_type", "_to_copy", "clone", "full", "full_like", "zeros_like", "ones_like", "scalar_tensor"),
        *("arange", "iota", "constant_pad_nd", "cat", "embedding", "gather", "index_select", "slice_scatter"),
        *("select_scatter", "fill"),
    )
)


def _name(node: Any) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _tensors(node: Any) -> list[torch.Tensor]:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in values)
    return [v for v in flat if isinstance(v, torch.Tensor)]


class _Generated(OperatorSupportBase):
    """Does Inductor generate code for the node?"""

    def is_node_supported(self, submodules: Any, node: Any) -> bool:
        operator = node.target
        if operator is getitem:
            return self.is_node_supported(submodules, node.args[0])
        if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
            return False
        if operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:
            return False
        if any(t.is_complex() for t in _tensors(node)):
            return False
        if operator.is_view or torch.Tag.pointwise in operator.tags:
            return True
        return _name(node) in _REDUCTIONS | _GENERATED


class _Kernel(torch.nn.Module):
    """One generated kernel. A module for the graph's sake only: no module's hooks shall see it, or what is inside."""

    def __init__(self, inside: torch.nn.Module, name: str) -> None:
        super().__init__()
        self._inside = inside.forward
        self._name = name

    def __call__(self, *inputs: Any) -> Any:
        """Run what is inside, as one launch that writes buffers made before."""
        fakes = [x for x in inputs if isinstance(x, FakeTensor)]
        if not fakes:
            return self._inside(*inputs)
        mode: Any = fakes[0].fake_mode
        with mode.unrecorded():
            results = self._inside(*inputs)
        many = isinstance(results, (tuple, list))
        outside = {id(x.untyped_storage()) for x in fakes}
        buffers: dict[int, torch.Tensor] = {}
        written = [_written(x, outside, buffers) for x in (results if many else (results,))]
        mode.log.triton_kernel(self._name, [*fakes, *buffers.values()])
        return tuple(written) if many else written[0]


def _written(result: Any, outside: set[int], buffers: dict[int, torch.Tensor]) -> Any:
    """The result in a buffer of its own (views of one buffer share it); views of inputs stay what they are."""
    if not isinstance(result, FakeTensor) or id(result.untyped_storage()) in outside:
        return result
    storage = result.untyped_storage()
    buffer = buffers.get(id(storage))
    if buffer is None:
        if result.storage_offset() == 0 and result.nbytes == storage.nbytes():
            shape, stride = result.shape, result.stride()
            buffers[id(storage)] = buffer = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
            return buffer
        length = storage.nbytes() // result.itemsize
        buffers[id(storage)] = buffer = torch.empty(length, dtype=result.dtype, device=result.device)
    if buffer.dtype != result.dtype:
        buffer = buffer.view(result.dtype)
    return buffer.as_strided(result.shape, result.stride(), result.storage_offset())


def fuse(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with its kernels. See the module's docstring."""
    partitioner = CapabilityBasedPartitioner(graph, _Generated(), allows_single_node_partition=True)
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    sets: list[dict[Any, int | None]] = []
    for partition in partitioner.propose_partitions():
        sets += _kernels(sorted(partition.nodes, key=order.__getitem__))
    fused = fuse_by_partitions(graph, sets, prefix=_PREFIX)
    for node in fused.graph.nodes:
        if node.op == "call_module" and node.target.startswith(_PREFIX):
            inside = getattr(fused, node.target)
            reduces = any(_name(inner) in _REDUCTIONS for inner in inside.graph.nodes)
            setattr(fused, node.target, _Kernel(inside, "triton_red_fused" if reduces else "triton_poi_fused"))
    return fused


def _kernels(nodes: list[Any]) -> list[dict[Any, int | None]]:
    """The kernels of a partition (its nodes in the graph's order): connected, without views of what comes from outside."""
    inside = dict.fromkeys(nodes)
    for node in nodes:
        if _is_view(node) and not any(n in inside for n in node.all_input_nodes):
            del inside[node]
    kernels: list[dict[Any, int | None]] = []
    while inside:
        kernel: dict[Any, int | None] = {}
        reached = [next(iter(inside))]
        while reached:
            node = reached.pop()
            if node in inside:
                del inside[node]
                kernel[node] = None
                reached += [*node.all_input_nodes, *node.users]
        if not all(map(_is_view, kernel)):
            kernels.append(kernel)
    return kernels


def _is_view(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view

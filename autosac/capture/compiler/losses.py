"""What a compiled graph's single numbers are like (`device.typical`): a loss that it computes looks as outside of a graph.

Inductor's code has no operators that could say so. So the operators that lead to a graph's single floating-point results are
kept from before it fuses them, back to what nothing follows from (products with weights), and gone through with each run of
the graph. They are asked on the tensors that the compiler traced, which are never computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from autosac.capture.device.elements import has_begun, mark, take
from autosac.capture.device.typical import counted, estimated, has_rule

_MOST = 256  # operators: a loss has a few dozen
_CAST = torch.ops.prims.convert_element_type.default


class Losses:
    """The single numbers among a graph's results."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        """Of a graph of ATen operators whose nodes know their values (``meta["val"]``)."""
        returned = _returned(graph)
        self._places = [i for i, node in enumerate(returned) if _is_single(node)]
        nodes = _leading_to([returned[i] for i in self._places])
        self._results = [returned[i].meta["val"] for i in self._places]
        self._operators = [_call(node) for node in nodes]

    def tell(self, results: Sequence[Any]) -> None:
        """Give the graph's results, of a run, their typical elements."""
        if not self._places or not has_begun():
            return
        for function, args, kwargs, out in self._operators:
            value = estimated(function, args, kwargs, out)
            if value is None and function.overloadpacket is torch.ops.aten.sum:
                value = counted(args[0], out)
            take(out[0] if isinstance(out, (tuple, list)) else out, value)
        for place, traced in zip(self._places, self._results, strict=True):
            take(results[place], mark(traced))


def _returned(graph: torch.fx.GraphModule) -> list[Any]:
    output = next(iter(graph.graph.find_nodes(op="output")))
    found = output.args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _is_single(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) and node.op == "call_function" else None
    return isinstance(value, FakeTensor) and value.dtype.is_floating_point and value.numel() == 1


def _leading_to(ends: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """The operators before these, in order; none if there are too many."""
    found: dict[torch.fx.Node, None] = {}
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in found or not _is_asked(node):
            continue
        found[node] = None
        waiting += node.all_input_nodes
        if len(found) > _MOST:
            return []
    return sorted(found)


def _is_asked(node: torch.fx.Node) -> bool:
    """Whether something may follow from it: an operator with a rule, of tensors whose sizes are known."""
    known = node.op == "call_function" and (node.target is _CAST or has_rule(node.target))
    return known and all(map(_has_known_sizes, [node, *node.all_input_nodes]))


def _has_known_sizes(node: torch.fx.Node) -> bool:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) and values else [values]
    return all(isinstance(x, torch.Tensor) and all(type(size) is int for size in x.shape) for x in tensors)


def _call(node: torch.fx.Node) -> tuple[Any, Any, Any, Any]:
    """The operator, its arguments and its result, as the compiler traced them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if node.target is _CAST:
        return torch.ops.aten._to_copy.default, args[:1], {"dtype": args[1]}, node.meta["val"]
    return node.target, args, kwargs, node.meta["val"]

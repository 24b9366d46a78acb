"""What a compiled graph's single numbers are like (`device.typical`): a loss that it computes looks as outside of a graph.

Inductor's code has no operators that could say so. So the operators that lead to a graph's single floating-point results are
kept from before it fuses them, back to what nothing follows from (products with weights), and gone through with each run of
the graph. They are asked on the tensors that the compiler traced, which are never computed. Those that stand for the graph's
inputs take what is known of these: labels, or how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from autosac.capture.device.elements import forget_typical, has_begun, mark, take
from autosac.capture.device.shadows import shadow
from autosac.capture.device.typical import counted, has_rule
from autosac.capture.device.values import propagate

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
        read = {node for operator in nodes for node in operator.all_input_nodes}
        given = list(graph.graph.find_nodes(op="placeholder"))
        self._inputs = [(i, node.meta["val"]) for i, node in enumerate(given) if node in read and _is_tensor(node)]

    def read(self, inputs: Sequence[Any]) -> None:
        """Take what is known of the graph's inputs, which a run of it lets go of."""
        if not self._places or not has_begun():
            return
        for i, traced in self._inputs:
            _forget(traced)
            vars(traced)["_shadow"] = shadow(inputs[i])
            take(traced, mark(inputs[i]))

    def tell(self, results: Sequence[Any]) -> None:
        """Give the graph's results, of the run whose inputs were read, their typical elements."""
        if not self._places or not has_begun():
            return
        for function, args, kwargs, out in self._operators:
            first = out[0] if isinstance(out, (tuple, list)) else out
            _forget(first)
            propagate(function, args, dict(kwargs), out)
            if function.overloadpacket is torch.ops.aten.sum and mark(first) is None and shadow(first) is None:
                take(first, counted(args[0], out))
        for place, traced in zip(self._places, self._results, strict=True):
            take(results[place], mark(traced))
        for _, traced in self._inputs:
            _forget(traced)


def _forget(traced: Any) -> None:
    """What an earlier run has left."""
    vars(traced).pop("_shadow", None)
    forget_typical(traced)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), FakeTensor)


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
    """Whether something may follow from it: an operator with a rule, or of whole numbers, of tensors whose sizes are known."""
    known = node.op == "call_function" and (node.target is _CAST or has_rule(node.target) or _is_of_whole_numbers(node))
    return known and all(map(_has_known_sizes, [node, *node.all_input_nodes]))


def _is_of_whole_numbers(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return isinstance(value, FakeTensor) and not value.dtype.is_floating_point and not drawn


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

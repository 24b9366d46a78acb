"""Derivative formulas of PyTorch that write into zeros in place, unless a tensor is one of a subclass.

FunctionsManual.cpp asks `areAnyTensorSubclassLike` for the sake of those who trace: a gradient of `x[index]` is then
`zeros.index_put(...)`, which copies the zeros first. Simulated tensors are such, but what they stand for are not. So here
the operator runs in place, as on the real device: one buffer and one copy fewer, of the size of the gradient. Tensors of a
subclass in the real job (DTensor, float8) keep the copy. What PyTorch 2.13 does was read off a profiled backward on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
_current_node = torch._C._current_autograd_node
_SELECTED = ("Kthvalue", "Max", "Median", "Min", "Mode", "Nanmedian", "Sort", "Topk")
# the operator -> the one that writes in place, and the beginnings of the nodes' names
_FORMULAS: dict[Any, tuple[Any, tuple[str, ...]]] = {
    aten.index_put.default: (aten.index_put_.default, ("IndexBackward",)),
    aten.scatter_add.default: (aten.scatter_add_.default, ("GatherBackward", "CummaxBackward", "CumminBackward")),
    aten.scatter.src: (aten.scatter_.src, tuple(f"{name}Backward" for name in _SELECTED)),
    aten.index_add.default: (aten.index_add_.default, ("IndexSelectBackward",)),
    aten.put.default: (aten.put_.default, ("TakeBackward",)),
    aten.masked_scatter.default: (aten.masked_scatter_.default, ("MaskedSelectBackward",)),
}


class Formulas:
    """Knows which call of a formula is a subclass's."""

    def __init__(self) -> None:
        self._of_subclass = -1

    def taken_apart(self, func: Any) -> None:
        """A subclass got this call; it will call the same operator for its parts."""
        if func in _FORMULAS and (node := _current_node()) is not None:
            self._of_subclass = node._sequence_nr()

    def in_place(self, func: Any) -> Any:
        """The operator that runs in the place of `func` now; None if `func` itself."""
        known = _FORMULAS.get(func)
        if known is None or torch.is_grad_enabled():
            return None
        node = _current_node()
        if node is None or not node.name().startswith(known[1]) or node._sequence_nr() == self._of_subclass:
            return None
        return known[0]

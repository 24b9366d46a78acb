"""A budget in bytes for what a compiled graph saves between forward and backward, in plain `torch.compile`.

PyTorch's ``activation_memory_budget`` is a ratio, of which nobody knows the bytes. What is saved need not rise with it: its
knapsack counts other tensors than the min-cut then saves. `BudgetPartitioner` takes its place, by Inductor's own hook
(``torch._inductor.config.custom_partitioner_fn``). It lets PyTorch partition the graph for each of `RATIOS`, counts what each
way really saves and what it computes again, and takes of those that fit the one that computes least:

    B(r) = bytes that the forward graph of ratio r returns for the backward, without what exists anyway
    C(r) = sum of PyTorch's estimates of the time of all operators that are in both graphs
    choose argmin C(r), then argmin B(r), over the r with B(r) <= budget

Ways that another one beats in both are left out first, so the saved bytes rise with the budget and the recomputation falls.
Where the compiler's own choice (the ratio 1) fits, it is taken, and no other is tried: a partition of a large graph takes
seconds. If no way fits, the one that saves least is taken, with a warning that says how much that is. What must not be
computed again is saved in each of them (`partitioner`).

torch 2.11 to 2.14.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import estimate_runtime, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import HigherOrderOperator

from autosac.integrations.partitioner import MARK, save_what_changes

_UNKNOWN = 1e15  # operations of a higher-order operator, as flex attention: it runs again only if nothing else fits
_KNOWN = vars(partitioners)
_hint: Any = _KNOWN.get("optimization_hint") or _KNOWN["size_hint"]  # before torch 2.13
RATIOS = (0.0, 0.05, *(k / 10 for k in range(1, 10)), 0.95, 1.0)


class Way(NamedTuple):
    """One partition of a graph."""

    saved_bytes: int
    recomputed: float
    graphs: tuple[torch.fx.GraphModule, torch.fx.GraphModule]


class BudgetPartitioner(CustomPartitionerFn):
    """Partitions each compiled graph so that it saves at most `budget_bytes`, if that can be. See the module's docstring."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        save_what_changes()

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """The forward and the backward graph."""
        ways: list[Way] = []
        for ratio in reversed(RATIOS):
            joint = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
            joint.meta.update(gm.meta)
            with functorch_config.patch(activation_memory_budget=ratio):
                graphs = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
            ways.append(Way(*_measured(*graphs, kwargs["num_fwd_outputs"]), graphs))
            if ways[0].saved_bytes <= self._budget_bytes:
                break
        return self.chosen(_undominated(ways)).graphs

    def chosen(self, ways: Sequence[Way]) -> Way:
        """Of undominated ways by ascending bytes, the last that fits; else the first, with a warning."""
        fitting = [way for way in ways if way.saved_bytes <= self._budget_bytes]
        if not fitting:
            warnings.warn(
                f"a compiled graph saves {ways[0].saved_bytes / 2**20:.1f} MiB at the least, "
                f"more than the budget of {self._budget_bytes / 2**20:.1f} MiB",
                stacklevel=2,
            )
        return fitting[-1] if fitting else ways[0]

    def uuid(self) -> Any:
        """For the compiler's caches."""
        return f"autosac budget {self._budget_bytes}: {MARK}"


def _undominated(ways: Sequence[Way]) -> list[Way]:
    """By ascending bytes and descending recomputation."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not found or way.recomputed < found[-1].recomputed:
            found.append(way)
    return found


def _measured(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> tuple[int, float]:
    """The bytes that are saved, and what is computed in both graphs."""
    (output,) = forward.graph.find_nodes(op="output")
    results = output.args[0]
    there = {_memory(node) for node in (*forward.graph.find_nodes(op="placeholder"), *results[:outputs])}
    saved = {_memory(node): node for node in results[outputs:]}
    nbytes = sum(_bytes(node) for memory, node in saved.items() if memory not in there)
    names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in names]
    return nbytes, sum(map(_flops, again))


def _flops(node: torch.fx.Node) -> float:
    """PyTorch's estimate for an operator; nothing for what only takes one of its results."""
    if isinstance(node.target, HigherOrderOperator):
        return _UNKNOWN
    return float(estimate_runtime(node)) if isinstance(node.target, torch._ops.OpOverload) else 0.0


def _memory(node: Any) -> object:
    """Equal for values that share memory, which are saved once."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _bytes(node: Any) -> int:
    """Of all memory that a value is a view of: it is held as a whole. Sizes that vary are those of the first call."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return _hint(value.untyped_storage().nbytes(), fallback=4096) if isinstance(value, torch.Tensor) else 0

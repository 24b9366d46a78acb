"""Memory budgets of PyTorch's partitioner leave random numbers alone.

Below a budget of 1, the min-cut partitioner computes any operator again in the backward, also those that draw random numbers
(seen in torch 2.13: ``aten.rand``, Inductor's seeds). They draw others then, and the gradients are wrong: of a block
with dropout by a quarter, with a loss that is right. So graphs that draw random numbers are partitioned as without a budget.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from autosac.integrations.operators.keys import is_random

WITHOUT_BUDGET = "a compiled graph draws random numbers, which PyTorch's memory budgets would draw anew in the backward"


def draws(graph: torch.fx.Graph) -> bool:
    """Whether an operator of the graph draws random numbers."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and is_random(node.target, node.args, node.kwargs)
        for node in graph.nodes
        if node.op == "call_function"
    )


def leave_alone() -> None:
    """From now on, in this process."""
    from torch._functorch import partitioners

    original = partitioners.choose_saved_values_set
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def choose(joint_graph: torch.fx.Graph, node_info: Any, memory_budget: float = 1, *args: Any, **kwargs: Any) -> Any:
        if memory_budget < 1 and draws(joint_graph):
            warnings.warn(f"{WITHOUT_BUDGET}: it has none, and saves more", stacklevel=2)
            memory_budget = 1
        return original(joint_graph, node_info, memory_budget, *args, **kwargs)

    partitioners.choose_saved_values_set = choose

"""PyTorch's partitioner, under memory budgets and policies, does not change what a compiled graph computes.

Below a budget of 1, the min-cut partitioner computes any operator again in the backward; what a policy does not keep it does
at any budget. Three kinds of them give another result then, and gradients are wrong, with a loss that is right (seen in torch
2.13):

- what draws random numbers in the forward (of a block with dropout, gradients were a quarter off);
- what reads an input that the graph changes, a buffer say: the backward reads the changed one (twice the gradient, of a layer
  that updates a codebook);
- operators of other libraries, which may draw random numbers or keep state.

So their results are saved as well, where the backward would need them again. With Inductor it is the seeds of random numbers
that are saved, not the numbers. It is decided here, of the graph as it is partitioned: Inductor has removed copies by then, so
that what a module computes from a copy of a buffer is computed from the buffer. Graphs with neither a budget nor a policy are
left as PyTorch partitions them.

What takes its type from the default dtype (a table, a quotient of whole numbers) has it written down: a backend that runs the
graph's operators (aot_eager) computes it again under the default of the backward.

A graph that PyTorch has partitioned without this, under the job's own budget, must not be found in the compiler's caches: they
are marked (`MARK`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from autosac.errors import PlanError, PlanNotFollowedError
from autosac.integrations.operators.effects import is_foreign
from autosac.integrations.operators.keys import is_collective, is_random
from autosac.integrations.replacing import replace_once

MARK = "autosac: saves what cannot be computed again"
"""What the caches' keys say of graphs that are partitioned like this."""
last_traced = [""]
"""The planned module that Dynamo has met last, by name."""
_ORIGINS = ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node")


def _choose(original: Any, joint: Graph, info: Any, memory_budget: float = 1, *args: Any, **kwargs: Any) -> list[Node]:
    saved: list[Node] = original(joint, info, memory_budget, *args, **kwargs)
    if memory_budget == 1 and not any("recompute" in node.meta for node in joint.nodes):
        return saved
    return [*saved, *unrepeatable(joint, info, saved)]


def _classified(original: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    _forget_outer_tags(module.graph)
    if _is_planned(module.graph):
        _write_down_types(module.graph)
    info = original(module, *args, **kwargs)
    _give_the_budget(module, info.required_fw_nodes)
    return info


def save_what_changes() -> None:
    """From now on, in this process: see the module's docstring. PlanError if this PyTorch's partitioner is another one."""
    from torch._functorch import partitioners

    replacements: dict[str, Callable[..., Any]] = {"choose_saved_values_set": _choose, "classify_nodes": _classified}
    lacking = [name for name in replacements if not hasattr(partitioners, name)]
    if lacking:
        raise PlanError(
            f"memory budgets of compiled code need another PyTorch: this one's partitioner has no {lacking[0]}"
        )
    for name, around in replacements.items():
        replace_once(partitioners, name, around)
    tag = torch.compiler.config.cache_key_tag
    if MARK not in tag:
        torch.compiler.config.cache_key_tag = f"{tag} {MARK}".strip()


def _budget_key() -> str | None:
    return getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)  # since torch 2.13


def _is_planned(graph: Graph) -> bool:
    """Whether a policy or a budget decides what the backward computes again."""
    from torch._functorch import config

    key = _budget_key()
    return config.activation_memory_budget != 1 or any(
        "recompute" in node.meta or (key is not None and key in (node.meta.get("custom") or ())) for node in graph.nodes
    )


def _forget_outer_tags(graph: Graph) -> None:
    """The graph of a loop's body has the loop's tags, on its inputs and gradients, too. There is nothing to decide about it:
    what it saves is a result of the loop.
    """
    if any("recompute" in node.meta for node in graph.find_nodes(op="placeholder")):
        for node in graph.nodes:
            node.meta.pop("recompute", None)


def _write_down_types(graph: Graph) -> None:
    default = torch.get_default_dtype()
    for node in _calls(graph):
        func, value = node.target, node.meta.get("val")
        if (
            not isinstance(func, torch._ops.OpOverload)
            or not isinstance(value, torch.Tensor)
            or value.dtype is not default
        ):
            continue
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if any(n.meta["val"].is_floating_point() or n.meta["val"].is_complex() for n in inputs):
            continue
        names = [argument.name for argument in func._schema.arguments]
        if "dtype" in names:
            if names.index("dtype") >= len(node.args) and node.kwargs.get("dtype") is None:
                node.update_kwarg("dtype", default)
        elif torch.Tag.pointwise in func.tags and func.overloadpacket is not torch.ops.aten.where:
            for n in inputs:
                with graph.inserting_before(node):
                    cast = graph.call_function(torch.ops.aten._to_copy.default, (n,), {"dtype": default})
                cast.meta = {**node.meta, "val": n.meta["val"].to(default)}
                node.replace_input_with(n, cast)


def _give_the_budget(module: torch.fx.GraphModule, forward: Sequence[Node]) -> None:
    """A module's own budget holds for what the compiler adds, too: copies of inputs that it changes, writing them back
    (running statistics), seeds, and the graphs of branches. PyTorch refuses budgets that do not cover a graph's whole forward.
    PlanNotFollowedError for several budgets in one graph, or code of other modules in it.
    """
    key = _budget_key()
    budgets = {node.meta["custom"][key] for node in forward if key in (node.meta.get("custom") or ())}
    if not budgets:
        return
    others = [node for node in forward if node.op == "call_function" and key not in (node.meta.get("custom") or ())]
    if len(budgets) > 1 or not all(map(_is_added, others)):
        raise PlanNotFollowedError(
            f"modules have memory budgets of their own ({last_traced[0]} for one), but the compiler has more than one module "
            "in a graph: compile each of them by itself (module.compile()), or plan for the model as it is compiled"
        )
    (budget,) = budgets
    added = [node for node in forward if _is_added(node)]
    inner = [m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule) and m is not module]
    for node in (*added, *(n for graph in inner for n in graph.nodes)):
        node.meta["custom"] = {key: budget, **(node.meta.get("custom") or {})}


def _is_added(node: Node) -> bool:
    """Whether a compiler has made the node by itself: it comes from no line and no function of the model's.

    AOTAutograd copies inputs before they are changed and writes back (`copy_`, `set_`); Inductor draws seeds.
    """
    return not any(node.meta.get(origin) for origin in _ORIGINS)


def unrepeatable(joint: Graph, info: Any, saved: Sequence[Node]) -> list[Node]:
    """What has to be saved beside `saved`: results that the backward would compute again, and others than in the forward.

    `info`: the partitioner's ``NodeInfo`` of the graph.
    """
    changed = {_memory(node) for node in _changed_inputs(joint)} - {None}
    gradients = set(info.tangents_closure)
    known, found = set(saved), dict[Node, None]()
    waiting = [n for node in info.tangents_closure for n in node.all_input_nodes]
    waiting += [node for node in info.required_bw_nodes if node not in gradients]  # returned as a gradient
    while waiting:
        node = waiting.pop()
        if node in known or node in gradients or node.op != "call_function":
            continue
        known.add(node)
        source = node.args[0] if node.target is operator.getitem else node
        if _memory(node) in changed or not isinstance(source, Node):
            continue
        if _is_lost(source, info) or any(_memory(n) in changed for n in source.all_input_nodes):
            found[node] = None
        else:
            waiting += node.all_input_nodes
    return list(found)


def _changed_inputs(joint: Graph) -> Iterator[Node]:
    """The inputs that the graph changes, or that the runtime changes after it."""
    inputs = joint.find_nodes(op="placeholder")
    described = {node.meta.get("desc"): node for node in inputs}
    for output in joint.find_nodes(op="output"):
        for description in output.meta.get("desc") or ():
            node = described.get(getattr(description, "mutated_input", None))
            if node is not None:
                yield node
    for node in joint.nodes:
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is not None and schema.is_mutable and node.args and isinstance(node.args[0], Node):
            yield node.args[0]


def _memory(node: Node) -> int | None:
    """Equal for values that share memory; None for what has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not torch._C._has_storage(value):
        return None
    return int(value.untyped_storage()._cdata)


def _is_lost(node: Node, info: Any) -> bool:
    """Whether a budget would draw other numbers, run an operator again of which nothing is known (of another library), or
    recompute what a policy of the job's keeps (a budget of 0 does not ask).

    PyTorch marks collectives as kept, too, but what ranks exchange again is the same: a budget of 0 exchanges them again.

    Random numbers that a policy recomputes are the same: PyTorch restores the generator for those. What only the backward
    draws (a gradient's hook) is drawn once, and there: in the forward it would be drawn in another order.
    """
    wanted = node.meta.get("recompute")
    if wanted == CheckpointPolicy.MUST_SAVE:
        return not is_collective(node.target)
    recomputes = wanted in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return not recomputes and info.is_required_fw(node) and (is_foreign(node.target) or _is_random(node))


def _is_random(node: Node) -> bool:
    """Whether the operator draws random numbers, or a graph that it runs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return is_random(node.target, node.args, dict(node.kwargs))
    inner = (getattr(node.graph.owning_module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
    return any(_is_random(n) for graph in inner if isinstance(graph, torch.fx.GraphModule) for n in _calls(graph.graph))


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]

"""A plan's decisions inside a module that is being compiled.

The compiler understands only PyTorch's own selective checkpointing: its modes turn the decisions into tags on the compiler's
graph, whose writes are written out of place. The backward's part of that graph begins with what the forward saved. A buffer
that the module changes is then changed already, so whatever was computed from its earlier contents has to be saved (torch 2.13
recomputes it from the new contents). Which operators those are is known when the graph is traced: AOTAutograd runs the module
once before, to find out what it mutates, and this pass is watched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)

from autosac.errors import PlanError, PlanNotFollowedError
from autosac.integrations.operators.effects import argument, is_foreign, only_metadata, written_arguments
from autosac.integrations.operators.facts import facts_of
from autosac.integrations.operators.keys import Keyer, is_random, op_name, output_metadata
from autosac.integrations.partitioner import save_what_changes
from autosac.integrations.recompute.entries import TracedOperator, observer
from autosac.integrations.recompute.policy import UnitDecisions
from autosac.integrations.replacing import replace_once

SEES_RESULTS = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
"""Whether PyTorch tells a policy what an operator has returned (since 2.12): without it nobody knows whose memory that is."""
NEEDS = "plans of compiled modules need PyTorch 2.12 or newer"


def context_fn(policy: UnitDecisions, *, offloads: bool) -> Callable[[], tuple[Any, Any]]:
    """What `torch.utils.checkpoint.checkpoint` takes as its ``context_fn`` (a plain function: Dynamo takes nothing else).

    AOTAutograd caches no graph with it, because it has no ``cache_hash``: with one, torch 2.13 tries, fails to pickle the
    function, and shows a traceback for each graph. What Inductor generates is cached.
    It raises PlanError if the plan offloads, which compiled code does not do, and before PyTorch 2.12.
    """
    of_old_contents: set[int] = set()

    def modes() -> tuple[Any, Any]:
        if not SEES_RESULTS:
            raise PlanError(f"{policy.fqn} is compiled, and {NEEDS}")
        if offloads:
            raise PlanError(
                f"{policy.fqn} is compiled and its plan offloads to host memory: make a plan without offloading"
            )
        save_what_changes()
        _hold_inference_tensors()
        passes = {
            again: _Pass(policy, of_old_contents, [] if again else observer[0].traces(policy.fqn))
            for again in (False, True)
        }
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(
            lambda context, func, *args, **kwargs: passes[context.is_recompute].decide(
                func, args, kwargs, context.op_output
            )
        )
        for context in contexts:
            context.supports_higher_order_operators = True  # PyTorch refuses loops and branches otherwise
        return contexts

    return modes


def _hold_inference_tensors() -> None:
    """From now on, in this process. PyTorch's checkpointing asks all that it holds for its version, which these have not."""

    def hold(original: Any, wrapper: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_inference():
            wrapper.val, wrapper.version = value, None
        else:
            original(wrapper, value)

    replace_once(_VersionWrapper, "__init__", hold)


class _Pass:
    """One run over the unit's operators."""

    def __init__(self, policy: UnitDecisions, of_old_contents: set[int], traced: list[TracedOperator]) -> None:
        """`traced` takes the operators that count, for a capture that wants to know."""
        self._policy = policy
        self._of_old_contents = of_old_contents
        self._traced = traced
        self._keyer = Keyer()
        self._number = 0
        self._is_traced = False
        self._made: dict[int, torch.Tensor] = {}
        self._readers: dict[int, list[int]] = {}

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> CheckpointPolicy:
        """Save or recompute the result of this call. PlanError if it cannot be done rightly."""
        if not self._is_of_graph(args, kwargs, out):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._number += 1
        self._follow(func, args, kwargs, out)
        facts = facts_of(func)
        is_aside = _is_number(out) and not self._policy.decides_on_numbers(facts)
        occurrence = -1 if is_aside else self._keyer.occurrence(func)
        if occurrence < 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._traced.append((facts.name, output_metadata(out)))
        if (
            self._number in self._of_old_contents
            or is_random(func, args, kwargs)
            or is_foreign(func)
            or _is_control(func)
        ):
            return CheckpointPolicy.MUST_SAVE  # the compiler does not always draw the same numbers again
        rows = self._policy.decisions(facts)
        if not self._policy.size:
            return CheckpointPolicy.PREFER_RECOMPUTE  # a unit without decisions is recomputed as a whole
        if occurrence >= len(rows):
            self._policy.warn(
                f"as compiled runs more calls of {op_name(func)} than the plan's {len(rows)}",
                "recomputing this operator",
            )
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if rows[occurrence].keep else CheckpointPolicy.PREFER_RECOMPUTE

    def _is_of_graph(self, *seen: Any) -> bool:
        """Whether a call belongs to the unit. Flexible attention tries its mask on tensors that are not the graph's."""
        is_functional = any(isinstance(tensor, FunctionalTensor) for tensor in _tensors(seen))
        self._is_traced |= is_functional
        return is_functional or not self._is_traced

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note which operators read what the unit did not make, and whether this one changes some of that."""
        for tensor in _tensors((args, kwargs)):
            if (place := _place(tensor)) not in self._made:
                self._readers.setdefault(place, []).append(self._number)
        if not only_metadata(func):
            for written in written_arguments(func):
                for tensor in _tensors(argument(written, args, kwargs)):
                    self._written(func, tensor)
        for tensor in _tensors(out):
            if (place := _place(tensor)) not in self._readers:
                self._made[place] = tensor

    def _written(self, func: Any, tensor: torch.Tensor) -> None:
        place = _place(tensor)
        if place in self._made:
            return
        if not isinstance(tensor, FunctionalTensor):
            raise PlanNotFollowedError(
                f"{self._policy.fqn} is compiled by a backend that runs PyTorch's checkpointing as it is, and changes a "
                f"tensor that is not its own ({op_name(func)}): the recomputation would change it again; leave the module "
                "out of the plan"
            )
        self._of_old_contents.update(self._readers.get(place, ()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_number(out: Any) -> bool:
    """Whether a result is single numbers. Operators that are traced make some for themselves, which take no memory."""
    found = _tensors(out)
    return bool(found) and not any(tensor.dim() for tensor in found)


def _is_control(func: Any) -> bool:
    """Whether the operator runs graphs of its own (loops, branches, regions compiled once), in which anything may happen.

    PyTorch gives its checkpointing a rule for the others, as flexible attention.
    """
    if not isinstance(func, HigherOrderOperator):
        return False
    return _CachingTorchDispatchMode not in func.python_key_table or func.name() in ("invoke_subgraph", "local_map_hop")


def _place(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, views included."""
    held = tensor.elem if isinstance(tensor, FunctionalTensor) else tensor
    return int(held.untyped_storage()._cdata)

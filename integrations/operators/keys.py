"""How an operator inside a checkpointed module is named, numbered and recognised.

Capture, plan and the running job must agree on these, so there is one piece of code for each: which operators
count (`is_counted`), their name (`op_name`), their number (`Keyer`), the metadata of their outputs
(`output_metadata`), which of them draw random numbers (`is_random`), and that FSDP's hooks inside a checkpointed
module do not count (`quiet_hooks`): what they run depends on prefetching and differs between a forward and
its recomputation.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from autosac.plans import ANY_SIZE, OutputMetadata

_IGNORED_NAMESPACES = frozenset({"prim", "profiler"})
_counted: dict[Any, bool] = {}
_tagged_random: dict[Any, bool] = {}


class _Quiet(threading.local):
    """`depth` > 0 while a hook runs whose operators do not count on this thread."""

    depth = 0


quiet = _Quiet()


class CountingMode(TorchDispatchMode):
    """A dispatch mode around one module, whatever FSDP hook is running outside; higher-order operators included."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What compiled code inside the module does is not seen."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self._outer_quiet = 0

    def __enter__(self) -> Self:
        """Begin to see operators."""
        self._outer_quiet, quiet.depth = quiet.depth, 0
        super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """See them no more."""
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call] # torch's has no types
        quiet.depth = self._outer_quiet


def is_counted(func: Any) -> bool:
    """Whether a policy decides on this operator.

    Detach, metadata and profiler calls are none of its business.
    """
    counted = _counted.get(func)
    if counted is None:
        counted = (
            func not in SAC_IGNORED_OPS
            and getattr(func, "namespace", None) not in _IGNORED_NAMESPACES
            and not is_view(func)
            and not is_wrapper(func)
        )
        _counted[func] = counted
    return counted


def is_view(func: Any) -> bool:
    """Whether the operator only makes views. There is nothing to decide about them: they cost nothing to repeat.

    Nor could they be numbered: for tensor subclasses (and so in a capture) autograd replays the views of a tensor that
    was changed in place, for plain tensors it does not.
    """
    return bool(getattr(func, "is_view", False)) and func not in SAC_IGNORED_OPS


def is_wrapper(func: Any) -> bool:
    """Whether the operator only puts a collective's result into a tensor that waits for it when it is used.

    The simulation waits right away, as graphs do (`torch.distributed._functional_collectives`, `_maybe_wrap_tensor`).
    """
    return op_name(func).startswith("_c10d_functional._wrap_tensor")


def is_collective(func: Any) -> bool:
    """Whether the operator communicates: its result may not be there yet when others that were asked for later are."""
    return "c10d" in str(getattr(func, "namespace", ""))


def op_name(func: Any) -> str:
    """The name of an operator overload (``"aten.mm.default"``) or of a higher-order operator."""
    return str(func) if isinstance(func, torch._ops.OpOverload) else str(func.name())


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order: what operators take and return."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for item in tree for tensor in tensors_in(item)]


def output_metadata(out: Any) -> OutputMetadata:
    """Shape and dtype of each tensor in an operator's result, in order."""
    if type(out) is torch.Tensor and not out.is_nested:
        return ((tuple(out.shape), dtype_name(out.dtype)),)
    return tuple((_sizes(tensor), dtype_name(tensor.dtype)) for tensor in tensors_in(out))


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape; what is no number has any size: the ragged dimension of a nested tensor, or all of the older layout's."""
    if tensor.is_nested and type(tensor) is torch.Tensor:
        return (ANY_SIZE,) * tensor.dim()
    return tuple(size if type(size) is int else ANY_SIZE for size in tensor.shape)


class Keyer:
    """Numbers the operators of one execution of a module."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def occurrence(self, func: Any) -> int:
        """How many calls of `func` came before; -1 if this call does not count."""
        if quiet.depth or not is_counted(func):
            return -1
        seen = self._seen.get(func, 0)
        self._seen[func] = seen + 1
        return seen


def is_tagged_random(func: Any) -> bool:
    """Whether some call of this operator draws from a random generator."""
    tagged = _tagged_random.get(func)
    if tagged is None:
        tagged = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        _tagged_random[func] = tagged
    return tagged


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws from a random generator.

    Attention without dropout does not, though it is tagged so.
    """
    if not is_tagged_random(func):
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def quiet_hooks(module: nn.Module) -> None:
    """Do not count what FSDP's hooks on `module` and its submodules run. Call after FSDP has been applied.

    Others' hooks count: expert parallelism sends the tokens to their experts in hooks of a module that FSDP shards, too.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for hooks in (submodule._forward_pre_hooks, submodule._forward_hooks):
                for key, hook in hooks.items():
                    if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp"):
                        hooks[key] = _Quietly(hook)


class _Quietly:
    """A hook whose operators do not count."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook returns."""
        quiet.depth += 1
        try:
            return self._hook(*args, **kwargs)
        finally:
            quiet.depth -= 1

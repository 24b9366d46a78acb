"""Modules by their names in the bare model, whatever wrappers have been put around them.

`torch.compile`, activation checkpointing, DistributedDataParallel and Lightning's Fabric each insert a level into qualified
names. A *clean* name has none of them, so that the same name finds a module before and after wrapping.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, CheckpointWrapper

from autosac.plans import Parameters

_LEVELS = ("_checkpoint_wrapped_module", "_orig_mod")


def clean_name(fqn: str) -> str:
    """The name without the levels that checkpointing and compilation insert."""
    return ".".join(part for part in fqn.split(".") if part not in _LEVELS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    inner: Any
    while True:
        if isinstance(module, ActivationWrapper):
            inner = module._checkpoint_wrapped_module
        elif is_compiled(module):
            inner = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        elif type(module).__name__ == "_FabricModule":
            inner = module._forward_module
        else:
            return module
        module = inner


def class_name(module: nn.Module) -> str:
    """The class that its author gave to the module inside all wrappers; `fully_shard` makes one of its own of it."""
    inner: Any = unwrapped(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # half a second to import
    if fsdp is None:
        return type(inner).__name__
    if isinstance(inner, fsdp.FullyShardedDataParallel):
        inner = unwrapped(inner.module)
    kind = type(inner)
    return (kind.__bases__[-1] if fsdp.FSDPModule in kind.__bases__ else kind).__name__


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module of another."""
    return "_orig_mod" in module._modules


def has_compiled(model: nn.Module) -> bool:
    """Whether a module, or one inside it, is compiled: by `torch.compile` or `nn.Module.compile`."""
    return any(is_compiled(module) or module._compiled_call_impl is not None for module in model.modules())


def find_module(model: nn.Module, fqn: str) -> nn.Module | None:
    """The module of this clean name as it stands in its parent, wrappers included; None if there is none."""
    module: nn.Module | None = model
    for part in fqn.split("."):
        assert module is not None
        module = unwrapped(module)._modules.get(part)
        if module is None:
            return None
    return module


def parameter_shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Clean name and global shape of every parameter, in the model's order (a DTensor's shape is the global
    one; a shard of TorchTitan's spmd_types says over which ranks it is spread).

    One that is shared has all of its names: tensor parallelism unties what initialisation ties again.
    """
    bare = unwrapped(module)
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        yield clean_name(name), _global_shape(parameter)


def _global_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    runtime = sys.modules.get("spmd_types.runtime")
    spread = runtime.get_partition_spec(parameter) if runtime is not None else None
    sizes = list(parameter.shape)
    if spread is None or hasattr(parameter, "placements"):  # of a DTensor
        return tuple(sizes)
    for dimension, axes in enumerate(spread):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            sizes[dimension] *= 1 if axis is None else axis.size()
    return tuple(sizes)


def parameters_of(module: nn.Module) -> Parameters:
    """`parameter_shapes` as it stands in a plan."""
    return tuple(parameter_shapes(module))


def selectively_checkpointed(model_parts: Iterable[nn.Module]) -> tuple[str, ...]:
    """Clean names, sorted, of the modules that the job itself runs under PyTorch's selective checkpointing."""
    return tuple(
        sorted(
            clean_name(name)
            for part in model_parts
            for name, module in unwrapped(part).named_modules()
            if isinstance(module, CheckpointWrapper) and "context_fn" in getattr(module.checkpoint_fn, "keywords", ())
        )
    )


def shapes_by_name(model_parts: Iterable[nn.Module]) -> dict[str, tuple[int, ...]]:
    """`parameter_shapes` of several parts of a model."""
    return {name: shape for part in model_parts for name, shape in parameter_shapes(part)}

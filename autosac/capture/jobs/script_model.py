"""The model of a script, found before the script wraps it: where a plan has to be applied.

Nobody says what the model is, either. A module that is about to be wrapped (DDP, DataParallel, FSDP, `fully_shard`,
`torch.compile`), or else the first module that is called to be trained, belongs to it; the model is the module around all of
these. It is found before the call begins: a module that is called by itself follows its plan from the first call on.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autosac.capture.record.construction import trains


class ModelFinder:
    """Calls `action` with the script's model, once. `compiles`: whether `torch.compile` of a module may compile it.

    `model` is what was found, `is_compiled` whether the script asks to compile a module.
    """

    def __init__(self, action: Callable[[nn.Module], None], *, compiles: bool) -> None:
        self._action = action
        self._compiles = compiles
        self.model: nn.Module | None = None
        self.is_compiled = False

    def install(self) -> None:
        """Meet modules where they are wrapped."""
        self._meet_before(torch, "compile", identity=not self._compiles)
        self._meet_before(nn.Module, "compile", identity=not self._compiles)
        self._meet_before(nn.DataParallel, "__init__", position=1)
        if not dist.is_available():
            return
        import torch.distributed.fsdp as fsdp
        import torch.nn.parallel as parallel

        self._meet_before(fsdp, "fully_shard")
        old_place: Any = importlib.import_module("torch.distributed._composable.fsdp")
        old_place.fully_shard = fsdp.fully_shard
        for wrapper in (parallel.DistributedDataParallel, fsdp.FullyShardedDataParallel):
            self._meet_before(wrapper, "__init__", position=1)

    def meet_what_is_called(self) -> None:
        """Meet the first module that is called to be trained, too."""
        modules: Any = nn.Module
        original = modules.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.model is None and trains(module):
                self.meet(module)
            if self.model is not None and modules.__call__ is call:
                modules.__call__ = original
            return original(module, *args, **kwargs)

        modules.__call__ = call

    def _meet_before(self, owner: Any, name: str, position: int = 0, identity: bool = False) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[position] if len(args) > position else kwargs.get("module", kwargs.get("model"))
            if isinstance(first, nn.Module):
                self.meet(first)
                self.is_compiled |= name == "compile"
                if identity:
                    return first
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def meet(self, module: nn.Module) -> None:
        """A part of the model."""
        if self.model is None:
            self.model = outermost(module)
            self._action(self.model)


def outermost(module: nn.Module) -> nn.Module:
    """The module that contains this one and that no other contains."""
    parents = {
        id(child): parent
        for parent in gc.get_objects()
        if isinstance(parent, nn.Module)
        for child in vars(parent).get("_modules", {}).values()  # a wrapper that is being made has none yet
        if child is not None
    }
    seen = {id(module)}
    while id(module) in parents and id(parents[id(module)]) not in seen:
        module = parents[id(module)]
        seen.add(id(module))
    return module


def owned_by_modules() -> set[int]:
    """The identities of all parameters that any module has."""
    modules = (module for module in gc.get_objects() if isinstance(module, nn.Module))
    return {id(p) for module in modules for p in vars(module).get("_parameters", {}).values() if p is not None}

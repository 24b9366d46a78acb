"""The model of a script, found before the script wraps it: where a plan has to be applied.

Nobody says what the model is, either. A module that is about to be wrapped (DDP, DataParallel, FSDP, `fully_shard`,
`torch.compile`), or else the first module that is called to be trained, belongs to it; the model is the module around all of
these. It is found before the call begins: a module that is called by itself follows its plan from the first call on. Of
several models that are called by themselves (a generator and a discriminator) it is another one, where that is asked for.

Of a model in pipeline stages a rank may have several (interleaved schedules): all of them are parts of the model.
"""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from autosac.capture.patches.after_import import after_import
from autosac.capture.record.construction import trains
from autosac.errors import UsageError
from autosac.integrations.operators.modules import shapes_by_name, unwrapped

_STAGES = "torch.distributed.pipelining.stage"


class ModelOrder:
    """Numbers the models of a script in the order in which they are first called to be trained."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def number(self, module: nn.Module) -> int:
        """That of the model around a module that is called now; -1 if nobody has called it to be trained yet."""
        found = self._numbers.get(module, -1)
        if found >= 0 or not trains(module):
            return found
        whole = list(outermost(module).modules())
        found = next((self._numbers[part] for part in whole if part in self._numbers), self._count)
        self._count = max(self._count, found + 1)
        self._numbers.update(dict.fromkeys(whole, found))
        return found


class ModelFinder:
    """Calls `action` with the script's model, once, or with each of several pipeline stages. `compiles`: whether
    `torch.compile` of a module may compile it. `wanted`: which model it is of those that are called, by their order.

    `parts` is what was found, `model` the first of them, `is_compiled` whether the script asks to compile a module.
    """

    def __init__(self, action: Callable[[nn.Module], None], *, compiles: bool, wanted: int = 0) -> None:
        self._action = action
        self._order, self._wanted = ModelOrder(), wanted
        self._compiles = compiles
        self.parts: list[nn.Module] = []
        self.is_compiled = False

    @property
    def model(self) -> nn.Module | None:
        """The model, or the first of its parts."""
        return self.parts[0] if self.parts else None

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
        """Meet the first module that is called to be trained, too, or the first one of the model that is wanted."""
        modules: Any = nn.Module
        original = modules.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.model is None and self._order.number(module) == self._wanted:
                self.meet(module)
            if self.model is not None and modules.__call__ is call:
                modules.__call__ = original
            return original(module, *args, **kwargs)

        modules.__call__ = call

    def meet_stages(self, record: Callable[[nn.Module], None]) -> None:
        """Meet what becomes a pipeline stage: each such module is a part of the model, and `record` gets it, too."""

        def install(stages: Any) -> None:
            original = stages._PipelineStageBase.__init__

            @functools.wraps(original)
            def init(stage: Any, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
                *_, around = within = modules_around(submodule)
                if any(isinstance(module, GraphModule) for module in within[1:]):
                    around = submodule  # the whole model, traced and cut into stages: names are those in a stage
                part = unwrapped(around)
                record(part)
                if not any(part is known for known in self.parts):
                    self._add(part)
                original(stage, submodule, *args, **kwargs)

            stages._PipelineStageBase.__init__ = init

        after_import(_STAGES, install)

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
        if not self.parts:
            self._add(outermost(module))

    def _add(self, part: nn.Module) -> None:
        self.parts.append(part)
        self._action(part)


def outermost(module: nn.Module) -> nn.Module:
    """The module that contains this one and that no other contains."""
    return modules_around(module)[-1]


def modules_around(module: nn.Module) -> list[nn.Module]:
    """The module, the one that contains it, and so on."""
    parents = {
        id(child): parent
        for parent in gc.get_objects()
        if isinstance(parent, nn.Module)
        for child in vars(parent).get("_modules", {}).values()  # a wrapper that is being made has none yet
        if child is not None
    }
    found, seen = [module], {id(module)}
    while id(found[-1]) in parents and id(parents[id(found[-1])]) not in seen:
        found.append(parents[id(found[-1])])
        seen.add(id(found[-1]))
    return found


def owned_by_modules() -> set[int]:
    """The identities of all parameters that any module has."""
    modules = (module for module in gc.get_objects() if isinstance(module, nn.Module))
    return {id(p) for module in modules for p in vars(module).get("_parameters", {}).values() if p is not None}


def check_names(parts: Sequence[nn.Module]) -> None:
    """UsageError where modules of several pipeline stages cannot be told apart by what a plan knows of them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, shape in shapes_by_name([part]).items():
            if shapes.setdefault(name, shape) != shape:
                raise UsageError(
                    f"the pipeline stages of one rank have parameters {name} of different shapes, {list(shapes[name])} and "
                    f"{list(shape)}: one plan cannot tell them apart; give modules of different stages different names"
                )

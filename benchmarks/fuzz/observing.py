"""What operators the units of a job run, seen by a dispatch mode of the fuzz's own, and which of them belong together.

An operator counts if a plan has a decision for it (`autosac.plans.Decision`): views, detach, metadata and profiler calls do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from autosac.integrations.recompute import compiled_parts
from autosac.integrations.recompute.tape import present
from autosac.integrations.recompute.units import UnitModule, become
from autosac.plans import ANY_SIZE, GRAPH, OutputMetadata


@dataclass
class Seen:
    """One operator of a unit's forward, with the numbers of the storages that it read, wrote and returned."""

    op: str
    occurrence: int
    outputs: OutputMetadata
    reads: set[int]
    writes: set[int]
    made: set[int]


@dataclass
class _Storages:
    """Numbers storages; holds the tensors so that no address is used twice."""

    held: list[Tensor] = field(default_factory=list)

    def of(self, tree: Any) -> set[int]:
        found = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
                self.held.append(leaf)
                found.add(leaf.untyped_storage()._cdata)
        return found


class _Seeing(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What compiled code inside a unit does is not seen, and stays compiled."""
        return True

    def __init__(self, storages: _Storages) -> None:
        super().__init__()
        self.calls: list[Seen] = []
        self._storages = storages
        self._counts: dict[Any, int] = {}
        self._graphs = 0  # that run at present
        self._outer: Any = None

    def __enter__(self) -> Self:
        """Begin to see operators and graphs."""
        self._outer, present.observer = present.observer, self
        super().__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """See them no more."""
        super().__exit__(kind, value, traceback)
        present.observer = self._outer

    def run_graph(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A compiled graph is one thing, in this unit and in those around it."""
        outer = self._outer
        seen_outside = call if outer is None else lambda *args, **kwargs: outer.run_graph(call, args, kwargs)
        self._graphs += 1
        try:
            out, changed = compiled_parts.called_graph(seen_outside, args, kwargs)
        finally:
            self._graphs -= 1
        number = self._counts.get(GRAPH, 0)
        self._counts[GRAPH] = number + 1
        outputs = tuple((_sizes(t), str(t.dtype).removeprefix("torch.")) for t in _tensors(out))
        see = self._storages.of
        self.calls.append(Seen(GRAPH, number, outputs, see((args, kwargs)), see(changed), see(out)))
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (
            self._graphs
            or func in SAC_IGNORED_OPS
            or getattr(func, "namespace", "") in ("prim", "profiler")
            or getattr(func, "is_view", False)
        ):
            return out
        number = self._counts.get(func, 0)
        self._counts[func] = number + 1
        name = str(func) if isinstance(func, torch._ops.OpOverload) else str(func.name())
        outputs = tuple((_sizes(t), str(t.dtype).removeprefix("torch.")) for t in _tensors(out))
        see = self._storages.of
        self.calls.append(Seen(name, number, outputs, see((args, kwargs)), see(_written(func, args, kwargs)), see(out)))
        return out


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_nested and type(tensor) is Tensor:
        return (ANY_SIZE,) * tensor.dim()
    return tuple(size if type(size) is int else ANY_SIZE for size in tensor.shape)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    schema = getattr(func, "_schema", None)
    found = []
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


@dataclass(frozen=True)
class _Unit:
    """Where the operators of a unit are noted. Copies of the module share it."""

    name: str
    storages: _Storages
    found: dict[str, list[Seen]]

    def __deepcopy__(self, memo: Any) -> _Unit:
        return self


class _Observed(UnitModule):
    """A module whose forward is seen."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        if self._autosac is None or not torch.is_grad_enabled():
            return self.original_forward(*args, **kwargs)
        unit: _Unit = self._autosac
        compiled_parts.prepare()
        with _Seeing(unit.storages) as mode:
            out = self.original_forward(*args, **kwargs)
        unit.found[unit.name] = mode.calls
        return out


def observe(model: nn.Module, units: Collection[str]) -> dict[str, list[Seen]]:
    """From now on, what the last forward of each of these modules ran (with gradients on), by name.

    The classes of the modules are changed.
    """
    found: dict[str, list[Seen]] = {}
    storages = _Storages()
    for name in units:
        become(model.get_submodule(name), _Observed, _Unit(name, storages, found))
    return found

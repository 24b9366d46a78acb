"""What objects of a model hold of a step's tensors from one part of a microbatch to the next, beside the autograd graph.

TorchTitan's expert parallelism is one such object: its dispatch keeps the order of the tokens for its combine, and the layer's
next forward, or recomputation, of whichever microbatch, replaces that. A tensor that is replaced ends there if no graph holds
it, too.

Such tensors are found in the attributes of modules, in what their hooks have closed over, and in the attributes, lists and
dictionaries of what is found there. Objects of PyTorch's own classes are left out: what FSDP's units hold, `fsdp_units` knows.
What is held elsewhere is not found; microbatches that free it differ then from each other, and none is copied.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from autosac.capture.record.storages import StorageTable

Path = tuple[object, ...]
_CELL: Any = types.CellType
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_NOT_OPENED = ("torch", "autosac", "builtins")  # packages of classes
_DEEPEST = 12  # links of a path: what is further away belongs to somebody else (a trainer that a module knows)
_LEAVES = (torch.Tensor, torch.nn.Module, torch.dtype, torch.device)
_ELSEWHERE = ("_modules", "_parameters")  # named_modules and FSDP's units have these


class HeldTensor(NamedTuple):
    """What a part leaves at a place: the tensor's `storage` by its position, and its layout. `is_shared`: a graph holds it as
    well.

    Of a place that holds no tensor of the step there is only a number: a tensor's from before the step, or -1.
    """

    storage: int
    layout: Any = None
    is_shared: bool = False


class HeldTensors:
    """The places where objects of a model hold tensors. Their order is that in which they were found."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._places: dict[Path, tuple[Any, Any]] = {}

    def find(self) -> None:
        """Look for places, once more."""
        seen: set[int] = set()
        for name, module in self._model.named_modules():
            members = {key: value for key, value in vars(module).items() if key not in _ELSEWHERE}
            for path, holder, key in _within((name,), vars(module), members, seen):
                self._places[path] = holder, key

    def numbers(self, table: StorageTable) -> tuple[int, ...]:
        """The allocations that the places hold; -1 for none."""
        return tuple(table.of(held) if isinstance(held, torch.Tensor) else -1 for held in self.tensors())

    def tensors(self) -> list[Any]:
        """What is at the places."""
        return list(map(_at, self._places.values()))

    def is_shared(self, place: int, table: StorageTable, remake: Callable[[], torch.Tensor]) -> bool | None:
        """Whether somebody else holds the tensor at this place, too. It is let go of: if it dies of that, another one like it
        (`remake`) takes its place. None if it does not, and cannot be put back.
        """
        where = list(self._places.values())[place]
        number, reference = table.of(_at(where)), weakref.ref(_at(where))
        with table.silent() as ended:
            _put(where, None)
        if number in ended:
            _put(where, remake())
            return False
        _put(where, reference())
        return True if reference() is not None else None

    def put(self, place: int, tensor: torch.Tensor) -> None:
        """A place holds this tensor from now on."""
        _put(list(self._places.values())[place], tensor)


def _at(where: tuple[Any, Any]) -> Any:
    holder, key = where
    if type(holder) is _CELL:
        try:
            return holder.cell_contents
        except ValueError:  # nothing yet
            return None
    try:
        return holder[key]
    except (KeyError, IndexError):
        return None


def _put(where: tuple[Any, Any], value: Any) -> None:
    holder, key = where
    if type(holder) is _CELL:
        holder.cell_contents = value
    else:
        holder[key] = value


def _within(path: Path, holder: Any, members: Any, seen: set[int]) -> Iterator[tuple[Path, Any, Any]]:
    """The places in a container, and in what it holds: path, container and key. `members`: those to look at."""
    if id(holder) in seen or len(path) > _DEEPEST:
        return
    seen.add(id(holder))
    for key, value in list(members.items()) if isinstance(members, dict) else list(enumerate(members)):
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                yield (*path, key), holder, key
        elif not isinstance(value, _PLAIN):
            yield from _opened((*path, key), value, seen)


def _opened(path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, Any, Any]]:
    """The places in what an object holds."""
    if isinstance(value, dict | list):
        yield from _within(path, value, value, seen)
    elif isinstance(value, tuple):
        for key, member in enumerate(value):
            if not isinstance(member, _PLAIN + _LEAVES):
                yield from _opened((*path, key), member, seen)
    elif isinstance(value, types.MethodType):
        yield from _opened((*path, "self"), value.__self__, seen)
    elif isinstance(value, types.FunctionType):
        for key, cell in enumerate(value.__closure__ or ()):
            yield from _cell((*path, key), cell, seen)
    elif isinstance(value, functools.partial):
        yield from _opened((*path, "partial"), (value.func, *value.args, *value.keywords.values()), seen)
    elif not isinstance(value, _PLAIN + _LEAVES) and type(value).__module__.split(".")[0] not in _NOT_OPENED:
        yield from _within(path, getattr(value, "__dict__", {}), getattr(value, "__dict__", {}), seen)


def _cell(path: Path, cell: Any, seen: set[int]) -> Iterator[tuple[Path, Any, Any]]:
    if id(cell) in seen:
        return
    seen.add(id(cell))
    value = _at((cell, None))
    if isinstance(value, torch.Tensor):
        yield path, cell, None
    elif not isinstance(value, _PLAIN + _LEAVES):
        yield from _opened(path, value, seen)

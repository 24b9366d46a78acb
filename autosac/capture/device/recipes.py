"""How the outputs of a call on fake tensors are made: plain data, which one process can hand to another.

A recipe says of each output what it is: a value, an input, a view of an input, or a tensor with memory of its own. It depends
on what the dispatch cache's key describes (operator, layouts of the input tensors, other arguments), and on a few switches of
PyTorch (`switches`). A process that forks captures of the same job gives what the first ones have found out to those that
come later (`autosac.capture.jobs.handover`): 30 % of a capture of one layer is spent finding out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


class PlainOutput(NamedTuple):
    """What is no tensor."""

    value: Any


class InputOutput(NamedTuple):
    """The input tensor at this position."""

    position: int


class OutputLayout(NamedTuple):
    """Shape, stride, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ViewOutput(NamedTuple):
    """A tensor over the memory of the input at position `base`."""

    layout: OutputLayout
    base: int
    offset: int


class NewOutput(NamedTuple):
    """A tensor with memory of its own."""

    layout: OutputLayout


Leaf: TypeAlias = PlainOutput | InputOutput | ViewOutput | NewOutput
Key: TypeAlias = tuple[Any, ...]


class Recipe(NamedTuple):
    """The outputs of a call. `kind`: a list's or tuple's type, None for the one output alone; of a deeper tree `spec`."""

    leaves: tuple[Leaf, ...]
    kind: type | None = None
    spec: Any = None


NOTHING = Recipe((PlainOutput(None),))


def recipe_of(out: Any, tensors: Sequence[FakeTensor]) -> Recipe | None:
    """The recipe for a call's outputs; None if they cannot be made again."""
    if out is None:
        return NOTHING
    flat, spec = pytree.tree_flatten(out)
    position = {id(t): i for i, t in enumerate(tensors)}
    base_of = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    leaves: list[Leaf] = []
    fresh: set[int] = set()
    for leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            leaves.append(PlainOutput(leaf))
        elif id(leaf) in position:
            leaves.append(InputOutput(position[id(leaf)]))
        elif not isinstance(leaf, FakeTensor) or not _is_plain(leaf):
            return None
        else:
            storage = leaf.untyped_storage()
            base = base_of.get(storage._cdata)
            layout = OutputLayout(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.fake_device)
            if base is not None:
                leaves.append(ViewOutput(layout, base, int(leaf.storage_offset())))
                continue
            if storage._cdata in fresh or leaf.storage_offset() or storage.nbytes() != _extent_bytes(leaf):
                return None
            fresh.add(storage._cdata)
            leaves.append(NewOutput(layout))
    if len(flat) == 1 and out is flat[0]:
        return Recipe(tuple(leaves))
    kind = type(out)
    if kind in (list, tuple) and len(out) == len(flat) and all(map(operator.is_, out, flat)):
        return Recipe(tuple(leaves), kind)
    return Recipe(tuple(leaves), kind, spec)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg() and tensor.constant is None


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.dtype.itemsize


# ---- what is handed from one process to another --------------------------------------------------------------------------

PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


class Known:
    """Recipes by key: those that were `received`, and those that were `found` by this process since.

    A key is that of the dispatch cache, which begins with the operator's identity, with the `switches` beside it.
    """

    def __init__(self) -> None:
        self._received: dict[Key, Recipe] = {}
        self._found: list[tuple[Any, Key, Recipe]] = []
        self._operators: dict[str, Any] = {}  # alive: keys have their identities

    def recipe(self, key: Key) -> Recipe | None:
        """One that another process has found."""
        return self._received.get((key, switches())) if self._received else None

    def found(self, func: Any, key: Key, recipe: Recipe) -> None:
        """A call has been made for the first time, under the present switches."""
        self._found.append((func, (key[1:], switches()), recipe))

    def take(self) -> list[tuple[str, Key, Recipe]]:
        """What has been found since the last time, as plain data; without what is none."""
        found, self._found = self._found, []
        return [
            (func.name(), key, recipe)
            for func, key, recipe in found
            if recipe.spec is None and _all_plain(key) and all(_is_portable(leaf) for leaf in recipe.leaves)
        ]

    def receive(self, recipes: Iterable[tuple[str, Key, Recipe]]) -> None:
        """What another process has found. Operators that are unknown here are left out."""
        for name, (rest, state), recipe in recipes:
            func = self._operators.get(name)
            if func is None:
                func = self._operators[name] = operator_named(name)
            if func is not None:
                self._received[(id(func), *rest), state] = recipe

    def __len__(self) -> int:
        return len(self._received)


def operator_named(name: str) -> Any:
    """The operator ``aten::add.Tensor``; None if there is none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, overload or "default", None)


def switches() -> Key:
    """What beside its arguments may decide about a call's outputs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
        _function_modes(),
    )


_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def _is_portable(leaf: Leaf) -> bool:
    return type(leaf) is not PlainOutput or type(leaf.value) in PLAIN


def _all_plain(value: Any) -> bool:
    if type(value) is tuple or type(value) is torch.Size:
        return all(map(_all_plain, value))
    return value in PLAIN if isinstance(value, type) else type(value) in PLAIN


known = Known()
"""Of this process: what it has found itself, and what it and its parents have received."""

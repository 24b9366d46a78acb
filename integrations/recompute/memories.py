"""Which memory a tensor views, and how: tensors distinguished by storage, content and geometry, not as Python objects.

A *memory* is one storage that a unit's forward met. It is *internal* if an operator of the unit made it, and *external*
otherwise (arguments, parameters, buffers, constants, anything that was there before or came from elsewhere). Every write adds
one to its `epoch`, so that (memory, epoch) names a content. A `View` names a tensor: a content, looked at with a dtype, sizes,
strides and an offset. Views need no operator to be made again. Tensors made of tensors (DTensor and others) are `Wrapped`
views of what is inside of them; a tensor without a storage (sparse, MKL-DNN) stands for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from autosac.integrations.operators.keys import tensors_in

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # the usual types of tensors that are not made of others
_strided = torch.strided
_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class View(NamedTuple):
    """A plain tensor: what it looks at (`memory`, `epoch`; `wait` is the operator that waited for it, or -1), and how."""

    memory: int
    epoch: int
    wait: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


_new_view: Any = tuple.__new__  # quicker than `View(...)`


def view_of(tensor: torch.Tensor, number: int, memory: Memory) -> View:
    """How a plain tensor looks at the present content of its memory, which has this number."""
    view: View = _new_view(
        View,
        (
            number,
            memory.epoch,
            memory.wait,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        ),
    )
    return view


class Wrapped(NamedTuple):
    """A tensor made of tensors, as ``__tensor_flatten__`` takes it apart; `inner` has a `View` or `Wrapped` for each
    tensor, and what is none as it is.
    """

    kind: type
    names: tuple[str, ...]
    context: Any
    inner: tuple[Any, ...]
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, inner: Sequence[Any]) -> torch.Tensor:
        """The tensor made of these tensors."""
        tensors = dict(zip(self.names, inner, strict=True))
        kind: Any = self.kind
        made: torch.Tensor = kind.__tensor_unflatten__(tensors, self.context, self.size, self.stride)
        return made.detach()


class Memory:
    """One storage during one forward of a unit, and what is held of it for the recomputation.

    `writers`: the operator (position on the tape) that made each epoch's content, -1 for what was there before. `external`: a
    tensor that looks at it, if it is external; `version` is that tensor's when it was read. `snapshots`: copies of all of an
    external memory that the unit changes, by epoch; `read_epoch` is the last epoch of which anything but a change
    was computed. `kept`: a tensor on it, of the epoch `kept_epoch`, that the plan keeps.
    `blank`: a tensor on it, if it was only allocated and no operator has written to it.
    """

    # Defaults that most memories keep stand in the class: one is made for every result in every forward.
    epoch = 0
    wait = -1
    version: int | None = None
    snapshots: Mapping[int, torch.Tensor] = MappingProxyType({})
    read_epoch = -1
    kept: Any = None
    kept_epoch = -1
    kept_version: int | None = None
    is_forced = False
    holders: list[Any] | None = None
    blank: torch.Tensor | None = None

    def __init__(self, creator: int, external: torch.Tensor | None) -> None:
        self.writers = [creator]
        self.external = external

    def filled_unseen(self) -> None:
        """It is read: if nobody has written to it, it is external from now on."""
        if self.blank is not None:
            self.external, self.version, self.blank = self.blank, version_of(self.blank), None
            self.writers[0] = -1

    @property
    def is_written(self) -> bool:
        """Whether the unit changed it after it was made."""
        return self.epoch > 0


class References:
    """Weak references to storages: they keep an address from being given to another storage, but free its memory.

    Storages are numbered in the order in which they are added.
    """

    def __init__(self) -> None:
        self._handles: list[int] = []
        self._free: Any = torch.UntypedStorage._free_weak_ref  # when Python ends, torch goes first

    def add(self, storage: Any) -> None:
        """From now on, no other storage gets this one's address."""
        self._handles.append(storage._weak_ref())

    def __getitem__(self, number: int) -> torch.UntypedStorage | None:
        """The storage of this number if somebody still holds it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._handles[number])
        return found

    def __del__(self) -> None:
        for handle in self._handles:
            self._free(handle)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, unless it is made of others."""
    if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]


def plain_in(out: Any) -> list[torch.Tensor]:
    """The plain tensors in what an operator returns, in order."""
    if type(out) is torch.Tensor:
        return [out]
    return [plain for tensor in tensors_in(out) for plain in plain_tensors(tensor)]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in a storage that others can share, at places that sizes and strides say.

    Those of a nested tensor of the older, strided layout are in one, but it has no sizes.
    """
    return tensor.layout is _strided and not (tensor.is_nested and type(tensor) in PLAIN)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor was changed in place; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without autograd history on the same memory, which counts changes together with it.

    With history, what is held could hold the graph that holds it. The dispatch key that shares the counter has to be let in
    again below autograd.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def counter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor without memory that counts changes in place together with this one; None where nothing can change unseen."""
    if type(tensor) is not torch.Tensor or tensor.is_inference():
        return None
    key = tensor.dtype, tensor.device
    if key not in _nothing:
        with _disable_current_modes():  # a recording mode would take it for an operator of the module
            _nothing[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    counter = torch.Tensor._make_subclass(torch.Tensor, tensor)  # `detach`, unseen by modes
    counter.data = _nothing[key]
    return counter


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it needs no gradient; else an alias: what is exchanged under a parameter (`.data =`) stays away."""
    return alias(tensor) if tensor.requires_grad else tensor


def looks_alike(tensor: torch.Tensor, view: View) -> bool:
    """Whether the tensor has this geometry."""
    return (
        tensor.dtype is view.dtype
        and tensor.size() == view.size
        and tensor.storage_offset() == view.offset
        and tensor.stride() == view.stride
        and tensor.is_conj() is view.conj
        and tensor.is_neg() is view.neg
    )


def looked_at(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """The tensor of this geometry on the memory of `tensor`. To be called without gradients."""
    if looks_alike(tensor, view):
        return tensor
    if tensor.is_conj():
        tensor = tensor._conj()
    if tensor.is_neg():
        tensor = tensor._neg_view()
    if tensor.dtype is not view.dtype:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        tensor = tensor.as_strided((elements,), (1,), 0).view(view.dtype)
    tensor = tensor.as_strided(view.size, view.stride, view.offset)
    if view.conj:
        tensor = tensor._conj()
    return tensor._neg_view() if view.neg else tensor


def whole_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of the memory that the tensor looks at, in the same layout."""
    plain = looked_at(tensor, _flat(tensor)) if not _is_whole(tensor) else tensor
    return plain.clone(memory_format=torch.preserve_format)


def _is_whole(tensor: torch.Tensor) -> bool:
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes and not tensor.is_conj()


def _flat(tensor: torch.Tensor) -> View:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return View(-1, 0, -1, tensor.dtype, (elements,), (1,), 0, False, False)


def all_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns: containers, and attributes of objects (dataclasses, model outputs).

    Of objects that refer to very many others, the nearest are looked at. What is not found is not held, but made again.
    """
    found, seen, waiting = [], {id(tree)}, deque([tree])
    while waiting and len(seen) < _LOOKED_AT:
        item = waiting.popleft()
        if isinstance(item, torch.Tensor):
            found.append(item)
            continue
        for inner in _inside(item):
            if id(inner) not in seen and not isinstance(inner, _LEAVES):
                seen.add(id(inner))
                waiting.append(inner)
    return found


_LOOKED_AT = 4096
_LEAVES = (str, bytes, int, float, complex, type, type(None), torch.nn.Module, ModuleType, FunctionType)


def _inside(item: Any) -> Any:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset):
        return item
    return () if isinstance(item, _LEAVES) else getattr(item, "__dict__", {}).values()

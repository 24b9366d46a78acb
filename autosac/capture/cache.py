"""A dispatch cache for the capture's fake tensors.

FakeTensorMode's own cache costs about 100 microseconds a hit: it rebuilds a key of 17 fields per tensor and constructs each
output from scratch. Here shapes are static, operators are below autograd and outputs are plain strided tensors, so
(shape, stride, offset, dtype, device) per tensor is a complete key, and outputs are rebuilt from a recipe. An entry also
carries the trace signature of the call, so that a repeated call is described once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

_UNCACHEABLE = (torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_NAMESPACES = ("aten", "prims", "fsdp", "_c10d_functional")
_MEMOS: dict[str, Any] = {
    f"_{name}{suffix}": None
    for name in ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo")
    for suffix in ("", "_vc", "_epoch")
}
# Torch 2.13 keeps the device behind a property, 2.11 in a plain attribute.
_DEVICE = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"
_make_subclass = torch.Tensor._make_subclass
_empty_strided = torch.empty_strided


class NotCacheable(Exception):
    """The call has no complete key."""


class Entry:
    """How to rebuild the outputs of one call, and the trace's signature for it (-1 until the recorder has made it)."""

    __slots__ = ("pack", "recipes", "signature")

    def __init__(self, pack: Callable[[list[Any]], Any] | None, recipes: list[tuple[Any, ...]]) -> None:
        self.pack = pack
        self.recipes = recipes
        self.signature = -1


def describe(key: list[Any], args: Iterable[Any], tensors: list[FakeTensor]) -> None:
    """Append the key of `args` to `key` and its tensors, in order, to `tensors`. NotCacheable for anything unusual."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None:
                raise NotCacheable
            key += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device)
            tensors.append(arg)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            describe(key, arg, tensors)
        elif kind is dict:
            key.append(tuple(arg))
            describe(key, arg.values(), tensors)
        elif isinstance(arg, torch.Tensor) or kind is torch.SymInt:
            raise NotCacheable
        else:
            key.append(kind)
            key.append(arg)


class DispatchCache:
    """Runs an operator on fake tensors: from the cache, or by FakeTensorMode and into the cache."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.entries: dict[tuple[Any, ...], Entry] = {}
        self._cacheable: dict[Any, bool] = {}
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def run(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Entry | None, list[FakeTensor] | None]:
        """(outputs, entry, input tensors); entry and tensors are None where the call cannot be cached."""
        if not self._is_cacheable(func):
            return self.mode.dispatch(func, types, args, kwargs), None, None
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        try:
            describe(key, args, tensors)
            if kwargs:
                key.append(tuple(kwargs))
                describe(key, kwargs.values(), tensors)
            frozen = tuple(key)
            entry = self.entries.get(frozen)
        except (NotCacheable, TypeError):
            return self.mode.dispatch(func, types, args, kwargs), None, None
        if entry is not None and entry.pack is not None:
            return entry.pack([self._build(recipe, tensors) for recipe in entry.recipes]), entry, tensors
        out = self.mode.dispatch(func, types, args, kwargs)
        if entry is None and out is not NotImplemented:
            entry = self.entries[frozen] = self._entry(out, tensors)
        return out, entry, tensors

    def _is_cacheable(self, func: Any) -> bool:
        known = self._cacheable.get(func)
        if known is None:
            known = self._cacheable[func] = (
                isinstance(func, torch._ops.OpOverload)
                and func.namespace in _NAMESPACES
                and not any(tag in func.tags for tag in _UNCACHEABLE)
                and not func._schema.name.endswith(("set_", "resize_"))
            )
        return known

    def fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """A FakeTensor around a meta tensor, without FakeTensor.__new__'s checks."""
        tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        template = self._templates.get(device)
        if template is None:
            template = self._templates[device] = dict(
                _MEMOS, **{_DEVICE: device}, fake_mode=self.mode, constant=None, pytype=None, dispatch_keys=None,
                real_tensor=None,
            )  # fmt: skip
        tensor.__dict__.update(template)
        return tensor

    def _build(self, recipe: tuple[Any, ...], tensors: list[FakeTensor]) -> Any:
        kind = recipe[0]
        if kind == "value":
            return recipe[1]
        if kind == "input":
            return tensors[recipe[1]]
        _, shape, stride, dtype, device, base, offset = recipe
        if base is None:
            return self.fake(_empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        meta = _empty_strided((0,), (1,), dtype=dtype, device="meta")
        meta.set_(tensors[base].untyped_storage(), offset, shape, stride)
        return self.fake(meta, device)

    def _entry(self, out: Any, tensors: list[FakeTensor]) -> Entry:
        """The entry for a call's outputs; one without `pack` if they cannot be rebuilt (it still holds the signature)."""
        flat, spec = pytree.tree_flatten(out)
        position = {id(t): i for i, t in enumerate(tensors)}
        base_of = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
        recipes: list[tuple[Any, ...]] = []
        fresh: set[int] = set()
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                recipes.append(("value", leaf))
            elif id(leaf) in position:
                recipes.append(("input", position[id(leaf)]))
            elif not isinstance(leaf, FakeTensor) or not _is_plain(leaf):
                return Entry(None, [])
            else:
                storage = leaf.untyped_storage()
                base = base_of.get(storage._cdata)
                if base is None:
                    if storage._cdata in fresh or leaf.storage_offset() or storage.nbytes() != _extent_bytes(leaf):
                        return Entry(None, [])
                    fresh.add(storage._cdata)
                recipes.append(
                    ("new", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.fake_device, base, leaf.storage_offset())
                )
        if len(flat) == 1 and out is flat[0]:
            return Entry(lambda leaves: leaves[0], recipes)
        if out is None:
            return Entry(lambda _: None, [])
        return Entry(lambda leaves: pytree.tree_unflatten(leaves, spec), recipes)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg() and tensor.constant is None


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.dtype.itemsize

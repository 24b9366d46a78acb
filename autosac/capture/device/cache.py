"""A dispatch cache for the capture's fake tensors.

FakeTensorMode's own cache costs about 100 microseconds a hit: it rebuilds a key of 17 fields per tensor and constructs each
output from scratch. Here shapes are static, operators are below autograd and inputs and outputs are plain strided tensors, so
(shape, stride, offset, dtype, device) per tensor is a complete key, and outputs are rebuilt from a recipe. An entry also
carries the trace signature of the call, so that a repeated call is described once. Lazily conjugated and negated tensors are
not plain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autosac.capture.device.operators import per_operator
from autosac.capture.device.recipes import (
    NOTHING,
    InputOutput,
    Known,
    Leaf,
    NewOutput,
    PlainOutput,
    Recipe,
    ViewOutput,
    known,
    recipe_of,
)

_UNCACHEABLE = (torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_NAMESPACES = ("aten", "prims", "fsdp", "_c10d_functional")
_MEMOS: dict[str, Any] = {
    f"_{name}{suffix}": None
    for name in ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo")
    for suffix in ("", "_vc", "_epoch")
}
# Torch 2.13 keeps the device behind a property, 2.11 in a plain attribute.
_DEVICE = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"
_META = torch.device("meta")
_make_subclass = torch.Tensor._make_subclass
_default_dtype = torch.get_default_dtype
_protect = torch._C._set_throw_on_mutable_data_ptr
_empty_strided = torch.empty_strided


class NotCacheable(Exception):
    """The call has no complete key."""


Build: TypeAlias = Callable[[list[FakeTensor]], Any]


class CachedCall:
    """How to build the outputs of one call from its input tensors (None: it has to run again), and the trace's signature
    for it (-1 until the recorder has made it).
    """

    __slots__ = ("build", "signature")

    def __init__(self, build: Build | None) -> None:
        self.build = build
        self.signature = -1


def describe(key: list[Any], args: Iterable[Any], tensors: list[FakeTensor]) -> None:
    """Append the key of `args` to `key` and its tensors, in order, to `tensors`. NotCacheable for anything unusual."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            dtype = arg.dtype
            if arg.constant is not None or arg.is_neg() or (dtype.is_complex and arg.is_conj()):
                raise NotCacheable
            key += (arg.shape, arg.stride(), arg.storage_offset(), dtype, arg.fake_device)
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
    """Runs an operator on fake tensors: from the cache, by a recipe of another process (`known`), or by FakeTensorMode and
    into the cache.
    """

    def __init__(self, mode: FakeTensorMode, known: Known = known) -> None:
        self.mode = mode
        self.known = known
        self.entries: dict[tuple[Any, ...], CachedCall] = {}
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def run(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, CachedCall | None, list[FakeTensor] | None]:
        """(outputs, entry, input tensors); entry and tensors are None where the call cannot be cached."""
        if not _is_cacheable(func):
            return self.mode.dispatch(func, types, args, kwargs), None, None
        key: list[Any] = [id(func), _default_dtype()]
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
        if entry is None and (recipe := self.known.recipe(frozen)) is not None:
            entry = self.entries[frozen] = CachedCall(self._built(recipe))
        if entry is not None and entry.build is not None:
            return entry.build(tensors), entry, tensors
        out = self.mode.dispatch(func, types, args, kwargs)
        if entry is None and out is not NotImplemented:
            recipe = recipe_of(out, tensors)
            if recipe is not None:
                self.known.found(func, frozen, recipe)
            # One that cannot be made again still holds the signature.
            entry = self.entries[frozen] = CachedCall(None if recipe is None else self._built(recipe))
        return out, entry, tensors

    def _tensor(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Build:
        """Builds a FakeTensor with memory of its own, without FakeTensor.__new__'s checks."""
        template = self._template(device)

        def build(_: list[FakeTensor]) -> FakeTensor:
            meta = _empty_strided(shape, stride, dtype=dtype, device=_META)
            tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
            _protect(tensor)
            tensor.__dict__.update(template)
            return tensor

        return build

    def _view(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, base: int, offset: int) -> Build:
        """Builds a FakeTensor over the memory of the input at position `base`."""
        template = self._template(device)

        def build(tensors: list[FakeTensor]) -> FakeTensor:
            if _is_inference() and not tensors[base].is_inference():  # a view of an ordinary tensor is an ordinary one
                with torch.inference_mode(mode=False):
                    return build(tensors)
            meta = _empty_strided((0,), (1,), dtype=dtype, device=_META)
            meta.set_(tensors[base].untyped_storage(), offset, shape, stride)
            tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
            _protect(tensor)
            tensor.__dict__.update(template)
            return tensor

        return build

    def _template(self, device: torch.device) -> dict[str, Any]:
        if device not in self._templates:
            self._templates[device] = dict(
                _MEMOS,
                **{_DEVICE: device},
                fake_mode=self.mode,
                constant=None,
                pytype=None,
                dispatch_keys=None,
                real_tensor=None,
            )
        return self._templates[device]

    def _built(self, recipe: Recipe) -> Build:
        """What makes the outputs of a recipe."""
        if recipe is NOTHING:
            return lambda _: None
        builds = list(map(self._leaf, recipe.leaves))
        kind, spec = recipe.kind, recipe.spec
        if kind is None:
            return builds[0]
        if spec is None:
            return lambda tensors: kind([build(tensors) for build in builds])
        return lambda tensors: pytree.tree_unflatten([build(tensors) for build in builds], spec)

    def _leaf(self, leaf: Leaf) -> Build:
        if type(leaf) is InputOutput:
            return operator.itemgetter(leaf.position)
        if type(leaf) is ViewOutput:
            return self._view(*leaf.layout, leaf.base, leaf.offset)
        if type(leaf) is NewOutput:
            return self._tensor(*leaf.layout)
        assert type(leaf) is PlainOutput
        value = leaf.value
        return lambda _: value


_is_inference = torch.is_inference_mode_enabled


@per_operator
def _is_cacheable(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace in _NAMESPACES
        and not any(tag in func.tags for tag in _UNCACHEABLE)
        and not func._schema.name.endswith(("set_", "resize_"))
    )

"""A dispatch cache for the capture's fake tensors.

FakeTensorMode's own cache costs about 100 microseconds a hit: it rebuilds a key of 17 fields per tensor and constructs each
output from scratch. Here shapes are static, operators are below autograd and outputs are plain strided tensors, so
(shape, stride, offset, dtype, device) per tensor is a complete key, and outputs are rebuilt from a recipe. An entry also
carries the trace signature of the call, so that a repeated call is described once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autosac.capture.device.operators import per_operator

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
        if entry is not None and entry.build is not None:
            return entry.build(tensors), entry, tensors
        out = self.mode.dispatch(func, types, args, kwargs)
        if entry is None and out is not NotImplemented:
            entry = self.entries[frozen] = self._entry(out, tensors)
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

    def _entry(self, out: Any, tensors: list[FakeTensor]) -> CachedCall:
        """The entry for a call's outputs; one without `build` if they cannot be rebuilt (it still holds the signature)."""
        if out is None:
            return CachedCall(lambda _: None)
        flat, spec = pytree.tree_flatten(out)
        position = {id(t): i for i, t in enumerate(tensors)}
        base_of = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
        builds: list[Build] = []
        fresh: set[int] = set()
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                builds.append(lambda _, value=leaf: value)  # type: ignore[misc]
            elif id(leaf) in position:
                builds.append(operator.itemgetter(position[id(leaf)]))
            elif not isinstance(leaf, FakeTensor) or not _is_plain(leaf):
                return CachedCall(None)
            else:
                storage = leaf.untyped_storage()
                base = base_of.get(storage._cdata)
                layout = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.fake_device
                if base is not None:
                    builds.append(self._view(*layout, base, int(leaf.storage_offset())))
                    continue
                if storage._cdata in fresh or leaf.storage_offset() or storage.nbytes() != _extent_bytes(leaf):
                    return CachedCall(None)
                fresh.add(storage._cdata)
                builds.append(self._tensor(*layout))
        if len(flat) == 1 and out is flat[0]:
            return CachedCall(builds[0])
        kind = type(out)
        if kind in (list, tuple) and len(out) == len(flat) and all(map(operator.is_, out, flat)):
            return CachedCall(lambda tensors: kind([build(tensors) for build in builds]))
        return CachedCall(lambda tensors: pytree.tree_unflatten([build(tensors) for build in builds], spec))


_is_inference = torch.is_inference_mode_enabled


@per_operator
def _is_cacheable(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace in _NAMESPACES
        and not any(tag in func.tags for tag in _UNCACHEABLE)
        and not func._schema.name.endswith(("set_", "resize_"))
    )


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg() and tensor.constant is None


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.dtype.itemsize

"""Simulated tensors that a script writes into files, or gives to other processes or libraries.

They have no values: what comes back is a tensor like the one that went.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.patches.after_import import after_import
from autosac.capture.patches.loading import Loader, device_for
from autosac.capture.patches.unwritten import UnwrittenFiles


def install(note: Callable[[str], None], written: bool) -> None:
    """All of it. `note` gets what was left out, the first time. `written`: checkpoints are."""
    _checkpoints(note, written)
    _copies()
    _shared_memory()


def _checkpoints(note: Callable[[str], None], written: bool) -> None:
    """Simulated tensors have no values: nothing is written, or zeros where a file is asked for.

    What a script loads again, because it has saved it before, is a copy of what it saved.
    """
    unwritten, loader = UnwrittenFiles(), Loader()
    unwritten.install()
    loader.install()

    def writer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if not written:
                note("checkpoints are not written: simulated tensors have no values (--checkpoints writes zeros)")
                return None
            note("checkpoints hold zeros in place of simulated tensors")
            found = pytree.tree_map(_zeros, (args, kwargs))
            with torch._C._DisableTorchDispatch():
                return original(*found[0], **found[1])

        return save

    write = writer(torch.save)

    @functools.wraps(torch.save)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not written:
            saved: dict[Any, Any] = {}
            contents = pytree.tree_map(functools.partial(_Saved.of, known=saved), obj)
            unwritten.write(f, contents, sum(each.nbytes for each in saved.values()))
        return write(obj, f, *args, **kwargs)

    @functools.wraps(torch.load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        contents = unwritten.get(f)
        if contents is None:
            return loader.load(f, map_location, *args, **kwargs)
        loaded: dict[_Saved, torch.Tensor] = {}

        def one(value: Any) -> Any:
            if not isinstance(value, _Saved):
                return copy.deepcopy(value)
            if value not in loaded:
                loaded[value] = value.loaded(device_for(map_location, str(value.device)))
            return loaded[value]

        return pytree.tree_map(one, contents)

    vars(torch)["save"] = torch.serialization.save = save
    vars(torch)["load"] = torch.serialization.load = load

    def replace(*names: str) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            for name in names:
                vars(module)[name] = writer(vars(module)[name])

        return act

    after_import("safetensors.torch", replace("save_file", "save_model"))
    after_import("torch.distributed.checkpoint.state_dict_saver", replace("save", "async_save"))


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A simulated tensor that was saved: it takes no memory on the device until it is loaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any, known: dict[Any, Any] | None = None) -> Any:
        """Everything else is itself. `known`: those of the same file, of which each is saved once."""
        if not isinstance(value, FakeTensor):
            return value.clone() if type(value) is torch.Tensor and known is not None else value
        saved = cls(tuple(value.shape), value.stride(), value.dtype, value.device)
        if known is None:
            return saved
        place = value.untyped_storage()._cdata, value.storage_offset(), saved.shape, saved.stride, saved.dtype
        return known.setdefault(place, saved)

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def loaded(self, device: Any) -> torch.Tensor:
        """A new tensor like it, on this device or (None) where it was."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


def _copies() -> None:
    """What `pickle`, `copy` and DLPack would read below every mode."""
    fake: Any = FakeTensor

    def reduced(self: torch.Tensor, _: Any) -> tuple[Any, ...]:
        return _unpickled, (_Saved.of(self), isinstance(self, torch.nn.Parameter), self.requires_grad)

    def copied(self: torch.Tensor) -> torch.Tensor:
        return _like(self.detach(), isinstance(self, torch.nn.Parameter), self.requires_grad)

    fake.__reduce_ex__, fake.__copy__ = reduced, copied
    from_other: Callable[..., torch.Tensor] = torch.utils.dlpack.from_dlpack

    def from_dlpack(ext_tensor: Any, **kwargs: Any) -> torch.Tensor:
        return ext_tensor.detach() if isinstance(ext_tensor, FakeTensor) else from_other(ext_tensor, **kwargs)

    vars(torch)["from_dlpack"] = torch.utils.dlpack.from_dlpack = from_dlpack


def _unpickled(saved: _Saved, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    return _like(saved.loaded(None), is_parameter, requires_grad)


def _like(data: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    return torch.nn.Parameter(data, requires_grad) if is_parameter else data.requires_grad_(requires_grad)


def _shared_memory() -> None:
    """Memory of a GPU is always shared, and what stands for a large tensor of the host needs none."""
    fake: Any = FakeTensor
    fake.share_memory_ = lambda self: self
    fake.is_shared = lambda _: True


def _zeros(value: Any) -> Any:
    """What stands for a simulated tensor in a file."""
    if not isinstance(value, FakeTensor):
        return value
    with torch._C._DisableTorchDispatch():
        return torch.zeros(tuple(value.shape), dtype=value.dtype)

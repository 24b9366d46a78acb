"""Simulated tensors that a script writes into files, or gives to other processes or libraries.

They have no values: what comes back is a tensor like the one that went.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.patches.after_import import after_import


def install(note: Callable[[str], None], written: bool) -> None:
    """All of it. `note` gets what was left out, the first time. `written`: checkpoints are."""
    _checkpoints(note, written)
    _copies()
    _shared_memory()


def _checkpoints(note: Callable[[str], None], written: bool) -> None:
    """Simulated tensors have no values: nothing is written, or zeros where a file is asked for.

    What a script loads again, because it has saved it before, is a copy of what it saved.
    """
    unwritten: dict[Any, tuple[Any, Any]] = {}

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

    write, read = writer(torch.save), torch.load

    @functools.wraps(torch.save)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not written:  # with the file, so that no other one gets the identity of a buffer
            unwritten[_place(f)] = f, pytree.tree_map(_Saved.of, obj)
        return write(obj, f, *args, **kwargs)

    @functools.wraps(read)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = unwritten.get(_place(f))
        if found is None:
            return read(f, map_location, *args, **kwargs)
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        return pytree.tree_map(lambda x: x.loaded(device) if isinstance(x, _Saved) else copy.deepcopy(x), found[1])

    vars(torch)["save"] = torch.serialization.save = save
    vars(torch)["load"] = torch.serialization.load = load

    def replace(*names: str) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            for name in names:
                vars(module)[name] = writer(vars(module)[name])

        return act

    after_import("safetensors.torch", replace("save_file", "save_model"))
    after_import("torch.distributed.checkpoint.state_dict_saver", replace("save", "async_save"))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A simulated tensor that was saved: it takes no memory on the device until it is loaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """Everything else is itself."""
        if not isinstance(value, FakeTensor):
            return value
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def loaded(self, device: Any) -> torch.Tensor:
        """A new tensor like it, on this device or (None) where it was."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


def _place(file: Any) -> Any:
    """Where a file is: its path, however it is given, or the buffer itself."""
    name = getattr(file, "name", file)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else id(file)


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

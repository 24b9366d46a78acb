"""Simulated tensors that a script writes into files, or gives to other processes or libraries.

They have no values: what comes back is a tensor like the one that went.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.patches.after_import import after_import
from autosac.capture.patches.checkpoints import LibraryCheckpoints
from autosac.capture.patches.loading import Loader, device_for
from autosac.capture.patches.saved import Saved, contents_of, loaded_from
from autosac.capture.patches.shared_files import SharedFiles
from autosac.capture.patches.unwritten import UnwrittenFiles
from autosac.errors import UsageError

_NOT_WRITTEN = "checkpoints are not written: simulated tensors have no values (--checkpoints writes zeros)"

_OTHER_PROCESS = (
    "the script gives simulated tensors to a process that it starts (multiprocessing, spawn), where there is no simulated "
    "GPU: what trains there cannot be simulated. If it starts the ranks of torch.distributed, let --nproc do that; "
    "workers of a data loader get no tensors that are on the GPU"
)


def install(note: Callable[[str], None], written: bool, shared: Path | None) -> None:
    """All of it. `note` gets what was left out, the first time. `written`: checkpoints are. `shared`: for all ranks."""
    _checkpoints(note, written, SharedFiles(shared) if shared is not None else None)
    _copies()
    _shared_memory()


def _checkpoints(note: Callable[[str], None], written: bool, shared: SharedFiles | None) -> None:
    """Simulated tensors have no values: nothing is written, or zeros where a file is asked for.

    What a script loads again, because it has saved it before, is a copy of what it saved.
    """
    unwritten, loader = UnwrittenFiles(shared), Loader()
    unwritten.install()
    loader.install()

    def writer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if not written:
                note(_NOT_WRITTEN)
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
            unwritten.write(f, *contents_of(obj))
        return write(obj, f, *args, **kwargs)

    @functools.wraps(torch.load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        contents = unwritten.get(f)
        if contents is None:
            return loader.load(f, map_location, *args, **kwargs)
        return loaded_from(contents, lambda device: device_for(map_location, str(device)))

    vars(torch)["save"] = torch.serialization.save = save
    vars(torch)["load"] = torch.serialization.load = load

    def replace(*names: str) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            for name in names:
                vars(module)[name] = writer(vars(module)[name])

        return act

    if not written:
        LibraryCheckpoints(unwritten, lambda: note(_NOT_WRITTEN)).install()
        return
    after_import("safetensors.torch", replace("save_file", "save_model"))
    after_import("torch.distributed.checkpoint.state_dict_saver", replace("save", "async_save"))


def _copies() -> None:
    """What `pickle`, `copy` and DLPack would read below every mode."""
    fake: Any = FakeTensor

    def reduced(self: torch.Tensor, _: Any) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            raise UsageError(_OTHER_PROCESS)
        return _unpickled, (Saved.of(self), isinstance(self, torch.nn.Parameter), self.requires_grad)

    def copied(self: torch.Tensor) -> torch.Tensor:
        return _like(self.detach(), isinstance(self, torch.nn.Parameter), self.requires_grad)

    fake.__reduce_ex__, fake.__copy__ = reduced, copied
    from_other: Callable[..., torch.Tensor] = torch.utils.dlpack.from_dlpack

    def from_dlpack(ext_tensor: Any, **kwargs: Any) -> torch.Tensor:
        return ext_tensor.detach() if isinstance(ext_tensor, FakeTensor) else from_other(ext_tensor, **kwargs)

    vars(torch)["from_dlpack"] = torch.utils.dlpack.from_dlpack = from_dlpack


def _unpickled(saved: Saved, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
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

"""Files with real numbers that a script loads: checkpoints of earlier runs, data sets.

Under fake tensors `torch.load` makes meta tensors, without numbers and on no device. Here what belongs on the host is
loaded as ever, and what belongs on the GPU is copied there. A large file is mapped, not read: what a model is initialised
with takes no memory of the host.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._utils as rebuilding
from torch.serialization import _is_zipfile

_LARGE_BYTES = 2**28


class Loader:
    """Stands for `torch.load` of a file."""

    def __init__(self) -> None:
        self._read = torch.load
        self._rebuild: Callable[..., torch.Tensor] = rebuilding._rebuild_tensor
        self._devices: dict[int, torch.device] | None = None  # of the storages that do not stay on the host
        self._copies: dict[Any, torch.Tensor] = {}

    def install(self) -> None:
        """Tensors are put together where `torch.load` reads them."""
        vars(rebuilding)["_rebuild_tensor"] = self._rebuilt

    def load(self, file: Any, map_location: Any, *args: Any, **kwargs: Any) -> Any:
        """What is in it."""
        if str(map_location) == "meta":
            return self._read(file, map_location, *args, **kwargs)
        if kwargs.get("mmap") is None and len(args) < 1 and _is_large(file):
            kwargs["mmap"] = True
        devices: dict[int, torch.device] = {}

        def place(storage: Any, location: str) -> Any:
            device = device_for(map_location, location, storage)
            if device.type != "cpu":
                devices[storage._cdata] = device
            return storage

        with self._reading(devices, functools.partial(device_for, map_location)):
            return self._read(file, place, *args, **kwargs)

    @contextlib.contextmanager
    def _reading(self, devices: dict[int, torch.device], restored: Callable[[str], torch.device]) -> Iterator[None]:
        """Values are read, though the mode of fake tensors is active."""
        replaced = (
            (torch._guards, "detect_fake_mode", lambda *_: None),
            (rebuilding, "_get_restore_location", restored),
        )
        before = [(place, name, vars(place)[name]) for place, name, _ in replaced]
        outer = self._devices, self._copies
        self._devices, self._copies = devices, {}
        for place, name, value in replaced:
            vars(place)[name] = value
        try:
            yield
        finally:
            for place, name, value in before:
                vars(place)[name] = value
            self._devices, self._copies = outer

    def _rebuilt(self, storage: Any, storage_offset: Any, size: Any, stride: Any) -> torch.Tensor:
        """A tensor of the file; its memory is copied to the GPU once, however many tensors share it."""
        found = self._rebuild(storage, storage_offset, size, stride)
        device = (self._devices or {}).get(storage._untyped_storage._cdata)
        if device is None:
            return found
        key = storage._untyped_storage._cdata, found.dtype
        with torch.no_grad():
            if key not in self._copies:
                length = storage._untyped_storage.nbytes() // found.element_size()
                if found.numel() == length and found.is_contiguous():
                    self._copies[key] = found.to(device)
                    return self._copies[key]
                self._copies[key] = self._rebuild(storage, 0, (length,), (1,)).to(device)
            return self._copies[key].as_strided(tuple(size), tuple(stride), storage_offset)


def device_for(map_location: Any, location: str, storage: Any = None) -> torch.device:
    """Where `torch.load` would put a storage that was saved at this location."""
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif isinstance(map_location, (str, torch.device)):
        location = str(map_location)
    elif callable(map_location):
        answer = map_location(_Asked(storage), location)
        return answer.device if isinstance(answer, _Asked) else torch.device(location if answer is None else "cpu")
    return torch.device(location)


class _Asked:
    """The storage that a function of the script's is asked about: on the host, until it says ``storage.cuda()``."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.device = torch.device("cpu")

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> _Asked:
        """It belongs on a GPU."""
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self

    def cpu(self) -> _Asked:
        """It stays."""
        self.device = torch.device("cpu")
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def _is_large(file: Any) -> bool:
    """Whether it is better mapped: PyTorch can do so with zip files."""
    if not isinstance(file, (str, os.PathLike)):
        return False
    path = Path(file)
    if not path.is_file() or path.stat().st_size < _LARGE_BYTES:
        return False
    with path.open("rb") as opened:
        return bool(_is_zipfile(opened))

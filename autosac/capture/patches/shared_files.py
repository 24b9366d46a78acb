"""Unwritten files that the ranks of a script share: what one of them has saved, others load and find in its folder.

A file in the folder of the ranks' messages holds the contents of an unwritten one. Its name says which folder that is in, and
its own name there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

_END = ".pickle"
_names, _remove, _replace = os.listdir, os.remove, os.replace  # before scripts' own calls are answered otherwise


class SharedFiles:
    """Those in `folder`, by their places."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, place: str, contents: Any, nbytes: int) -> None:
        """It has been written, or written again."""
        data = io.BytesIO()
        try:
            _Pickler(data).dump((contents, nbytes))
        except (pickle.PicklingError, AttributeError, TypeError):  # nobody could read it
            return
        file = self._file(place)
        unfinished = f"{file}.{os.getpid()}"
        Path(unfinished).write_bytes(data.getvalue())
        _replace(unfinished, file)

    def get(self, place: str) -> tuple[Any, int] | None:
        """Contents and size; None if no rank has written it."""
        try:
            data = Path(self._file(place)).read_bytes()
        except FileNotFoundError:
            return None
        found: tuple[Any, int] = pickle.loads(data)
        return found

    def drop(self, place: str) -> None:
        """It has been removed."""
        with contextlib.suppress(FileNotFoundError):
            _remove(self._file(place))

    def names_in(self, folder: str) -> Iterator[str]:
        """Names of the files in a folder."""
        prefix = _prefix(folder)
        for name in _names(self._folder):
            if name.startswith(prefix) and name.endswith(_END):
                yield unquote(name.removeprefix(prefix).removesuffix(_END))

    def _file(self, place: str) -> str:
        folder, name = os.path.split(place)
        return f"{self._folder}{os.sep}{_prefix(folder)}{quote(name, safe='')}{_END}"


class _Pickler(pickle.Pickler):
    """Real tensors by their bytes: PyTorch would save them with `torch.save`, which is answered otherwise."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        with torch._C._DisableTorchDispatch():
            data = obj.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _prefix(folder: str) -> str:
    return f"unwritten-{hashlib.sha256(folder.encode()).hexdigest()[:16]}-"

"""Files that a script has written as far as it can tell: no byte of them is on disk.

Scripts rename a checkpoint when it is complete, ask for its size, link it as the latest one and remove old ones. `os` and
`shutil` answer for files that are not there, and a file that was there before, under the same name, is left alone. Listings
of folders do not show unwritten files.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MARK = b"autosac: unwritten %d\n"
_LONGEST_MARK = 64


class UnwrittenFiles:
    """What they would hold, by their places. A buffer in memory holds a mark, which can be copied and sent."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Any, int]] = {}
        self._numbers = itertools.count()

    def write(self, file: Any, contents: Any, nbytes: int) -> None:
        """`nbytes` is how large the file would be."""
        place = _place(file)
        if place is None:
            mark = _MARK % next(self._numbers)
            file.write(mark)
            place = mark.decode()
        self._files[place] = contents, nbytes

    def get(self, file: Any) -> Any:
        """Its contents; None if it is no such file."""
        found = self._files.get(_place(file) or "") or self._files.get(_mark_in(file))
        return found[0] if found is not None else None

    def install(self) -> None:
        """Answer for them."""
        module: Any = os
        for name in ("rename", "replace"):
            vars(module)[name] = self._moving(getattr(module, name))
        for name in ("remove", "unlink"):
            vars(module)[name] = self._removing(getattr(module, name))
        for name in ("symlink", "link"):
            vars(module)[name] = self._linking(getattr(module, name))
        vars(module)["stat"] = self._described(module.stat)
        for name in ("copyfile", "copy", "copy2"):
            vars(shutil)[name] = self._copying(getattr(shutil, name))

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            old, new = os.path.realpath(src), os.path.realpath(dst)
            moved = [place for place in self._files if place == old or _is_below(place, old)]
            if not moved or os.path.lexists(src):
                original(src, dst, *args, **kwargs)
            for place in moved:
                self._files[new + place[len(old) :]] = self._files.pop(place)

        return move

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._files.pop(os.path.realpath(path), None) is None:
                original(path, *args, **kwargs)

        return remove

    def _linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            target = self._files.get(os.path.realpath(Path(dst).parent / src))
            target = target or self._files.get(os.path.realpath(src))
            if target is None:
                original(src, dst, *args, **kwargs)
            else:
                self._files[os.path.realpath(dst)] = target

        return link

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copy(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._files.get(os.path.realpath(src))
            if found is None:
                return original(src, dst, *args, **kwargs)
            place = Path(dst) / Path(src).name if Path(dst).is_dir() else dst
            self._files[os.path.realpath(place)] = found
            return place

        return copy

    def _described(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def describe(path: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._files.get(os.path.realpath(path)) if self._may_be_one(path) else None
            if found is None:
                return original(path, *args, **kwargs)
            now_s = int(time.time())
            return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, found[1], now_s, now_s, now_s))

        return describe

    def _may_be_one(self, path: Any) -> bool:
        """A quick look: many files are asked for, and few are not there."""
        if not self._files or not isinstance(path, (str, os.PathLike)):
            return False
        name = Path(path).name
        return any(place.endswith(name) for place in self._files)


def _place(file: Any) -> str | None:
    """Where a file is: its path, however it is given. None: a buffer in memory."""
    name = getattr(file, "name", file)
    return os.path.realpath(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else None


def _mark_in(file: Any) -> str:
    """The mark that a buffer holds, or a file to which a script has written such a buffer; nothing if there is none."""
    if isinstance(file, (str, os.PathLike)):
        if not Path(file).is_file():
            return ""
        with Path(file).open("rb") as opened:
            return _mark_in(opened)
    if not hasattr(file, "seek"):
        return ""
    position = file.tell()
    file.seek(0)
    head = bytes(file.read(_LONGEST_MARK))
    file.seek(position)
    return head.split(b"\n")[0].decode(errors="replace") + "\n"


def _is_below(place: str, folder: str) -> bool:
    return place.startswith(folder + os.sep)

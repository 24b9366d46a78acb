"""Files that a script has written as far as it can tell: no byte of them is on disk.

Scripts rename a checkpoint when it is complete, ask for its size, link it as the latest one and remove old ones. `os` and
`shutil` answer for files that are not there, and a file that was there before, under the same name, is left alone. Listings
of folders (`os.listdir`, `os.scandir`, and so `glob` and `pathlib`) show them, too. Other ranks of the script find them
(`shared_files`).
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autosac.capture.patches.shared_files import SharedFiles

_MARK = b"autosac: unwritten %d of %d\n"
_LONGEST_MARK = 64


class UnwrittenFiles:
    """What they would hold, by their places. A buffer in memory holds a mark, which can be copied and sent."""

    def __init__(self, shared: SharedFiles | None = None) -> None:
        self._files: dict[str, tuple[Any, int]] = {}
        self._shared = shared
        self._numbers = itertools.count()

    def write(self, file: Any, contents: Any, nbytes: int) -> None:
        """`nbytes` is how large the file would be."""
        place = _place(file)
        if place is None:
            mark = _MARK % (next(self._numbers), os.getpid())
            file.write(mark)
            place = mark.decode()
        self._put(place, (contents, nbytes))

    def get(self, file: Any) -> Any:
        """Its contents; None if it is no such file."""
        found = self._find(_place(file) or "") or self._find(_mark_in(file))
        return found[0] if found is not None else None

    def _put(self, place: str, found: tuple[Any, int]) -> None:
        self._files[place] = found
        if self._shared is not None:
            self._shared.put(place, *found)

    def _take(self, place: str) -> tuple[Any, int] | None:
        """What was there, and is no more."""
        found = self._find(place)
        self._files.pop(place, None)
        if found is not None and self._shared is not None:
            self._shared.drop(place)
        return found

    def _find(self, place: str) -> tuple[Any, int] | None:
        found = self._files.get(place)
        if found is None and self._shared is not None and place:
            found = self._shared.get(place)
        return found

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
        vars(module)["listdir"] = self._listing(module.listdir)
        vars(module)["scandir"] = self._scanning(module.scandir)
        vars(shutil)["rmtree"] = self._clearing(shutil.rmtree)
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
                found = self._take(place)
                if found is not None:
                    self._put(new + place[len(old) :], found)

        return move

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._take(os.path.realpath(path)) is None:
                original(path, *args, **kwargs)

        return remove

    def _linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            target = self._find(os.path.realpath(Path(dst).parent / src)) or self._find(os.path.realpath(src))
            if target is None:
                original(src, dst, *args, **kwargs)
            else:
                self._put(os.path.realpath(dst), target)

        return link

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copy(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._find(os.path.realpath(src))
            if found is None:
                return original(src, dst, *args, **kwargs)
            place = Path(dst) / Path(src).name if Path(dst).is_dir() else dst
            self._put(os.path.realpath(place), found)
            return place

        return copy

    def _described(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def describe(path: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._find(os.path.realpath(path)) if self._may_be_one(path) else None
            if found is None:
                return original(path, *args, **kwargs)
            now_s = int(time.time())
            return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, found[1], now_s, now_s, now_s))

        return describe

    def _clearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                folder = os.path.realpath(path)
                for place in [place for place in self._files if _is_below(place, folder)]:
                    self._take(place)
            return original(path, *args, **kwargs)

        return remove

    def _names_in(self, path: Any) -> list[str]:
        """Of unwritten files in a folder, in order. Those of a folder given as a number are not known."""
        if not isinstance(path, (str, os.PathLike)):
            return []
        folder = os.path.realpath(path)
        own = [Path(place).name for place in self._files if str(Path(place).parent) == folder]
        return sorted({*own, *(self._shared.names_in(folder) if self._shared is not None else ())})

    def _listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def names(path: Any = ".") -> Any:
            found = original(path)
            return [*found, *(name for name in self._names_in(path) if name not in found)]

        return names

    def _scanning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scan(path: Any = ".") -> Any:
            found, names = original(path), self._names_in(path)
            return _Scan(found, [UnwrittenEntry(str(Path(path, name))) for name in names]) if names else found

        return scan

    def _may_be_one(self, path: Any) -> bool:
        """A quick look: many files are asked for, and few are not there."""
        if not isinstance(path, (str, os.PathLike)):
            return False
        if self._shared is not None:
            return True
        name = Path(path).name
        return any(place.endswith(name) for place in self._files)


class UnwrittenEntry:
    """An `os.DirEntry`."""

    def __init__(self, path: str) -> None:
        self.path, self.name = path, Path(path).name

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return False

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return 0

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return Path(self.path).stat()


class _Scan:
    """What `os.scandir` returns, with unwritten files after the others."""

    def __init__(self, real: Any, others: list[UnwrittenEntry]) -> None:
        self._real = real
        self._entries = self._all(others)

    def _all(self, others: list[UnwrittenEntry]) -> Iterator[Any]:
        there = set()
        for entry in self._real:
            there.add(entry.name)
            yield entry
        yield from (entry for entry in others if entry.name not in there)

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As that of the real one."""
        self._real.close()


def _place(file: Any) -> str | None:
    """Where a file is: its path, however it is given. None: a buffer in memory."""
    name = file if isinstance(file, os.PathLike) else getattr(file, "name", file)
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

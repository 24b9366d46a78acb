"""Folders for temporary files that do not outlive their owner for long, even if it is killed.

A folder is called ``autosac-run-...`` and lies where the system keeps temporary files. Its owner holds a lock (flock) on the
folder itself as long as it lives; the kernel releases the lock when the owner ends, however it ends. So a folder without a
lock belongs to nobody, and the next run removes it (`remove_abandoned`). Files that are being written have locks in the same
way (`autosac.files.writing`).

Whoever makes a folder and locks it a moment later may find that another run has removed it in between: then it makes another
one. Where the file system has no locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autosac.interrupts import signals_later

PREFIX = "autosac-run-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, removed in the end with all that is in it. The first one of a process removes what dead ones have left."""
    clean_once(tempfile.gettempdir())
    made: list[tuple[Path, int | None]] = []
    try:
        with signals_later():
            made.append(_new_folder())
        yield made[0][0]
    finally:
        with signals_later():
            for path, lock in made:
                shutil.rmtree(path, ignore_errors=True)  # what a process that is ending still writes: the next run's
                if lock is not None:
                    os.close(lock)


def _new_folder() -> tuple[Path, int | None]:
    """A folder and the descriptor that holds its lock (None: the file system has no locks)."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        held = try_lock(lock)
        if held is None:
            os.close(lock)
            return path, None
        if held and is_still(path, lock):
            return path, lock
        os.close(lock)


def new_file(folder: Path, prefix: str) -> tuple[Path, int]:
    """A new file in `folder`, open for writing and locked as long as it is (where the file system has locks)."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=prefix)
        path = Path(name)
        if try_lock(descriptor) is not False and is_still(path, descriptor):
            return path, descriptor
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder: whether nobody else holds the lock. None if its file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_still(path: Path, descriptor: int) -> bool:
    """Whether `path` still is the file or folder that is open under `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@functools.cache
def clean_once(folder: str) -> None:
    remove_abandoned(Path(folder), f"{PREFIX}*")


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove this user's files and folders in `folder` whose names fit `pattern` and of which nobody holds the lock."""
    with contextlib.suppress(OSError):  # the folder cannot be listed
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # another user's, or another run removes it at this very moment
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    if path.lstat().st_uid != os.getuid():
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if try_lock(descriptor) is not True or not is_still(path, descriptor):
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)

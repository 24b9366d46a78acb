"""Files that appear whole or not at all, and the checks that they can be written, made before the work begins.

A regular file is written beside its target and renamed: who reads it sees the old content or the new one. A symbolic link
stays what it is, and the file that it points to is replaced. What is neither (``/dev/null``, a FIFO) is written through.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from autosac.errors import UsageError
from autosac.files.temporary import new_file, remove_abandoned

_OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")
_INFIX = ".autosac-"
_PROBE_BYTES = 2**16  # a full disk may have room for a name


def write_bytes_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace the file at `path`, or write to the device or FIFO there; `private`: only this user may read a new file.

    What a writer of the same file has left that was killed is removed. OSError, which names `path`, if it cannot be written.
    """
    with _naming(path):
        mode = _mode(path)
        if _written_through(path, mode):
            with path.open("ab", buffering=0) as file:
                remaining = memoryview(content)
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            return
        target = _target(path)
        remove_unfinished(target.parent, target.name)
        temporary, handle = new_file(target.parent, _prefix(target))
        try:
            with os.fdopen(handle, "wb") as file:  # holds the lock until the file has its name
                file.write(content)
                file.flush()
                if not private:
                    temporary.chmod(stat.S_IMODE(mode) if mode is not None else 0o666 & ~_umask())
                temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text_atomically(path: Path, content: str) -> None:
    """`write_bytes_atomically` for text (UTF-8)."""
    write_bytes_atomically(path, content.encode(errors="backslashreplace"))


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of the file `name` in `folder` (None: of any file) have left there."""
    remove_abandoned(folder, f".*{_INFIX}*" if name is None else f"{glob.escape(_prefix(Path(name)))}*")


def check_output(path: Path) -> None:
    """UsageError, which names `path` and what is wrong, if it could not be written now."""
    try:
        mode = _mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a folder: give the name of a file")
        if mode is not None and _written_through(path, mode):
            if stat.S_ISSOCK(mode) or stat.S_ISBLK(mode):
                raise UsageError(f"{path} is a {'socket' if stat.S_ISSOCK(mode) else 'disk'}: give the name of a file")
            if not os.access(path, os.W_OK):
                raise UsageError(f"{path} cannot be written: permission denied")
            return
        target = _target(path)
        if not target.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {target.parent}")
        _probe(target.parent, target.name)
    except (OSError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path} cannot be written: {_reason(e)}") from e


def check_outputs(outputs: Sequence[tuple[str, Path | None]], inputs: Sequence[Path] = ()) -> None:
    """`check_output` for each (option, path) that is given. UsageError also if two are the same file, or one is an input."""
    seen: dict[str, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        check_output(path)
        if is_special(path):
            continue  # it takes several
        place = os.path.realpath(path)
        if place in seen:
            raise UsageError(f"{path} is given twice: for {seen[place]} and for {option}")
        seen[place] = option
        for source in inputs:
            if os.path.realpath(source) == place:
                raise UsageError(f"{option} {path} is also an input: it would be overwritten, give another name")


def check_folder(path: Path) -> None:
    """UsageError if files cannot be made in this folder; it is made, with those above it, if it does not exist."""
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a folder")
        path.mkdir(parents=True, exist_ok=True)
        _probe(path, "probe")
    except (OSError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"the folder {path} cannot be written: {_reason(e)}") from e


def is_special(path: Path) -> bool:
    """Whether there is something at `path` that is neither a file nor a folder: a device, a FIFO, standard output."""
    mode = _mode(path)
    return mode is not None and not stat.S_ISDIR(mode) and _written_through(path, mode)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors inside name `path`, not the temporary file."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno or errno.EIO, e.strerror or str(e), str(path)) from e


def _target(path: Path) -> Path:
    """The file that `path` leads to, which need not exist. OSError for links that lead to each other."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _mode(path: Path) -> int | None:
    """Of what `path` leads to; None if there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _written_through(path: Path, mode: int | None) -> bool:
    """Whether what is there stays, and is written to. So does what another program has opened (``/dev/stdout``)."""
    return mode is not None and (not stat.S_ISREG(mode) or str(path).startswith(_OPEN_FILES))


def _probe(folder: Path, name: str) -> None:
    """OSError if no file with this name could be made in the folder, or nothing be written to it."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=_prefix(Path(name)))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
        if len(os.fsencode(name)) > os.pathconf(folder, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _prefix(target: Path) -> str:
    """Of a temporary name beside the target; a long name must not make it too long."""
    return f".{target.name[:40]}{_INFIX}"


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "there is a null character in its name" if "null" in str(error) else str(error)

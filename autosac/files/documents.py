"""JSON and TOML that strangers wrote: read within bounds and parsed strictly.

`read_bounded` reads at most so much of a file, `decompress_bounded` unpacks at most so much of a gzip stream. `parse_json`
and `parse_toml` take UTF-8 only and refuse what Python's parsers accept or trip over: nesting without end, keys that are
given twice, NaN and infinities, whole numbers of thousands of digits. What is wrong is a DocumentError on one line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tomllib
import zlib
from pathlib import Path
from typing import Any, NoReturn

from autosac.display.printable import printable

TEXT_BYTES = 2**24
"""The largest file that a person may have written: settings, profiles, suites, job files."""
DATA_BYTES = 2**28
"""The largest file that a program has written: plans, measurements."""
# How large a gzipped file may become: JSON of traces shrinks to about a ninth.
_MOST_UNPACKED_BYTES, _UNPACKED_BYTES, _MOST_RATIO = 2**31, 2**24, 100
_MAX_DEPTH = 32
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 2**20


class DocumentError(ValueError):
    """What is wrong with a document, on one line."""


def read_bounded(path: str | Path, limit_bytes: int) -> bytes:
    """The file's content. OSError if it cannot be read or is longer than the limit.

    A FIFO without a writer is empty; one with a writer (``<(command)``) is read to its end.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as e:  # an embedded null character
        raise OSError(errno.EINVAL, "there is a null character in its name", printable(str(path))) from e
    with os.fdopen(handle, "rb") as file:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if hasattr(os, "set_blocking"):
            os.set_blocking(handle, True)
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes // 2**20} MiB", str(path))
    return content


def decompress_bounded(content: bytes, limit_bytes: int) -> bytes:
    """What a gzip stream holds. DocumentError if it is none, is cut off or damaged, or holds more than the limit."""
    parts: list[bytes] = []
    size = 0
    while content:
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            while not unpacker.eof:
                part = unpacker.decompress(content, _CHUNK)
                content = unpacker.unconsumed_tail
                if not part and not content and not unpacker.eof:
                    raise DocumentError("it is truncated")
                size += len(part)
                if size > limit_bytes:
                    raise DocumentError(f"it holds more than {limit_bytes // 2**20} MiB")
                parts.append(part)
        except zlib.error as e:
            raise DocumentError(f"it is damaged: {e}") from e
        content = unpacker.unused_data.lstrip(b"\0")  # padding
        if content and not content.startswith(_GZIP_MAGIC):
            raise DocumentError("something follows its end")
    return b"".join(parts)


def read_packed_json(path: str | Path) -> Any:
    """The gzipped JSON document in a file that a program has written. DocumentError if it is none, OSError if it is not there.

    Numbers need not be finite; nesting is bounded by Python's own limit.
    """
    content = read_bounded(path, DATA_BYTES)
    limit = min(_MOST_UNPACKED_BYTES, _UNPACKED_BYTES + _MOST_RATIO * len(content))
    return parse_json(decompress_bounded(content, limit), finite=False, max_depth=None)


def is_gzipped(path: str | Path) -> bool:
    """Whether a regular file begins as gzip's do; False if it cannot be read."""
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as file:
            return file.read(2) == _GZIP_MAGIC
    except (OSError, ValueError):
        return False


def parse_json(content: bytes, *, finite: bool = True, max_depth: int | None = _MAX_DEPTH) -> Any:
    """The JSON document in these bytes. `finite`: NaN and infinities are refused. DocumentError if it is none."""

    def constant(text: str) -> NoReturn:
        raise DocumentError(f"{text} is not a number")

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise DocumentError(f"{text} is too large")
        return value

    options: dict[str, Any] = {"parse_constant": constant, "parse_float": number} if finite else {}
    text = _text(content).removeprefix("\ufeff")
    try:
        document = json.loads(text, object_pairs_hook=_distinct, **options)
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except DocumentError:
        raise
    except ValueError as e:
        raise DocumentError(_digits(e)) from e
    if max_depth is not None and is_deeper(document, max_depth):
        raise DocumentError(f"it is nested more than {max_depth} levels deep")
    return document


def parse_toml(content: bytes) -> dict[str, Any]:
    """The TOML document in these bytes. DocumentError if it is none."""
    text = _text(content)
    if text.startswith("\ufeff"):
        raise DocumentError("it begins with a byte order mark, which TOML does not allow: save it as UTF-8 without BOM")
    try:
        document = tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except ValueError as e:
        raise DocumentError(_digits(e)) from e
    if is_deeper(document, _MAX_DEPTH):
        raise DocumentError(f"it is nested more than {_MAX_DEPTH} levels deep")
    _check_integers(document, "")
    return document


def _check_integers(value: Any, place: str) -> None:
    """DocumentError for a whole number that TOML does not have; the nesting has been checked."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise DocumentError(f"the number at {printable(place)} does not fit into 64 bits")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_integers(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_integers(item, f"{place}[{i}]")


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DocumentError(f"it is not UTF-8 text (byte {e.start})") from e


def _digits(error: ValueError) -> str:
    message = " ".join(str(error).split())
    return "a whole number has too many digits" if message.startswith("Exceeds the limit") else message


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DocumentError(f"the key {twice!r} is given twice")
    return found


def is_deeper(value: Any, levels: int) -> bool:
    """Whether containers lie in each other more than so many levels deep. Does not recurse."""
    layer = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                inner.extend(v for v in item.values() if isinstance(v, dict | list | tuple))
            elif isinstance(item, list | tuple):
                inner.extend(v for v in item if isinstance(v, dict | list | tuple))
        if not inner:
            return False
        layer = inner
    return True

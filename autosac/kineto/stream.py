"""Streams a JSON document whose bulk is one list of objects, plain or gzipped, in bounded memory.

Python's parser wants a whole document. Here it is given one member at a time out of a window that slides over the text.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from autosac.files.documents import DocumentError, is_gzipped

CHUNK_BYTES = 2**20
_MOST_BYTES = 2**35
MOST_MEMBER_CHARACTERS = 2**26
_BLANK = " \t\r\n"


def members(path: Path, bulk: str) -> Iterator[tuple[str, Any]]:
    """The members of the object in a file as (key, value); those of the list under the key `bulk` one by one, under
    that key.

    A file that is a list is taken for the bulk itself. DocumentError if the file is no such JSON, OSError if it cannot be
    read.
    """
    with gzip.open(path) if is_gzipped(path) else path.open("rb") as file:
        window = _Window(file)
        try:
            first = window.next_character()
            if first == "[":
                yield from ((bulk, value) for value in _items(window))
            elif first == "{":
                yield from _object(window, bulk)
            else:
                raise DocumentError("it does not begin with { or [")
            if window.next_character():
                raise DocumentError("something follows its end")
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise DocumentError(f"it is truncated or damaged: {e}") from e
        except UnicodeDecodeError as e:
            raise DocumentError("it is not UTF-8 text") from e
        except RecursionError:
            raise DocumentError("it is nested too deeply") from None


def _object(window: _Window, bulk: str) -> Iterator[tuple[str, Any]]:
    """The members behind an opening brace."""
    mark = window.next_character(peek=True)
    if mark == "}":
        window.next_character()
        return
    while True:
        key = window.value()
        if not isinstance(key, str) or window.next_character() != ":":
            raise DocumentError("a key and a colon are missing")
        if key == bulk:
            if window.next_character() != "[":
                raise DocumentError(f"{bulk} is not a list")
            yield from ((bulk, value) for value in _items(window))
        else:
            yield key, window.value()
        if not _continues(window, "}"):
            return


def _items(window: _Window) -> Iterator[Any]:
    """The items behind an opening bracket."""
    if window.next_character(peek=True) == "]":
        window.next_character()
        return
    while True:
        yield window.value()
        if not _continues(window, "]"):
            return


def _continues(window: _Window, end: str) -> bool:
    mark = window.next_character()
    if mark not in (",", end):
        raise DocumentError("it is truncated" if not mark else f"{mark!r} stands where a comma or {end} should")
    return mark == ","


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Window:
    """The part of the text that has been read and not yet been used."""

    def __init__(self, file: _Bytes) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._at, self._bytes, self._ended = "", 0, 0, False

    def _fill(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        if len(self._text) - self._at > MOST_MEMBER_CHARACTERS:
            raise DocumentError(f"one of its values is longer than {MOST_MEMBER_CHARACTERS // 2**20} MiB")
        # A value that does not fit is parsed again from its beginning: reading twice as much keeps that linear.
        chunk = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        self._bytes += len(chunk)
        if self._bytes > _MOST_BYTES:
            raise DocumentError(f"it holds more than {_MOST_BYTES // 2**30} GiB")
        self._ended = not chunk
        self._text = self._text[self._at :] + self._decode(chunk, final=self._ended)
        self._at = 0
        return True

    def next_character(self, *, peek: bool = False) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text):
                found = self._text[self._at]
                self._at += not peek
                return found
            if not self._fill():
                return ""

    def value(self) -> Any:
        """The next value."""
        self.next_character(peek=True)
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except ValueError as e:
                if self._fill():
                    continue
                if self._at >= len(self._text):
                    raise DocumentError("it is truncated") from e
                raise DocumentError(f"it is truncated or not valid JSON: {' '.join(str(e).split())[:120]}") from e
            if end == len(self._text) and self._fill():  # a number may go on
                continue
            self._at = end
            return value

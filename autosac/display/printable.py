"""Text from files and arguments, made safe to print: what a terminal would obey is shown as an escape instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def printable(text: str) -> str:
    """The text on one line, with control characters, invisible ones and lone surrogates written as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def unprintable_places(value: Any, place: str = "$") -> Iterator[str]:
    """Where in a document (as JSON or TOML holds it) there is a text, or a key, that is not printable."""
    if isinstance(value, str):
        if not value.isprintable():
            yield place
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and not key.isprintable():
                yield f"{place}.{printable(key)}"
            yield from unprintable_places(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from unprintable_places(item, f"{place}[{i}]")

"""Ways to spoil a document or the bytes of a file. Each says whether the result has to be refused.

An edit of a document (JSON, TOML) takes its table and says what it has done; where the value has a type that is checked,
the result must be refused. An edit of bytes turns a valid file into something else. `None` in place of True or False means:
either, as long as the answer is clear.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Path = tuple[str | int, ...]
ODD = {"\u0000odd [/bold]": [None]}  # of no type that any setting has
DEEP = 100_000


class Spoiled(NamedTuple):
    """A spoiled document or file."""

    content: bytes
    what: str
    refuse: bool | None


def leaves(value: Any, path: Path = ()) -> list[Path]:
    """The places of a document, containers too, the root excepted."""
    found: list[Path] = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += leaves(item, (*path, key))
    return found


def at(document: Any, path: Path) -> Any:
    """The value at a place."""
    for key in path:
        document = document[key]
    return document


def put(document: Any, path: Path, value: Any) -> None:
    """Replace the value at a place."""
    at(document, path[:-1])[path[-1]] = value


def wrong_type(value: Any, rng: random.Random) -> Any:
    """A value of another type than this one, and of none that could stand for it."""
    if isinstance(value, bool):
        return rng.choice(["yes", 1, 0, "maybe", 1.0, [True]])
    if isinstance(value, int | float):
        return rng.choice(["12", True, [1], "²", {"n": 1}, ""])
    if isinstance(value, str):
        return rng.choice([7, False, ["x"], {"x": 1}, 1.5])
    if isinstance(value, list):
        return rng.choice(["text", 5, {"0": 1}, True])
    return rng.choice(["text", [1], 3, False])


def edit_json(
    document: dict[str, Any],
    rng: random.Random,
    *,
    optional: Sequence[str] = (),
    free: Callable[[Path], bool] = lambda path: False,
) -> Spoiled:
    """One edit of a JSON document. `optional`: keys that may be missing; `free`: places at which anything may stand."""
    spoiled = copy.deepcopy(document)
    path = rng.choice(leaves(spoiled))
    value = at(spoiled, path)
    name = ".".join(map(str, path))
    kind = rng.choice(("type", "type", "odd", "null", "delete", "number", "deep", "twice", "huge", "rename"))
    refuse: bool | None = None if free(path) else True
    empty_column = "columns" in path[:-1] and value == []  # of a kind of events that does not occur
    if kind in ("type", "odd", "null"):
        new = {"type": wrong_type(value, rng), "odd": ODD, "null": None}[kind]
        put(spoiled, path, new)
        if kind == "null" and (value is None or path[-1] in optional or path[-1] in ("peak_reserved_bytes", "msps")):
            refuse = None
        if kind == "type" and value is None:
            refuse = None
        return Spoiled(_json(spoiled), f"{name} = {new!r}", refuse)
    if kind == "delete":
        parent = at(spoiled, path[:-1])
        del parent[path[-1]]
        may_miss = isinstance(parent, list) or path[-1] in optional or empty_column
        return Spoiled(_json(spoiled), f"without {name}", None if may_miss else refuse)
    if kind == "rename":
        parent = at(spoiled, path[:-1])
        if isinstance(parent, dict):
            parent["x" + str(path[-1])] = parent.pop(path[-1])
            return Spoiled(_json(spoiled), f"{name} renamed", None if path[-1] in optional or empty_column else refuse)
        put(spoiled, path, ODD)
        return Spoiled(_json(spoiled), f"{name} odd", refuse)
    marker = f"marker{rng.random()}"
    if kind == "number":
        text = rng.choice(
            ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "-7e300", "01", "+1", "0x10", "1_0")
        )
        refuse = refuse if text not in ("1e999", "-1e999", "-7e300") else (None if free(path) else True)
    elif kind == "deep":
        text = "[" * DEEP + "]" * DEEP if rng.random() < 0.5 else '{"a":' * DEEP + "1" + "}" * DEEP
    elif kind == "huge":
        text = str(10 ** rng.choice((19, 30, 400)))
        refuse = refuse if not isinstance(value, float) else None if free(path) else True
    else:
        text = json.dumps(value) + ", " + _twice(path)
        if not isinstance(path[-1], str):
            text = "[[[[{}]]]]"
    put(spoiled, path, marker)
    raw = json.dumps(spoiled).replace(json.dumps(marker), text)
    syntax = kind == "twice" or kind == "deep" or text in ("01", "+1", "0x10", "1_0") or len(text) == 5000
    return Spoiled(raw.encode(), f"{name} = {text[:30]} ({kind})", True if syntax and kind != "twice" else refuse)


def _twice(path: Path) -> str:
    return f"{json.dumps(path[-1])}: 1"


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


def edit_bytes(content: bytes, rng: random.Random, *, packed: bool = False) -> Spoiled:
    """A file that is not what it should be. `packed`: it is gzipped."""
    kind = rng.choice(
        (
            "empty",
            "truncated",
            "utf16",
            "null",
            "noise",
            "html",
            "spaces",
            "deep",
            "bracket",
            "gzipped",
            "latin",
            "bomb",
        )
    )
    if kind == "empty":
        return Spoiled(b"", kind, True)
    if kind == "truncated":
        return Spoiled(content[: rng.randrange(1, max(2, len(content.rstrip()) - 2))], kind, True if packed else None)
    if kind == "utf16":
        return Spoiled(content.decode("latin-1").encode("utf-16"), kind, True)
    if kind == "null":
        place = rng.randrange(len(content))
        return Spoiled(content[:place] + b"\0" + content[place:], kind, None if packed else True)
    if kind == "noise":
        return Spoiled(rng.randbytes(rng.randrange(1, 2000)), kind, True)
    if kind == "html":
        return Spoiled(b"<!doctype html><html><body>404 [/bold] \x1b[31mnot found</body></html>", kind, True)
    if kind == "spaces":
        return Spoiled(b" \n\t" * rng.randrange(1, 100), kind, True)
    if kind == "deep":
        opening = rng.choice((b"[", b'{"a":', b"a = [", b'a = {b = "'))
        return Spoiled(opening * DEEP, kind, True)
    if kind == "bracket":
        return Spoiled(
            rng.choice((b"[/bold]", b"[[[", b"}{", b"= = =", b"\x1b[2J\x1b[31m", b"\xff\xfe\x00")), kind, True
        )
    if kind == "gzipped":
        return Spoiled(gzip.compress(content), kind, True)
    if kind == "latin":
        return Spoiled(b"# caf\xe9\n" + content, kind, True)
    return Spoiled(gzip.compress(b"{" + b" " * 40_000_000), kind, True)

"""The checks of a file that claims to be a plan: its form is that of the classes in `plan`, and nothing else is accepted.

The classes are the only source. Their annotations say what a value may be (`Count`, `Milliseconds`, ...), pydantic checks
a file against them and makes them from it. What is wrong is one line that says where.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from annotated_types import Interval, MinLen

from autosac.display.printable import printable
from autosac.errors import PlanError
from autosac.files.documents import DocumentError, parse_json
from autosac.limits import MOST_LOSS_CHUNKS

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

SCHEMA_VERSION = 1
# In the shape of an output: a size that depends on data (the tokens that are routed to an expert) and may be any.
ANY_SIZE = -1

_MOST = 2**62
Name = Annotated[str, MinLen(1)]
Count = Annotated[int, Interval(ge=0, le=_MOST)]
Change = Annotated[int, Interval(ge=-_MOST, le=_MOST)]
Size = Annotated[int, Interval(ge=ANY_SIZE, le=_MOST)]
Ranks = Annotated[int, Interval(ge=1, le=2**17)]
Chunks = Annotated[int, Interval(ge=1, le=MOST_LOSS_CHUNKS)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Milliseconds = Annotated[float, Interval(ge=0, le=1e15)]
Price = Annotated[float, Interval(ge=-1e15, le=1e15)]
Rate = Annotated[float, Interval(ge=-1e30, le=1e30)]

STRICT = {"extra": "forbid", "strict": True}
"""What classes that are read from a file have as `__pydantic_config__`: no other keys, no conversions."""
NEWER: Mapping[str, Any] = {"newer": True}
"""Metadata of a field that files of earlier versions do not have. All others must be there, defaults or not."""

_TYPES = {
    "int_type": "integer",
    "int_from_float": "integer",
    "float_type": "number",
    "string_type": "string",
    "bool_type": "boolean",
    "tuple_type": "array",
    "dict_type": "object",
    "dataclass_type": "object",
    "dataclass_exact_type": "object",
}

Document = TypeVar("Document")


def parsed(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a plan file's bytes, which says that it is a plan of this version. PlanError if it does not."""
    try:
        document = parse_json(content)
    except DocumentError as e:
        looks_like_plan = content.lstrip().startswith(b"{") and b"autosac-plan" in content[:200]
        what = "is truncated or damaged" if looks_like_plan else "is not an AutoSAC plan"
        raise PlanError(f"{name} {what}: {_short(str(e))}") from e
    if not isinstance(document, dict) or document.get("format") != "autosac-plan":
        raise PlanError(f"{name} is not an AutoSAC plan")
    if document.get("schema") != SCHEMA_VERSION or isinstance(document.get("schema"), bool):
        raise PlanError(
            f"{name} has plan schema {_short(str(document.get('schema')))}; this version of AutoSAC reads "
            f"{SCHEMA_VERSION}: make the plan again"
        )
    return document


def checked(content: bytes, kind: type[Document], name: str) -> Document:
    """The value of this class in JSON that `parsed` has accepted. PlanError, which says where, if there is none."""
    from pydantic import ValidationError

    try:
        adapter: TypeAdapter[Document] = _adapter(cast(Hashable, kind))
        return adapter.validate_json(content.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        raise damaged(name, *_place_and_message(error)) from None


def problem_with(document: Any, kind: type[Document]) -> Document | str:
    """The value of this class in JSON's types; or where it is wrong and how, as ``$.units[1].policy: ...``."""
    from pydantic import ValidationError

    try:
        adapter: TypeAdapter[Document] = _adapter(cast(Hashable, kind))
        return adapter.validate_json(json.dumps(document))
    except ValidationError as e:
        place, message = _place_and_message(e.errors(include_url=False)[0])
        return f"${printable(_where(place))}: {_short(message)}"


def check_complete(row: Mapping[str, Any], kind: type[Any], place: tuple[str | int, ...], name: str) -> None:
    """PlanError if an object lacks a field of its class that has a default there, unless the field is NEWER."""
    if missing := _expected(cast(Hashable, kind)).difference(row):
        raise damaged(name, place, f"{min(missing)!r} is a required property")


def damaged(name: str, place: Iterable[str | int], message: str) -> PlanError:
    """The error for a file that is wrong at a place: `("units", 1, "policy")` is shown as ``$.units[1].policy``."""
    return PlanError(f"{name} is damaged at ${printable(_where(place))}: {_short(message)}")


def _where(place: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@functools.cache
def _expected(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if not field.metadata.get("newer"))


def _place_and_message(error: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    """Where the error is, and what is wrong there in the words of JSON Schema."""
    kind, place, value, limits = error["type"], error["loc"], error["input"], error.get("ctx", {})
    if kind == "missing":
        return place[:-1], f"{place[-1]!r} is a required property"
    if kind == "unexpected_keyword_argument":
        return place[:-1], f"Additional properties are not allowed ({place[-1]!r} was unexpected)"
    if kind in _TYPES:
        return place, f"{value!r} is not of type {_TYPES[kind]!r}"
    if kind == "greater_than_equal":
        return place, f"{value!r} is less than the minimum of {limits['ge']:g}"
    if kind == "less_than_equal":
        return place, f"{value!r} is greater than the maximum of {limits['le']:g}"
    if kind == "literal_error":
        return place, f"{value!r} is not one of {limits['expected']}"
    return place, error["msg"]


def _short(message: str, limit: int = 160) -> str:
    line = printable(" ".join(message.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."

"""The checks of a file that claims to be a plan: its form is that of the classes in `plan`, and nothing else is accepted.

The classes are the only source. Their annotations say what a value may be (`Count`, `Milliseconds`, ...), pydantic checks
a file against them and makes them from it. What is wrong is one line that says where.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast

from annotated_types import Interval, MinLen

from autosac.display.printable import printable
from autosac.errors import PlanError
from autosac.files.documents import DocumentError, parse_json
from autosac.files.schema import Fault, fitted_json
from autosac.limits import MOST_GPUS, MOST_LOSS_CHUNKS

SCHEMA_VERSION = 1
# In the shape of an output: a size that depends on data (the tokens that are routed to an expert) and may be any.
ANY_SIZE = -1
# The name, among operators, of a compiled graph that an eager module calls.
GRAPH = "compiled"

_MOST = 2**62
Name = Annotated[str, MinLen(1)]
Count = Annotated[int, Interval(ge=0, le=_MOST)]
Change = Annotated[int, Interval(ge=-_MOST, le=_MOST)]
Size = Annotated[int, Interval(ge=ANY_SIZE, le=_MOST)]
Ranks = Annotated[int, Interval(ge=1, le=MOST_GPUS)]
Chunks = Annotated[int, Interval(ge=1, le=MOST_LOSS_CHUNKS)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Milliseconds = Annotated[float, Interval(ge=0, le=1e15)]
Price = Annotated[float, Interval(ge=-1e15, le=1e15)]
Rate = Annotated[float, Interval(ge=-1e30, le=1e30)]

NEWER: Mapping[str, Any] = {"newer": True}
"""Metadata of a field that files of earlier versions do not have. All others must be there, defaults or not."""

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
    found = fitted_json(content.removeprefix(b"\xef\xbb\xbf"), kind)
    if isinstance(found, Fault):
        raise damaged(name, found)
    return found


def check_complete(row: Mapping[str, Any], kind: type[Any], place: tuple[str | int, ...], name: str) -> None:
    """PlanError if an object lacks a field of its class that has a default there, unless the field is NEWER."""
    if missing := _expected(cast(Hashable, kind)).difference(row):
        raise damaged(name, Fault((*place, min(missing)), row, "", "missing"))


def damaged(name: str, fault: Fault) -> PlanError:
    """The error for a file that is wrong in this way."""
    return PlanError(f"{name} is damaged: {_short(fault.text)}")


@functools.cache
def _expected(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if not field.metadata.get("newer"))


def _short(message: str, limit: int = 160) -> str:
    line = printable(" ".join(message.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."

"""Documents that are checked against the classes which hold them: one source for a value's type and for its form in a file.

A frozen dataclass or a NamedTuple says in its annotations what each field may be (`Within`, `Words`, `Pairs`, a Literal, other
such classes, tuples and mappings of them). `fitted` makes a value of it from the types of JSON or TOML, with pydantic, or
tells the first thing that is wrong as a `Fault`. Nothing is converted: "1" is no number, 1.0 no whole number, true neither.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast

from autosac.display.printable import printable

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema, ErrorDetails

Document = TypeVar("Document")
STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""What classes that are read from a file have as `__pydantic_config__`: no other keys, no conversions, finite numbers."""

_OWN = "expected"
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_KINDS = {"missing": "missing", "missing_argument": "missing", "value_error": "together", "json_invalid": "together"}
_EXPECTED = {
    _OWN: "{expected}",
    "value_error": "{error}",
    "json_invalid": "it is not valid JSON: {error}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "named_tuple_type": "a list or a table",
    "arguments_type": "a list or a table",
    "dict_type": "a table",
    "mapping_type": "a table",
    "dataclass_type": "a table",
    "dataclass_exact_type": "a table",
}


class Fault(NamedTuple):
    """What is wrong with a document: `value` at `place` (keys and positions in lists) is not what is `expected`.

    Or the key at the end of `place` is "missing" or "unknown" (`expected` then is a hint, or empty); or the parts there do not
    fit "together": `expected` says how.
    """

    place: tuple[str | int, ...]
    value: Any
    expected: str
    kind: Literal["value", "missing", "unknown", "together"] = "value"

    @property
    def where(self) -> str:
        """``units[1].policy``; empty for the whole document."""
        return where(self.place)

    @property
    def text(self) -> str:
        """``units[1].policy is 'x': expected a whole number``, printable and of bounded length."""
        what = self.where or "it"
        if self.kind == "together":
            return f"{self.where}: {self.expected}" if self.place else self.expected
        if self.kind == "value":
            return f"{what} is {shown(self.value)}: expected {self.expected}"
        if self.kind == "missing":
            return f"{what} is missing"
        return f"{what} is not a known key" + (f": {self.expected}" if self.expected else "")


def where(place: Sequence[str | int]) -> str:
    """Such a place as a text on one line."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return printable(text.removeprefix("."))


def shown(value: Any, limit: int = 80) -> str:
    """A value in a message: printable, and not without end."""
    try:
        text = printable(repr(value))
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number with thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- what a field may be -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """What `take` makes of a value in the types of JSON; None: it is not what is `expected`."""

    take: Callable[[Any], Any]
    expected: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """For pydantic."""
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            taken = self.take(value)
            if taken is None:
                raise PydanticCustomError(_OWN, "{expected}", {"expected": self.expected})
            return taken

        return core_schema.no_info_plain_validator_function(check)


@dataclass(frozen=True, slots=True)
class Within:
    """A number from `least` to `most` (or 0, if `zero`): ``Annotated[int, Within(1, 8)]``. `what` says it in other words."""

    least: float
    most: float
    zero: bool = False
    what: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """For pydantic."""
        checked = Checked(functools.partial(self._take, source is int), self._words(source is int))
        return checked.__get_pydantic_core_schema__(source, handler)

    def _take(self, is_whole: bool, value: Any) -> Any:
        if type(value) is not int and (is_whole or type(value) is not float or not math.isfinite(value)):
            return None
        if not (self.zero and value == 0) and not self.least <= value <= self.most:
            return None
        return value if is_whole else float(value)

    def _words(self, is_whole: bool) -> str:
        number = "a whole number" if is_whole else "a number"
        bounds = (f"{bound}" if is_whole else f"{bound:g}" for bound in (self.least, self.most))
        return self.what or f"{'0 or ' if self.zero else ''}{number} from {' to '.join(bounds)}"


@dataclass(frozen=True, slots=True)
class Words:
    """A text on one line, without control characters: ``Annotated[str, Words()]``. `empty`: it may be empty."""

    empty: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """For pydantic."""
        checked = Checked(self._take, "a text on one line" if self.empty else "a non-empty text on one line")
        return checked.__get_pydantic_core_schema__(source, handler)

    def _take(self, value: Any) -> Any:
        is_right = isinstance(value, str) and value.isprintable() and (value.strip() or (self.empty and not value))
        return value if is_right else None


@dataclass(frozen=True, slots=True)
class Pairs:
    """A table of values under these names, held as pairs: ``Annotated[tuple[tuple[str, Rate], ...], Pairs(NAMES)]``."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """For pydantic."""
        from pydantic_core import core_schema

        pair = source.__args__[0]
        names: Any = Literal[self.names]
        table = handler.generate_schema(cast(Any, dict)[names, pair.__args__[1]])
        return core_schema.no_info_after_validator_function(lambda found: tuple(found.items()), table)


@dataclass(frozen=True, slots=True)
class Keyed:
    """A mapping that a file holds as rows of key and value: ``Annotated[Mapping[tuple[str, int], Rate], Keyed()]``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """For pydantic."""
        from pydantic_core import core_schema

        key, value = source.__args__
        row = cast(Any, tuple)[(*key.__args__, value)]
        rows = handler.generate_schema(cast(Any, tuple)[row, ...])
        return core_schema.no_info_after_validator_function(lambda found: {row[:-1]: row[-1] for row in found}, rows)


Name = Annotated[str, Words()]


# ---- reading -----------------------------------------------------------------------------------------------------


def fitted(document: Any, kind: type[Document]) -> Document | Fault:
    """The value of this class (or of this annotation) in JSON's or TOML's types, or what is wrong with them."""
    try:
        text = json.dumps(document)
    except (TypeError, ValueError):  # a date, or a number of thousands of digits: nothing takes these
        text = json.dumps(document, default=lambda value: {"not in JSON": str(value)})
    return fitted_json(text, kind)


def fitted_json(text: str | bytes, kind: type[Document]) -> Document | Fault:
    """The same, of JSON that has been parsed before (`files.documents`)."""
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(text)
    except ValidationError as e:
        return _fault(e, [field.name for field in fields(kind)] if is_dataclass(kind) else [])


def adapter(kind: type[Document]) -> TypeAdapter[Document]:
    """What checks and makes values of this class."""
    return cast("TypeAdapter[Document]", _adapter(cast(Hashable, kind)))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _fault(error: ValidationError, names: Sequence[str]) -> Fault:
    """The first error; a key that nobody knows comes before all else: what was meant is then missing. `names`: known keys."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in _UNKNOWN), errors[0])
    place = first["loc"]
    if place[-1:] == ("[key]",):
        return Fault(place[:-1], first["input"], f"expected {_expected(first)}", "unknown")
    if first["type"] in _UNKNOWN:
        near = difflib.get_close_matches(str(place[0]), names, n=1) if len(place) == 1 else []
        return Fault(place, first["input"], f"did you mean {near[0]}?" if near else "", "unknown")
    kind: Any = _KINDS.get(first["type"], "value")
    return Fault(place, first["input"], _expected(first), kind)


def _expected(error: ErrorDetails) -> str:
    """What is allowed, in plain words."""
    context: dict[str, Any] = error.get("ctx", {})
    if error["type"] == "literal_error":
        return str(context["expected"]).replace("'", "")
    words = _EXPECTED.get(error["type"])
    return words.format(**context) if words is not None else error["msg"]

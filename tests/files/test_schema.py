"""Documents against the classes that hold them: what is taken, and what is said of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.files.schema import STRICT, Checked, Fault, Keyed, Name, Pairs, Within, Words, fitted, fitted_json, shown

Rate = Annotated[float, Within(0.5, 8)]


class Pair(NamedTuple):
    """A row."""

    first: Annotated[int, Within(1, 9)] = 1
    second: Annotated[int, Within(1, 9)] = 2


_PAIR = Pair()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A document with every kind of field."""

    __pydantic_config__: ClassVar[Any] = STRICT

    name: Name
    whole: Annotated[int, Within(-1, 5)] = 0
    rate: Annotated[float, Within(0.5, 8, zero=True)] = 0.0
    place: Annotated[int, Within(0, 3, what="a rank")] = 0
    text: Annotated[str, Words(empty=True)] = ""
    kind: Literal["cuda", "cpu"] = "cuda"
    rates: Annotated[tuple[tuple[str, Rate], ...], Pairs(("a", "b"))] = ()
    pair: Pair = _PAIR
    pairs: tuple[Pair, ...] = ()
    two: tuple[int, int] = (0, 0)
    shapes: Mapping[str, tuple[int, ...]] | None = None
    times: Annotated[Mapping[tuple[str, int], Rate], Keyed()] | None = None
    even: Annotated[int, Checked(lambda value: value if value in (0, 2) else None, "0 or 2")] = 0
    number: float = 0.0
    flag: bool = False

    def __post_init__(self) -> None:
        if self.whole == 3 and self.flag:
            raise ValueError("three is no flag")


def test_what_is_taken() -> None:
    """Every field, in the types of JSON; whole numbers are numbers, too."""
    document = {
        "name": "x",
        "whole": -1,
        "rate": 1,
        "rates": {"b": 2},
        "pair": {"second": 9},
        "pairs": [[3, 4], [5]],
        "two": [7, 8],
        "shapes": {"w": [2, 3]},
        "times": [["a", 1, 0.5], ["a", 2, 8]],
        "even": 2,
        "number": 3,
        "kind": "cpu",
    }
    found = fitted(document, Sheet)
    assert found == Sheet(
        name="x",
        whole=-1,
        rate=1.0,
        rates=(("b", 2.0),),
        pair=Pair(1, 9),
        pairs=(Pair(3, 4), Pair(5, 2)),
        two=(7, 8),
        shapes={"w": (2, 3)},
        times={("a", 1): 0.5, ("a", 2): 8.0},
        even=2,
        number=3.0,
        kind="cpu",
    )
    assert isinstance(found, Sheet) and type(found.rate) is float and type(found.number) is float


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": " "}, "name is ' ': expected a non-empty text on one line"),
        ({"name": "a\nb"}, "name is 'a\\nb': expected a non-empty text on one line"),
        ({"name": 3}, "name is 3: expected a non-empty text on one line"),
        ({"text": "\x07"}, "text is '\\x07': expected a text on one line"),
        ({"text": " "}, "text is ' ': expected a text on one line"),
        ({"whole": 6}, "whole is 6: expected a whole number from -1 to 5"),
        ({"whole": -2}, "whole is -2: expected a whole number from -1 to 5"),
        ({"whole": 1.0}, "whole is 1.0: expected a whole number from -1 to 5"),
        ({"whole": True}, "whole is True: expected a whole number from -1 to 5"),
        ({"whole": None}, "whole is None: expected a whole number from -1 to 5"),
        ({"rate": 0.25}, "rate is 0.25: expected 0 or a number from 0.5 to 8"),
        ({"rate": 8.5}, "rate is 8.5: expected 0 or a number from 0.5 to 8"),
        ({"rate": float("nan")}, "rate is nan: expected 0 or a number from 0.5 to 8"),
        ({"rate": "1"}, "rate is '1': expected 0 or a number from 0.5 to 8"),
        ({"place": 4}, "place is 4: expected a rank"),
        ({"kind": "tpu"}, "kind is 'tpu': expected cuda or cpu"),
        ({"rates": 3}, "rates is 3: expected a table"),
        ({"rates": {"c": 1.0}}, "rates.c is not a known key: expected a or b"),
        ({"rates": {"a": 0}}, "rates.a is 0: expected a number from 0.5 to 8"),
        ({"pair": 3}, "pair is 3: expected a list or a table"),
        ({"pair": [1, 2, 3]}, "pair is [1, 2, 3]: expected a list of at most 2"),
        ({"pair": {"third": 3}}, "pair.third is not a known key"),
        ({"pairs": [[1, 2], [1, 0]]}, "pairs[1][1] is 0: expected a whole number from 1 to 9"),
        ({"pairs": {}}, "pairs is {}: expected a list"),
        ({"two": [1]}, "two[1] is missing"),
        ({"two": [1, 2, 3]}, "two is [1, 2, 3]: expected a list of at most 2"),
        ({"two": [1, 2.5]}, "two[1] is 2.5: expected a whole number"),
        ({"shapes": {"w": [True]}}, "shapes.w[0] is True: expected a whole number"),
        ({"times": [["a", 1]]}, "times[0][2] is missing"),
        ({"times": [["a", 1, 9]]}, "times[0][2] is 9: expected a number from 0.5 to 8"),
        ({"even": 1}, "even is 1: expected 0 or 2"),
        ({"number": float("inf")}, "number is inf: expected a finite number"),
        ({"number": "1"}, "number is '1': expected a finite number"),
        ({"flag": 1}, "flag is 1: expected true or false"),
        ({"flag": True, "whole": 3}, "three is no flag"),
        ({"nam": "x", "whole": 9}, "nam is not a known key: did you mean name?"),
        ({"colour": "x", "whole": 9}, "colour is not a known key"),
        ({"text": date(2026, 1, 2)}, "text is {'not in JSON': '2026-01-02'}: expected a text on one line"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    """The first mistake: where it is, the value, and what is expected; an unknown key comes before all others."""
    found = fitted({"name": "x", **changes}, Sheet)
    assert isinstance(found, Fault) and found.text == text


def test_what_is_missing() -> None:
    """A field without a default; a document of another type; text that is not JSON."""
    missing, other = fitted({}, Sheet), fitted([1], Sheet)
    assert isinstance(missing, Fault) and isinstance(other, Fault)
    assert (missing.text, missing.place, missing.kind) == ("name is missing", ("name",), "missing")
    assert (other.text, other.place, other.where) == ("it is [1]: expected a table", (), "")
    broken = fitted({"name": "\udcff"}, Sheet)
    assert isinstance(broken, Fault) and broken.text.startswith("it is not valid JSON: lone")
    assert fitted_json(b'{"name": "y"}', Sheet) == Sheet(name="y")


def test_parts_that_do_not_fit_together() -> None:
    """The place, if the parts are not the whole document, and how."""
    assert Fault(("a", 1), None, "b is missing", "together").text == "a[1]: b is missing"
    assert Fault((), None, "b is missing", "together").text == "b is missing"


def test_a_value_in_a_message() -> None:
    """Printable, and not longer than asked for."""
    assert shown("a\x1b") == "'a\\x1b'"
    assert shown("x" * 100) == "'" + "x" * 76 + "..." and shown([1, 2], 5) == "[1..."
    assert shown(10**5000) == "a number with thousands of digits"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(Sheet.__slots__)) | st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_any_document(document: Any) -> None:
    """Whatever it is, it is a value, or a fault that is told on one printable line."""
    found = fitted(document, Sheet)
    assert isinstance(found, Sheet) or (found.text.isprintable() and len(found.text) < 4000)

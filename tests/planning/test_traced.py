"""Decisions carried over to the operators that a compiler traces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autosac.planning.traced import as_traced, follows
from autosac.plans import ANY_SIZE, Decision, Unit
from autosac.trace import TracedOperators

ROW = (((4, 8), "float32"),)
WIDE = (((4, 32), "float32"),)
ANY = (((ANY_SIZE, 8), "float32"),)


def unit(rows: Sequence[tuple[str, int, bool]], outputs: object = ROW) -> Unit:
    decisions = tuple(
        Decision(op=op, occurrence=i, keep=keep, outputs=outputs, memory_bytes=7)  # type: ignore[arg-type]
        for op, i, keep in rows
    )
    return Unit(fqn="layers.0", discard_fraction=0.5, kept_bytes=7, recompute_ms=0.0, decisions=decisions)


SEEN = (("cast", 0, False), ("mm", 0, True), ("mm", 1, False), ("sin", 0, True))


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        ((("cast", ROW), ("mm", ROW), ("mm", ROW), ("sin", ROW)), True),
        ((("cast", ROW), ("mm", ROW), ("cast", ROW), ("mm", ROW), ("sin", ROW)), False),  # one more
        ((("cast", ROW), ("mm", ROW), ("sin", ROW)), False),  # one less
        ((("cast", ROW), ("mm", WIDE), ("mm", ROW), ("sin", ROW)), False),  # another size
        ((("cast", ANY), ("mm", ROW), ("mm", ROW), ("sin", ROW)), True),  # a size that nobody knows
    ],
)
def test_whether_decisions_are_about_what_is_traced(traced: TracedOperators, expected: bool) -> None:
    """The same calls with the same results, wherever sizes are known."""
    assert follows(unit(SEEN).decisions, traced) is expected


def test_a_cast_that_is_repeated() -> None:
    """A second cast before the second product: it is recomputed, and the decisions about products stay with their products."""
    found = as_traced(unit(SEEN), (("cast", ROW), ("mm", ROW), ("cast", ROW), ("mm", ROW), ("sin", ROW)))
    rows = [(row.op, row.occurrence, row.keep, row.memory_bytes) for row in found.decisions]
    assert rows == [
        ("cast", 0, False, 7),
        ("mm", 0, True, 7),
        ("cast", 1, False, 0),
        ("mm", 1, False, 7),
        ("sin", 0, True, 7),
    ]
    assert follows(found.decisions, (("cast", ROW), ("mm", ROW), ("cast", ROW), ("mm", ROW), ("sin", ROW)))


def test_results_tell_operators_of_one_name_apart() -> None:
    """The first product is gone: the one that is kept is that with the rows, not the first that there is."""
    rows = (
        Decision(op="mm", occurrence=0, keep=False, outputs=WIDE),
        Decision(op="mm", occurrence=1, keep=True, outputs=ROW),
    )
    planned = Unit(fqn="", discard_fraction=0.5, kept_bytes=0, recompute_ms=0.0, decisions=rows)
    found = as_traced(planned, (("mm", ROW), ("sin", ROW)))
    assert [(row.op, row.occurrence, row.keep) for row in found.decisions] == [("mm", 0, True), ("sin", 0, False)]


def test_dynamic_sizes_are_compared_by_their_number() -> None:
    """Operators match though the plan knows one size, and the compiler none: here the last two."""
    found = as_traced(unit(SEEN), (("mm", ANY), ("sin", ANY)))
    assert [(row.op, row.keep, row.outputs) for row in found.decisions] == [("mm", False, ANY), ("sin", True, ANY)]

"""Tables of a trace's file: named tuples as columns, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any


def as_columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """One list for each field."""
    return [list(column) for column in zip(*rows, strict=True)]


def as_rows(columns: list[list[Any]], kind: Any, meanings: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Named tuples of `kind`; of the fields in `meanings` the numbers stand for these values.

    Lists become tuples. TypeError, ValueError or IndexError if the columns are none of `kind`.
    """
    names = kind._fields if columns else ()
    values = [_values(column, meanings.get(name)) for name, column in zip(names, columns, strict=True)]
    return list(map(partial(tuple.__new__, kind), zip(*values, strict=True)))  # in half the time that `_make` takes


def _values(column: list[Any], meanings: Sequence[Any] | None) -> list[Any]:
    if meanings is not None:
        return [meanings[value] for value in column]
    kinds = set(map(type, column))
    if kinds == {list} and list not in set(map(type, chain.from_iterable(column))):
        return list(map(tuple, column))  # of storages, mostly
    return list(map(as_tuples, column)) if list in kinds else column  # most columns have no lists


def as_tuples(value: Any) -> Any:
    """Tuples in place of lists, at any depth."""
    return tuple(map(as_tuples, value)) if type(value) is list else value

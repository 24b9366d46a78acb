"""Tables of a trace that are built while it is recorded: the same value has the same number."""

from __future__ import annotations

from typing import Generic, TypeVar

_T = TypeVar("_T")


class DistinctValues(Generic[_T]):
    """Distinct values in order of appearance."""

    def __init__(self) -> None:
        self.index: dict[_T, int] = {}

    def add(self, value: _T) -> int:
        """The index of `value`."""
        return self.index.setdefault(value, len(self.index))

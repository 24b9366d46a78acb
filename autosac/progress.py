"""Progress of work that has a known number of parts: each text says which part it is about and how much is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Parts:
    """A progress function: ``"budget 3 of 9 (22% done): solving"``.

    With fewer than two parts, or before the first, the text alone. It may be called from any thread.
    """

    def __init__(self, progress: Callable[[str], None], what: str, total: int = 0) -> None:
        self._progress = progress
        self._what = what
        self.total = total
        self._number = 0

    def begin(self, number: int) -> None:
        """The part with this number, counted from 1, begins; those before it are done."""
        self._number = number

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of which is a part."""
        for number, item in enumerate(items, start=1):
            self.begin(number)
            yield item

    def __call__(self, text: str) -> None:
        """Say what is being done now."""
        if self.total < 2 or not self._number:
            self._progress(text)
            return
        done = (self._number - 1) / self.total
        self._progress(f"{self._what} {self._number} of {self.total} ({done:.0%} done): {text}")

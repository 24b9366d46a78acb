"""The sheets of a search: which one serves a layout, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autosac.configurations.bounds.sheets import Sheet, sheet_layouts
from autosac.configurations.space.layout import Layout


class KnownSheets:
    """`key` names the sheet of a layout, `answer` is what a capture has told under a name, `lost` why there is none."""

    def __init__(
        self,
        key: Callable[[Layout], str],
        answer: Callable[[str], Mapping[str, Any] | None],
        lost: Mapping[str, str],
    ) -> None:
        self._key, self._answer, self._lost = key, answer, lost
        self._sheets: dict[str, Sheet | str] = {}

    def of(self, layout: Layout) -> Sheet | str | None:
        """The sheet that serves a layout, why there is none, or None if nobody has asked yet."""
        return self._serving(layout)[1]

    def known(self, layout: Layout) -> Sheet | None:
        """The sheet that serves a layout, if it is there."""
        found = self.of(layout)
        return found if isinstance(found, Sheet) else None

    def served(self, layout: Layout) -> Layout:
        """The layout whose sheet serves this one: the first that is not known to have none."""
        return self._serving(layout)[0]

    def count(self) -> int:
        """How many there are."""
        return sum(isinstance(sheet, Sheet) for sheet in self._sheets.values())

    def _serving(self, layout: Layout) -> tuple[Layout, Sheet | str | None]:
        some = sheet_layouts(layout)
        first = some[0], self._sheet(some[0])
        for served in some[1:] if isinstance(first[1], str) else ():
            if not isinstance(found := self._sheet(served), str):
                return served, found
        return first

    def _sheet(self, served: Layout) -> Sheet | str | None:
        key = self._key(served)
        if key in self._lost:
            return self._lost[key]
        if key not in self._sheets:
            answer = self._answer(key)
            if answer is None:
                return None
            self._sheets[key] = Sheet.of(answer["sheet"]) if "sheet" in answer else str(answer["refused"])
        return self._sheets[key]

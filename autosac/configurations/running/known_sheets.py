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
        return self._sheet(self.served(layout))

    def served(self, layout: Layout) -> Layout:
        """The layout whose sheet serves this one: the first that is not known to have none."""
        some = sheet_layouts(layout)
        return next((served for served in some if not isinstance(self._sheet(served), str)), some[0])

    def count(self) -> int:
        """How many there are."""
        return sum(isinstance(sheet, Sheet) for sheet in self._sheets.values())

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

"""A console for text that strangers wrote: names of modules, models, files, operators.

Nothing in it is markup (``[bold]``, ``:smile:``), and what a terminal would obey (escape sequences) is shown, not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from autosac.display.printable import printable


class PlainConsole(Console):
    """See the module's docstring. Takes rich's options; styles come from `rich.text.Text` and tables only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Rich's own rendering, with every text that it makes printable."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)

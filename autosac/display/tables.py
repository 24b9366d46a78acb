"""Tables that fit the width at hand: numbers are never cut, text wraps.

`Table` is rich's, in the first of six layouts that fits:

1. with rules around the cells, every cell on one line;
2. without the rules, every cell on one line;
3. with the rules, headings and text wrapped;
4. without the rules, headings and text wrapped;
5. the table turned, with one column for each row;
6. one block of "heading: value" lines for each row.

A column that is aligned to the right holds numbers: its cells stay on one line, as those of columns with `no_wrap` do. Others
hold text, which wraps at blanks and, where a word is too long for its column, inside the word.

`fact_grid` is a list of names and values, `output_width` the width where there is no terminal.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

PIPE_WIDTH = 80
_NARROWEST = 20
_FEW_ROWS = 6
# A text column may be squeezed to this before its table loses its rules.
_SHORT_WORD = 12


def output_width(environment: Mapping[str, str] = os.environ) -> int:
    """The width of what is not written to a terminal: $COLUMNS, or 80."""
    text = environment.get("COLUMNS", "")
    return max(_NARROWEST, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else PIPE_WIDTH


class Table(RichTable):
    """See the module's docstring. The first column names the row. Captions begin on the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The first layout that fits."""
        if not self.columns:
            return
        texts = _Texts(self, console)
        fitting = self._fitting(console, options.max_width)
        if fitting is None and len(self.rows) <= _FEW_ROWS:
            fitting = self._turned(texts)._fitting(console, options.max_width)
        if fitting is not None:
            yield from RichTable.__rich_console__(fitting, console, options)
        else:
            yield self._blocks(texts, options.max_width)

    def _fitting(self, console: Console, width: int) -> Table | None:
        """The first of the layouts as a table that fits."""
        texts = _Texts(self, console)
        for wrapped, bare in itertools.product((False, True), repeat=2):
            widths = texts.widths(width - self._rules(bare), wrapped)
            if widths is not None:
                return self._laid_out(texts, widths, bare)
        return None

    def _turned(self, texts: _Texts) -> Table:
        """Headings down the side, and one column for each row; texts in short lines."""
        table = Table(title=self.title, caption=self.caption)
        table.add_column(texts.headings[0], no_wrap=True)
        for cells in texts.rows:
            table.add_column(cells[0], justify="right")
        for column, heading in enumerate(texts.headings[1:], start=1):
            values = [row[column] for row in texts.rows]
            table.add_row(heading, *(values if texts.whole[column] else map(_in_short_lines, values)))
        return table

    def _rules(self, bare: bool) -> int:
        """Columns of the terminal that the cells do not have."""
        return 2 * (len(self.columns) - 1) if bare else 3 * len(self.columns) + 1

    def _laid_out(self, texts: _Texts, widths: Sequence[int], bare: bool) -> Table:
        table = copy.copy(self)
        table.caption_justify = "left"
        table.columns = [copy.copy(column) for column in self.columns]
        columns = zip(*texts.rows, strict=True) if texts.rows else [() for _ in widths]
        for column, cells, width in zip(table.columns, columns, widths, strict=True):
            column.width, column.overflow, column.no_wrap = width, "fold", False
            column._cells = [_broken(cell, width) for cell in cells]
        if bare:
            table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
            table._padding = (0, 1, 0, 0)
        return table

    def _blocks(self, texts: _Texts, width: int) -> Group:
        """One block of lines for each row: its name, then heading and value, below each other where they do not fit beside."""
        beside = texts.widest_pair() + 4 <= width
        parts: list[RenderableType] = []
        if self.title:
            parts.append(Text(texts.plain(self.title), style="italic"))
        for cells in texts.rows:
            name = cells[0].plain
            parts.append(Text(f"{texts.headings[0].plain} {name}" if texts.numbers[0] else name, style="bold"))
            grid = fact_grid()
            for heading, cell in zip(texts.headings[1:], cells[1:], strict=True):
                if cell.plain and beside:
                    grid.add_row(f"  {heading.plain}", cell)
                elif cell.plain:
                    parts += [Padding(heading, (0, 0, 0, 2)), Padding(cell, (0, 0, 0, 4))]
            parts.append(grid)
        if self.caption:
            parts.append(Text(texts.plain(self.caption), style="dim italic"))
        return Group(*parts)


def fact_grid() -> RichTable:
    """A list of names and values: the names on one line each, the values wrapped."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


class _Texts:
    """A table's headings and cells as texts, and what widths they need."""

    def __init__(self, table: RichTable, console: Console) -> None:
        self._console = console
        self.headings = [self._text(column.header) for column in table.columns]
        columns = [[self._text(cell) for cell in column.cells] for column in table.columns]
        self.rows: list[tuple[Text, ...]] = list(zip(*columns, strict=True))
        self.numbers = [column.justify == "right" for column in table.columns]
        self.whole = [column.justify == "right" or column.no_wrap for column in table.columns]

    def _text(self, cell: RenderableType) -> Text:
        if isinstance(cell, Text):
            return cell
        assert isinstance(cell, str), "a cell is a text"
        return self._console.render_str(cell)

    def widest_pair(self) -> int:
        """The widest heading together with the widest cell that stays on one line."""
        whole = [cell for row in self.rows for cell, whole in zip(row[1:], self.whole[1:], strict=True) if whole]
        return max((heading.cell_len for heading in self.headings[1:]), default=0) + _widest(whole)

    def plain(self, text: RenderableType) -> str:
        """Without markup."""
        return self._text(text).plain

    def widths(self, available: int, wrapped: bool) -> list[int] | None:
        """A width for each column, of `available` together; None if it cannot be."""
        columns = list(zip(*self.rows, strict=True)) if self.rows else [() for _ in self.headings]
        most, least = [], []
        for heading, cells, whole in zip(self.headings, columns, self.whole, strict=True):
            full = _widest(cells)
            shortest = full if whole else min(_longest_word(cells), _SHORT_WORD)
            most.append(max(full, heading.cell_len))
            least.append(max(shortest, _longest_word([heading]), 1))
        if not wrapped:
            return most if sum(most) <= available else None
        if sum(least) > available:
            return None
        return _lowest(list(zip(self.headings, *self.rows, strict=True)), least, most, available)


def _lowest(columns: Sequence[Sequence[Text]], least: Sequence[int], most: Sequence[int], available: int) -> list[int]:
    """Widths between `least` and `most`, together at most `available`: step by step, that which saves most lines per width."""

    @functools.cache
    def lines(column: int, width: int) -> tuple[int, ...]:
        return tuple(_lines(text.plain, width) for text in columns[column])

    def height(widths: Sequence[int]) -> int:
        rows = list(zip(*(lines(column, width) for column, width in enumerate(widths)), strict=True))
        return sum(len(columns) * max(row) + sum(row) for row in rows)

    widths = list(least)
    while True:
        now, left = height(widths), available - sum(widths)
        best, chosen = 0.0, widths
        for column, width in enumerate(widths):
            for wider in range(width + 1, min(most[column], width + left) + 1):
                tried = [*widths[:column], wider, *widths[column + 1 :]]
                saved = (now - height(tried)) / (wider - width)
                if saved > best:
                    best, chosen = saved, tried
        if chosen is widths:
            return widths
        widths = chosen


@functools.lru_cache(maxsize=2**16)
def _lines(text: str, width: int) -> int:
    """How many lines a text takes."""
    count = 0
    for paragraph in _broken(Text(text), width).plain.split("\n"):
        used = 0
        for word in paragraph.split():
            if used and used + 1 + len(word) <= width:
                used += 1 + len(word)
            else:
                count, used = count + 1, len(word)
        count += not paragraph.strip()
    return count


def _broken(text: Text, width: int) -> Text:
    """The text with line breaks in words that are longer than `width`: after a dot, an underscore or a slash if possible."""
    plain, places = text.plain, []
    for word in re.finditer(r"\S+", plain):
        begin = word.start()
        while word.end() - begin > width:
            part = re.match(r".*[._/]", plain[begin : begin + width])
            begin += len(part[0]) if part is not None and len(part[0]) > 1 else width
            places.append(begin)
    return Text("\n", style=text.style).join(text.divide(places)) if places else text


def _in_short_lines(text: Text) -> Text:
    """The text with line breaks at blanks, so that lines are hardly longer than a short word."""
    lines = textwrap.wrap(text.plain, _SHORT_WORD - 3, break_long_words=False, break_on_hyphens=False)
    return Text("\n".join(lines), style=text.style)


def _widest(texts: Iterable[Text]) -> int:
    return max((text.cell_len for each in texts for text in each.split()), default=0)


def _longest_word(texts: Iterable[Text]) -> int:
    return max((len(word) for text in texts for word in text.plain.split()), default=0)

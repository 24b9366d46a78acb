"""Tables at any width: nothing is wider than asked for, and no number is cut."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from autosac.display.tables import Table, output_width


def printed(renderable: RenderableType, width: int) -> list[str]:
    """The lines on a page of that width, without blanks at their ends."""
    out = io.StringIO()
    Console(width=width, file=out).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def table() -> Table:
    """A name, two numbers and a reason."""
    found = Table("module", title="Modules", caption="that is all")
    found.add_column("peak reserved", justify="right")
    found.add_column("step", justify="right")
    found.add_column("why")
    found.add_row("layers.0.feed_forward", "127.88 GiB", "1,544.8 ms", "memory is dearer")
    return found


def test_with_rules_where_there_is_room() -> None:
    """72 columns are enough for every cell on one line, in rich's own table."""
    lines = printed(table(), 80)
    assert lines[4] == "│ layers.0.feed_forward │    127.88 GiB │ 1,544.8 ms │ memory is dearer │"
    assert lines[-1] == "that is all"


def test_without_rules_where_that_is_enough() -> None:
    """At 70 columns the rules go, and every cell is still on one line."""
    assert printed(table(), 70)[3] == "layers.0.feed_forward     127.88 GiB  1,544.8 ms  memory is dearer"


def test_text_wraps_at_its_joints_and_headings_at_blanks() -> None:
    """At 56 columns a name breaks after a dot, so that no row takes more lines than it must, and the numbers are whole."""
    assert printed(table(), 56)[4:7] == [
        "│ layers.0.    │    127.88 GiB │ 1,544.8 ms │ memory │",
        "│ feed_forward │               │            │ is     │",
        "│              │               │            │ dearer │",
    ]
    assert printed(table(), 50)[3] == "layers.0.        127.88 GiB  1,544.8 ms  memory is"


def test_one_block_a_row_where_there_is_hardly_any_room() -> None:
    """At 30 columns a row is a block of lines, headed by its name."""
    assert printed(table(), 30) == [
        "Modules",
        "layers.0.feed_forward",
        "  peak reserved  127.88 GiB",
        "  step           1,544.8 ms",
        "  why            memory is",
        "                 dearer",
        "that is all",
    ]


def test_few_rows_are_turned_where_that_fits() -> None:
    """Two policies with four figures each: too wide at 36 columns, but they stand beside each other."""
    found = Table("policy")
    for heading in ("active", "reserved", "step", "recompute"):
        found.add_column(heading, justify="right")
    found.add_column("on the GPU")
    found.add_row("full", "20.00 GiB", "22.00 GiB", "1,634.5 ms", "400.0 ms", "fits")
    found.add_row("none", "100.00 GiB", "110.00 GiB", "1,234.5 ms", "0.0 ms", "out of memory")
    assert printed(found, 36) == [
        "policy            full        none",
        "──────────────────────────────────",
        "active       20.00 GiB  100.00 GiB",
        "reserved     22.00 GiB  110.00 GiB",
        "step        1,634.5 ms  1,234.5 ms",
        "recompute     400.0 ms      0.0 ms",
        "on the GPU        fits      out of",
        "                            memory",
    ]


words = st.text(st.sampled_from("ab._/ "), min_size=1, max_size=30)


@given(st.lists(st.tuples(words, st.integers(0, 10**12), words), max_size=4), st.integers(30, 140))
def test_nothing_is_too_wide_and_no_number_is_cut(rows: list[tuple[str, int, str]], width: int) -> None:
    """Whatever the cells: lines keep within the width, and every number stands on one line."""
    found = Table("name")
    found.add_column("bytes of it", justify="right")
    found.add_column("text")
    for name, number, text in rows:
        found.add_row(name, f"{number:,}", text)
    lines = printed(found, width)
    assert all(len(line) <= width for line in lines)
    for _, number, _ in rows:
        assert any(f"{number:,}" in line for line in lines)


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 80), ("wide", 80), ("5", 20), ("²", 80)])
def test_columns_say_how_wide(columns: str, width: int) -> None:
    """What is piped follows COLUMNS if that is a number, not below 20, and is 80 wide otherwise."""
    assert output_width({"COLUMNS": columns}) == width
    assert output_width({}) == 80

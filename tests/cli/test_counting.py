"""Progress of work in parts."""

from __future__ import annotations

from autosac.progress import Parts


def test_each_part_says_how_much_is_done() -> None:
    """Of four parts nothing, then a quarter is done; before the first part the text stands alone."""
    said: list[str] = []
    parts = Parts(said.append, "budget", 4)
    parts("capturing")
    for text in parts.each(["a", "b"]):
        parts(text)
    assert said == ["capturing", "budget 1 of 4 (0% done): a", "budget 2 of 4 (25% done): b"]


def test_one_part_is_no_count() -> None:
    """A single budget needs no number."""
    said: list[str] = []
    parts = Parts(said.append, "budget", 1)
    for text in parts.each(["a"]):
        parts(text)
    assert said == ["a"]

"""The small spaces that are worked out as a whole: without captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autosac.configurations.running.sessions import searching
from benchmarks.search.small import small_space, tight_budget


def test_a_number_gives_a_small_legal_space(tmp_path: Path) -> None:
    """The same one each time, another one for another number, with few layouts, no two of which are equal."""
    spaces = [small_space(number) for number in range(3)]
    assert spaces == [small_space(number) for number in range(3)]
    assert len({repr(space) for space in spaces}) == 3
    for space in spaces:
        with searching(replace(space.request(tmp_path, "85%"), workers=0)) as search:
            assert 4 <= len(search.layouts) == len(set(search.layouts)) <= 16


def test_the_tight_budget_is_of_layouts_that_can_run() -> None:
    """Those that TorchTitan refuses have no peak, and do not lower what the others have to fit."""
    assert tight_budget([0, 0, 0, 0, 100, 200, 300]) == 160
    assert tight_budget([0, 0]) == 0

"""Equal modules under one name."""

from __future__ import annotations

import pytest

from autosac.display.module_names import alike, natural, occurrences, span


@pytest.mark.parametrize(
    ("names", "one"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0-2"),
        (["layers.0.mlp", "layers.1.mlp", "layers.3.mlp"], "layers.0-1, 3.mlp"),
        (["a.0.b.1", "a.1.b.2"], "a.0.b.1 ... a.1.b.2"),
        ([""], ""),
    ],
)
def test_one_name_for_all(names: list[str], one: str) -> None:
    """Where a single number differs it becomes a range, otherwise first and last are named."""
    assert span(names) == one


def test_only_neighbours_that_agree_are_alike() -> None:
    """2 differs from its neighbours in what it does, norm in its name: four groups."""
    rows = [("layers.0", "x"), ("layers.1", "x"), ("layers.2", "y"), ("layers.10", "x"), ("norm", "x")]
    groups = alike(rows, lambda row: row[0], lambda row: row[1])
    assert [span([name for name, _ in group]) for group in groups] == ["layers.0-1", "layers.2", "layers.10", "norm"]


def test_natural_order() -> None:
    """layers.2 comes before layers.10."""
    assert sorted(["layers.10", "layers.2", "head"], key=natural) == ["head", "layers.2", "layers.10"]


def test_operators_with_their_calls() -> None:
    """Calls in a row are a range, and what is on the host stays apart."""
    assert occurrences(["mm#2", "mm#0", "mm#1", "silu#0", "mm#4 (host)"]) == "mm #0-2, silu #0, mm #4 (host)"

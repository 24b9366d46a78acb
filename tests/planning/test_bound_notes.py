"""What a plan says of how good it is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.planning.bound_notes import bound_notes


@pytest.mark.parametrize(
    ("gap", "told"),
    [
        (0.0123, ["recomputation is at most 1.2% above the least possible at this peak (linear bound)"]),
        (math.inf, ["this peak of active memory needs no recomputation; it lowers what the allocator reserves"]),
        (None, []),
    ],
)
def test_a_share_of_nothing_is_no_bound(gap: float | None, told: list[str]) -> None:
    """A plan that recomputes where active memory needs nothing says why, and not by what share."""
    info = SimpleNamespace(compiled=False)
    best: Any = SimpleNamespace(
        costs=None, solution=None, plan=SimpleNamespace(offloads=False), simulation=SimpleNamespace(recompute_ms=1.0)
    )
    best.simulation.trace = SimpleNamespace(info=info)
    assert bound_notes(best, gap, is_refuted=False) == told

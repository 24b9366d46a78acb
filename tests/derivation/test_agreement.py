"""What checkpointing accounts for, on stored steps: recomputations and ends of storages, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autosac.derivation import is_alike_outside
from autosac.trace import Op, Phase, Trace

STORED = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def observed() -> Trace:
    """The stored step without checkpointing."""
    return Trace.load(STORED / "observed.trace")


@pytest.mark.parametrize("name", ["observed", "outer", "inner"])
def test_a_step_under_checkpointing_has_the_rows_of_that_without(observed: Trace, name: str) -> None:
    """Whichever modules recompute."""
    assert is_alike_outside(observed, Trace.load(STORED / f"{name}.trace"))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
def test_a_step_without_one_operator_is_another(observed: Trace, phase: Phase) -> None:
    """Of any phase; more operators or others than before are none of checkpointing either."""
    outer = Trace.load(STORED / "outer.trace")
    rows = [i for i, row in enumerate(outer.events) if type(row) is Op and row.phase is phase]
    places = [i for i in rows if not outer.signatures[outer.events[i].signature].is_view]  # type: ignore[union-attr]
    i = places[len(places) // 2]
    without = replace(outer, events=(*outer.events[:i], *outer.events[i + 1 :]))
    twice = replace(outer, events=(*outer.events[:i], outer.events[i], *outer.events[i:]))
    assert not is_alike_outside(observed, without)
    assert not is_alike_outside(observed, twice)

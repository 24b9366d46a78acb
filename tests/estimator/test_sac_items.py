"""What a group of operators is to the local solvers: by hand."""

from __future__ import annotations

from dataclasses import replace

from autosac.estimator.sac_rules import OperatorGroup
from autosac.estimator.sac_stats import SACModStats, SACOperator
from autosac.solvers import LocalItem


def operator(runtime_ms: float, memory_bytes: int, view_like: bool = False) -> SACOperator:
    return SACOperator("aten.mm.default", 0, runtime_ms, memory_bytes, view_like, False, None, False, ())


STATS = SACModStats(
    module="m",
    region=0,
    operators=(operator(1.5, 100), operator(0.25, 20), operator(0.0, 3, view_like=True), operator(4.0, 0)),
    groups=(OperatorGroup((0, 1, 2), True), OperatorGroup((3,), None)),
    implicit_bytes=0,
    boundary_bytes=0,
)


def test_an_item_has_the_bytes_and_the_time_of_all_its_operators() -> None:
    """Three together, and one alone."""
    items = STATS.local_problem().items
    assert items == (LocalItem(123, 1.75, True), LocalItem(0, 4.0, None))
    assert (STATS.memory_bytes, STATS.runtime_ms) == (123, 5.75)


def test_what_runs_again_without_a_closure() -> None:
    """All operators of what is not kept, but for views."""
    assert STATS.operators_again(()) == {0, 1, 3}
    assert STATS.operators_again((0,)) == {3}
    assert STATS.operators_again((0, 1)) == frozenset()
    assert replace(STATS, operators=()).memory_bytes == 0

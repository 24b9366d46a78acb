"""What can be asked of the planner, and in which words what cannot is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autosac.errors import UsageError
from autosac.planning.planner import Goal, Planner
from autosac.solvers import solve_two_level


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_bytes": 0}, "the budget must be more than zero"),
        ({"budget_bytes": -1}, "the budget must be more than zero"),
        ({"budget_kind": "free"}, "budget kind 'free': expected 'reserved' or 'active'"),
        ({"solver": "best"}, "solver 'best': expected one of "),
        ({"curve": "line"}, "curve 'line': expected one of "),
        ({"objective": "peace"}, "objective 'peace': expected one of "),
        ({"time_limit_s": 0}, "the time limit must be more than zero seconds and at most "),
        ({"time_limit_s": 1e9}, "not 1e+09"),
        ({"gap": -0.01}, "the gap must be at least 0 and less than 1, not -0.01"),
        ({"gap": 1.0}, "the gap must be at least 0 and less than 1, not 1.0"),
        ({"milp": "guess"}, "guess"),
    ],
)
def test_goals_that_cannot_be(given: dict[str, Any], message: str) -> None:
    """One line with the value and what is expected."""
    with pytest.raises(UsageError) as caught:
        Goal(**{"budget_bytes": 100, **given})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_goals_at_their_limits() -> None:
    """The least budget, no gap, nearly the whole gap; the peak to reach is half way from good enough to the budget."""
    assert Goal(budget_bytes=1, gap=0.0).gap == 0.0 and Goal(budget_bytes=1, gap=0.99).gap == 0.99
    assert Goal(budget_bytes=1000, utilisation=0.9).target_bytes == 950


def test_a_joint_problem_that_takes_too_long_is_asked_once(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it found nothing within its two seconds, it is left out for the budgets that follow."""
    seconds: list[float] = []

    def solve(*arguments: Any, polish_s: float, **options: Any) -> Any:
        seconds.append(polish_s)
        found = solve_two_level(*arguments, polish_s=0.0, **options)
        return replace(found, unpolished=len(seconds) == 2)

    monkeypatch.setattr("autosac.planning.planner.solve_two_level", solve)
    base = make_job().observed()
    planner = Planner(base, Goal(budget_bytes=1, budget_kind="active"))
    for share in (0.9, 0.85, 0.8, 0.75):
        planner.solve(int(share * base.peak_active_bytes))
    assert seconds == [2.0, 2.0, 0.0, 0.0]

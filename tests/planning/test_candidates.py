"""The bracket of inner budgets, and candidates that are verified once; on stand-ins for simulations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.planning.candidates import Bracket, Candidate, Candidates, find_border
from autosac.planning.planner import Goal
from autosac.plans import Plan, Unit
from plans import MADE_FOR

GOAL = Goal(budget_bytes=100, budget_kind="active", utilisation=0.9)


def candidate(peak: int, recompute_ms: float = 1.0) -> Any:
    """A plan of one unit with this peak."""
    plan: Any = SimpleNamespace(units=(SimpleNamespace(recompute_ms=recompute_ms),))
    simulation: Any = SimpleNamespace(peak_bytes=lambda _: peak)
    return Candidate(plan=plan, simulation=simulation)


def test_what_the_peak_differs_by_corrects_the_next_budget() -> None:
    """60 gave a peak of 70: for 95, 85 is next. 85 gave 104, which exceeds: 95 - 19 = 76, which lies between 60 and 85."""
    bracket = Bracket(60, 120, 95)
    bracket.verified(candidate(70), GOAL)
    assert (bracket.low, bracket.inner, bracket.high) == (60, 85, 120)
    bracket.verified(candidate(104), GOAL)
    assert (bracket.low, bracket.inner, bracket.high) == (60, 76, 85)


def test_a_correction_that_leaves_the_bracket_is_not_followed() -> None:
    """80 exceeded, and 40 gives a peak of 45, which asks for 90: the middle, 60, is next."""
    bracket = Bracket(80, 120, 95)
    bracket.verified(candidate(130), GOAL)
    bracket.inner = 40
    bracket.verified(candidate(45), GOAL)
    assert (bracket.low, bracket.inner, bracket.high) == (40, 60, 80)


def test_without_a_solution_the_border_lies_above() -> None:
    """Nothing keeps within 60: the middle of 60 and 120 is next."""
    bracket = Bracket(60, 120, 95)
    bracket.unsolved()
    assert (bracket.low, bracket.inner, bracket.high) == (60, 90, 120)


def test_using_the_budget() -> None:
    """From 90 % of the budget, or with nothing recomputed, there is nothing to gain."""
    assert candidate(90).uses(GOAL) and not candidate(89).uses(GOAL) and candidate(10, recompute_ms=0.0).uses(GOAL)
    assert candidate(100).fits(GOAL) and not candidate(101).fits(GOAL)


def test_a_plan_is_simulated_once() -> None:
    """Plans that decide the same are one candidate, whatever they state of their units, and progress is told of one
    simulation; that a baseline does the same is remembered.
    """
    told: list[str] = []
    verifier: Any = SimpleNamespace(under=lambda plan: object())
    candidates = Candidates(verifier, told.append, "simulating")

    def plan(name: str, kept_bytes: int) -> Plan:
        unit = Unit(fqn=name, discard_fraction=0.0, kept_bytes=kept_bytes, recompute_ms=0.0, decisions=())
        return Plan(made_for=MADE_FOR, units=(unit,))

    first, again, other = (candidates.verify(plan(*unit)) for unit in (("a", 1), ("a", 2), ("b", 1)))
    assert again is first and other is not first
    assert candidates.verified == [first, other] and told == ["simulating (plan 1)", "simulating (plan 2)"]
    mirror = candidates.verify(plan("a", 3), mirrors="full")
    assert candidates.verified == [mirror, other] and mirror == replace(first, mirrors="full") and len(told) == 2


@pytest.mark.parametrize(
    ("last", "guess", "asked"),
    [(-1, 6, [6, 5, 3, 0]), (6, 6, [6, 7]), (5, 6, [6, 5]), (4, 6, [6, 5, 3, 4]), (8, 6, [6, 7, 8]), (0, 0, [0, 1])],
)
def test_the_border_is_found_in_few_answers(last: int, guess: int, asked: list[int]) -> None:
    """Of nine choices those up to `last` fit: near the guess first, then in doubled strides, then in the middle."""
    heard: list[int] = []

    def fits(i: int) -> bool:
        heard.append(i)
        return i <= last

    assert find_border(fits, guess, 9) == last
    assert heard == asked

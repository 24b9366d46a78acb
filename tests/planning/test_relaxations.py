"""Plans whose units recompute less, one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from autosac.planning.relaxations import Relaxed, relaxations
from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Plan, Reasons, Unit
from plans import MADE_FOR


def unit(name: str, kept_bytes: int) -> Unit:
    """A unit that recomputes 10 ms less for each byte that it keeps, of two."""
    return Unit(
        fqn=name, discard_fraction=0.5, kept_bytes=kept_bytes, recompute_ms=20.0 - 10 * kept_bytes, decisions=()
    )


def relaxed(kept: dict[str, int], reasons: tuple[Reasons, ...] = ()) -> list[list[Relaxed]]:
    """Those of a plan whose units keep so much, where each may keep two items of a byte."""

    def policy(name: str) -> Any:
        problem = SimpleNamespace(free=lambda: (3, 5))
        return SimpleNamespace(name=name, problem=lambda: problem, keeping=lambda items: unit(name, len(items)))

    policies = cast(UnitPolicies, SimpleNamespace(units=[policy(name) for name in kept]))
    plan = Plan(made_for=MADE_FOR, units=tuple(unit(*one) for one in kept.items()), reasons=reasons)
    return list(relaxations(policies, plan))


def sequences(kept: dict[str, int], reasons: tuple[Reasons, ...] = ()) -> list[list[Plan]]:
    """The plans of `relaxed`."""
    return [[one.plan for one in found] for found in relaxed(kept, reasons)]


def test_units_are_left_out_or_keep_everything_from_either_end() -> None:
    """Of a, b, c the middle one keeps everything already: it stays; a plan without units is none."""
    found = [
        [{u.fqn: u.kept_bytes for u in plan.units} for plan in plans] for plans in sequences({"a": 0, "b": 2, "c": 1})
    ]
    assert found == [
        [{"b": 2, "c": 1}, {"b": 2}],
        [{"a": 2, "b": 2, "c": 1}, {"a": 2, "b": 2, "c": 2}],
        [{"a": 0, "b": 2}, {"b": 2}],
        [{"a": 0, "b": 2, "c": 2}, {"a": 2, "b": 2, "c": 2}],
    ]
    assert sequences({"a": 2}) == [[], [], [], []]
    assert [len(plans) for plans in sequences({"a": 0})] == [0, 1, 0, 1]


def test_what_is_left_out_counts_as_what_keeps_everything() -> None:
    """Of two items of a byte each, a keeps none and c one: 2 bytes more, then 3; from the other end 1, then 3."""
    assert [[one.more_bytes for one in found] for found in relaxed({"a": 0, "c": 1, "b": 2})] == [
        [2, 3],
        [2, 3],
        [1, 3],
        [1, 3],
    ]


def test_the_reasons_tell_that_units_recompute_less() -> None:
    """Once, however often they have been changed."""
    reasons = Reasons(objective="recompute", method="milp", ms_per_gib=2.0, binding=())
    (first, *_) = sequences({"a": 0, "b": 0}, (reasons,))[0]
    assert first.reasons[0].method == "milp, then less in single modules"
    assert sequences({"a": 0, "b": 0}, first.reasons)[1][0].reasons == first.reasons
    assert first.reasons[0].ms_per_gib == 2.0

"""Why operators are kept or recomputed, in words and in the plan's file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autosac.errors import PlanError
from autosac.plans import Binding, Decision, Plan, Reasons, Unit
from autosac.plans.reasons import price_of, why
from plans import MADE_FOR

GIB = 2**30
REASONS = Reasons(
    objective="recompute", method="milp", ms_per_gib=6.0, binding=(Binding("the loss", 5.0), Binding("layers.3", 1.0))
)


def decision(keep: bool, ms: float, nbytes: int = GIB) -> Decision:
    """A decision of an operator that takes so long and holds so much."""
    return Decision(op="aten.mm.default", occurrence=0, keep=keep, outputs=(), memory_bytes=nbytes, runtime_ms=ms)


def unit(*decisions: Decision) -> Unit:
    """A unit of these decisions."""
    return Unit(fqn="layers.0", discard_fraction=0.5, kept_bytes=0, recompute_ms=1.0, decisions=decisions)


@pytest.fixture
def plan() -> Plan:
    """A plan with reasons."""
    return Plan(made_for=MADE_FOR, units=(), reasons=(REASONS,))


KEEP = decision(True, 9.0)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (KEEP, "expensive to recompute"),
        (decision(False, 4.5), "cheap to recompute"),
        (decision(False, 6.05), "break-even"),
        (decision(False, 9.0), "needed to fit"),
        (decision(True, 3.0), "required, or memory to spare"),
        (decision(False, 0.0), "free to recompute"),
        (decision(True, 0.0), "must be kept"),
        (decision(True, 1.0, 0), "needs no memory"),
        (decision(False, 1.0, 0), "decided with its group"),
    ],
)
def test_an_operator_is_recomputed_where_memory_is_worth_more(what: Decision, text: str) -> None:
    """At 6 ms per GiB, what frees a GiB in 4.5 ms is recomputed, what needs 9 ms is kept; the rest is named."""
    assert why(what, unit(what, KEEP), 6.0) == text


def test_other_objectives_and_no_price() -> None:
    """What is dearer than the price may be hidden; without a price there is no reason, nor for plain units."""
    dear = decision(False, 9.0)
    assert why(dear, unit(dear, KEEP), 6.0, "step") == "hidden, or needed to fit"
    assert why(dear, unit(dear, KEEP), None) == ""
    assert why(dear, unit(dear), 6.0) == ""


def test_reasons_are_part_of_the_file(plan: Plan, tmp_path: Path) -> None:
    """They are read as they were written; a plan of two stages has no single price."""
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan and price_of(plan) == 6.0
    assert price_of(replace(plan, reasons=(REASONS, REASONS))) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda document: document["reasons"][0].update(objective="luck"), r"damaged: reasons\[0\].objective"),
        (lambda document: document["reasons"][0]["binding"].append(["x"]), r"damaged: reasons\[0\].binding\[2\]"),
    ],
)
def test_damaged_reasons_are_refused(plan: Plan, damage: Callable[[dict], None], message: str) -> None:
    """The error says where; a plan without reasons is one of an earlier version."""
    document = json.loads(plan.to_bytes())
    damage(document)
    with pytest.raises(PlanError, match=message):
        Plan.from_bytes(json.dumps(document).encode())
    del document["reasons"]
    assert Plan.from_bytes(json.dumps(document).encode()).reasons == ()

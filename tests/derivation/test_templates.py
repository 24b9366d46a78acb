"""Which steps are captured as templates: the plan of each recomputes as many modules as it can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from autosac.derivation.captures import Derivation
from autosac.plans import Plan, Unit
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace
from plans import MADE_FOR

STORED = Path(__file__).parents[1] / "golden" / "observed.trace"
NAMES = ("layers.0", "layers.0.attention", "layers.1", "layers.1.attention", "head")
UNITS = {name: Unit(fqn=name, discard_fraction=1.0, kept_bytes=0, recompute_ms=1.0, decisions=()) for name in NAMES}


class Begun:
    """Captures of the stored step; notes the plans and the templates that are begun."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.templates: list[Plan] = []
        self._observed = simulation_of(Trace.load(STORED), Target.of("h100-sxm-80gb", 8))

    def observed(self) -> Simulation:
        return self._observed

    def baselines(self) -> Mapping[str, Simulation]:
        return {}

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        self.plans.append(plan)

    def begin_template(self, plan: Plan) -> None:
        self.templates.append(plan)

    def under(self, plan: Plan) -> Simulation:
        return self._observed

    template = under


@pytest.mark.parametrize(
    ("wanted", "template"),
    [
        (["layers.1"], ["layers.0", "layers.1", "head"]),
        (["layers.0.attention"], ["layers.0.attention", "layers.1.attention", "head"]),
        (["layers.0.attention", "layers.1"], ["layers.0", "layers.1", "head"]),
        ([], None),
    ],
)
def test_a_template_recomputes_what_it_can(wanted: list[str], template: list[str] | None) -> None:
    """What is asked for in every layer, the outermost first, and others, none inside another; nothing for a plan without
    modules.
    """
    captures = Begun()
    derivation = Derivation(captures, UNITS)
    plan = Plan(made_for=MADE_FOR, units=tuple(UNITS[name] for name in wanted))
    derivation.prepare(plan)
    assert [[unit.fqn for unit in begun.units] for begun in captures.templates] == ([template] if template else [])
    assert captures.plans == []
    derivation.expect(plan)
    assert captures.plans == [plan]

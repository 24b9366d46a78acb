"""Simulations under plans for the search: derived wherever that is possible, captured otherwise."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Protocol
from weakref import WeakValueDictionary

from autosac.derivation.deriver import Deriver
from autosac.derivation.steps import NotDerivableError
from autosac.errors import CaptureError
from autosac.plans import Plan, Settings, Unit
from autosac.simulation import Simulation, simulation_of


class CaptureSource(Protocol):
    """Who captures; see `autosac.planning.closed_loop.PlanningCaptures`."""

    def observed(self) -> Simulation: ...
    def baselines(self) -> Mapping[str, Simulation]: ...
    def begin(self, plan: Plan, *, ahead: bool = False) -> None: ...
    def under(self, plan: Plan) -> Simulation: ...
    def begin_template(self, plan: Plan) -> None: ...
    def template(self, plan: Plan) -> Simulation: ...


# A step before the recorded one may have left the allocator other segments.
_NEARLY = 1e-3


class Derivation:
    """The steps under plans, of which hardly any is captured.

    `units`: every module that a plan may checkpoint, as the unit that recomputes everything. A plan with a unit that no
    template recomputes has templates captured first, which recompute as many other such units as they can.
    """

    def __init__(self, captures: CaptureSource, units: Mapping[str, Unit]) -> None:
        self._captures = captures
        self._units = units
        self._deriver: Deriver | None = None
        self._derived: WeakValueDictionary[int, Simulation] = WeakValueDictionary()
        self._captured: dict[tuple[tuple[Unit, ...], Settings], Simulation] = {}
        self._wrong = False
        observed = captures.observed().trace
        if observed.info.compiled:
            return  # compiled steps run other operators than the observed one
        with contextlib.suppress(NotDerivableError):
            self._deriver = Deriver(observed)

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        if (plan.units, plan.settings) in self._captured:
            return self._captured[plan.units, plan.settings]
        if self._deriver is not None and not plan.offloads:  # copies on other streams are in no template
            try:
                self._cover(plan)
                simulation = simulation_of(self._deriver.under(plan), self._captures.observed().target, plan)
            except NotDerivableError:
                pass
            else:
                self._derived[id(simulation)] = simulation
                return simulation
        captured = self._captured[plan.units, plan.settings] = self._captures.under(plan)
        return captured

    def derived(self, plan: Plan) -> Simulation | None:
        """The step under a plan; None where that would take a capture."""
        if self._deriver is None or plan.offloads or not all(self._deriver.covers(unit.fqn) for unit in plan.units):
            return None
        try:
            trace = self._deriver.under(plan)
        except NotDerivableError:
            return None
        simulation = simulation_of(trace, self._captures.observed().target, plan)
        self._derived[id(simulation)] = simulation
        return simulation

    def expect(self, plan: Plan, *, ahead: bool = False) -> None:
        """`confirm` will most likely be asked for this plan. With `ahead` another one may still be found: it is captured if
        that costs nobody anything.
        """
        if self._deriver is not None and (plan.units, plan.settings) not in self._captured:
            self._captures.begin(plan, ahead=ahead)

    def is_derived(self, simulation: Simulation) -> bool:
        """Whether this simulation is of a derived trace."""
        return id(simulation) in self._derived

    def confirm(self, plan: Plan, simulation: Simulation, limit_bytes: float = 0) -> bool:
        """Capture the step under a plan, unless this simulation is of a capture. If it is not as it was derived: False, and
        from now on all steps are captured. What the allocator reserves may be a little different within `limit_bytes`.
        """
        if not self.is_derived(simulation):
            self._captured[plan.units, plan.settings] = simulation
            return True
        captured = self._captured[plan.units, plan.settings] = self._captures.under(plan)
        if _agree(captured, simulation, limit_bytes):
            return True
        self._deriver = None
        self._wrong = True
        return False

    def notes(self) -> tuple[str, ...]:
        """What is worth telling."""
        return ("derived steps were not as captured ones: every plan was captured",) if self._wrong else ()

    def prepare(self, plan: Plan) -> None:
        """Begin to capture the template for plans that checkpoint the same modules."""
        template = None if self._deriver is None else self._template(plan, self._deriver)
        if template is not None:
            self._captures.begin_template(template)

    def _cover(self, plan: Plan) -> None:
        """Capture templates for the plan's units that have none yet."""
        deriver, covered = self._deriver, -1
        assert deriver is not None
        while (template := self._template(plan, deriver)) is not None:
            before, covered = covered, sum(map(deriver.covers, self._units))
            if covered == before:
                raise NotDerivableError("a template does not recompute what it shall")
            try:
                deriver.add(self._captures.template(template).trace)
            except (CaptureError, NotDerivableError) as e:
                self._deriver = None
                raise NotDerivableError("there is no template") from e

    def _template(self, plan: Plan, deriver: Deriver) -> Plan | None:
        """The plan whose capture is the next template for the plan's units that have none yet; None if all have.

        It does the same in all layers, so that few of them may be captured: of all modules whose names differ in numbers only
        it has every one or none. The outermost of the plan's come first.
        """
        missing = {_kind(unit.fqn) for unit in plan.units if not deriver.covers(unit.fqn)}
        if not missing:
            return None
        depths = {kind.count(".") for kind in missing}
        kinds = dict.fromkeys(_kind(name) for name in self._units if not deriver.covers(name))
        chosen: list[str] = []
        for kind in sorted(kinds, key=lambda k: (k not in missing, k.count(".") not in depths, k.count("."))):
            if not any(_nested(kind, other) for other in chosen):
                chosen.append(kind)
        units = tuple(unit for name, unit in self._units.items() if _kind(name) in chosen)
        return Plan(made_for=plan.made_for, units=units, settings=plan.settings)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _nested(a: str, b: str) -> bool:
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _agree(captured: Simulation, derived: Simulation, limit_bytes: float) -> bool:
    """The active peak to the byte, the step's time to rounding, what is reserved to the byte or nearly, within the limit."""
    reserved, expected = captured.peak_reserved_bytes, derived.peak_reserved_bytes
    nearly = reserved <= limit_bytes and abs(reserved - expected) <= _NEARLY * expected
    return (
        captured.peak_active_bytes == derived.peak_active_bytes
        and (reserved == expected or nearly)
        and abs(captured.step_ms - derived.step_ms) <= 1e-6 * captured.step_ms
    )

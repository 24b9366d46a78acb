"""Plans that recompute less than another one, in single units.

The solver knows of active memory only, and takes equal units for equal. What the allocator reserves depends on which of them
recompute: results that are kept late in the forward may lie in the way of the loss. A plan may then leave much of the budget
though the next larger inner budget exceeds it. Here units recompute less one after the other, from the first on or from the
last on: they keep everything, or are not checkpointed at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Plan, Unit

_ADDED = ", then less in single modules"  # to what a plan says of its method


def relaxations(policies: UnitPolicies, plan: Plan) -> Iterator[list[Plan]]:
    """Sequences of plans, each of which recomputes less than the one before it and than `plan`."""
    known = {unit.name: unit for unit in policies.units}
    names = [unit.fqn for unit in plan.units if unit.recompute_ms > 0]
    keeping: Mapping[str, Unit] = {name: known[name].keeping(known[name].problem().free()) for name in names}
    for order in (names, names[::-1]):
        for instead in ({}, keeping):
            found = [_changed(plan, order[:count], instead) for count in range(1, len(order) + 1)]
            yield [changed for changed in found if changed.units]


def _changed(plan: Plan, names: Sequence[str], instead: Mapping[str, Unit]) -> Plan:
    """The plan without these units, or with others in their place."""
    chosen = [instead.get(unit.fqn) if unit.fqn in names else unit for unit in plan.units]
    reasons = tuple(
        reason if reason.method.endswith(_ADDED) else replace(reason, method=reason.method + _ADDED)
        for reason in plan.reasons
    )
    return replace(plan, units=tuple(unit for unit in chosen if unit is not None), reasons=reasons)

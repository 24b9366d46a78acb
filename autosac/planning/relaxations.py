"""Plans that recompute less than another one, in single units.

The solver knows of active memory only, and takes equal units for equal. What the allocator reserves depends on which of them
recompute: results that are kept late in the forward may lie in the way of the loss. A plan may then leave much of the budget
though the next larger inner budget exceeds it. Here units recompute less one after the other, from the first on or from the
last on: they keep everything, or are not checkpointed at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Plan, Unit

_ADDED = ", then less in single modules"  # to what a plan says of its method


class Relaxed(NamedTuple):
    """A plan whose units keep `more_bytes` more, in all, than those of the plan that it comes from. A unit that is not
    checkpointed counts as one that keeps everything.
    """

    plan: Plan
    more_bytes: int


def relaxations(policies: UnitPolicies, plan: Plan) -> Iterator[list[Relaxed]]:
    """Sequences of plans, each of which recomputes less than the one before it and than `plan`."""
    known = {unit.name: unit for unit in policies.units}
    kept_bytes = {unit.fqn: unit.kept_bytes for unit in plan.units if unit.recompute_ms > 0}
    names = list(kept_bytes)
    keeping: Mapping[str, Unit] = {name: known[name].keeping(known[name].problem().free()) for name in names}
    for order in (names, names[::-1]):
        for instead in ({}, keeping):
            more_bytes = accumulate(keeping[name].kept_bytes - kept_bytes[name] for name in order)
            found = [Relaxed(_changed(plan, order[: i + 1], instead), more) for i, more in enumerate(more_bytes)]
            yield [relaxed for relaxed in found if relaxed.plan.units]


def _changed(plan: Plan, names: Sequence[str], instead: Mapping[str, Unit]) -> Plan:
    """The plan without these units, or with others in their place."""
    chosen = [instead.get(unit.fqn) if unit.fqn in names else unit for unit in plan.units]
    reasons = tuple(
        reason if reason.method.endswith(_ADDED) else replace(reason, method=reason.method + _ADDED)
        for reason in plan.reasons
    )
    return replace(plan, units=tuple(unit for unit in chosen if unit is not None), reasons=reasons)

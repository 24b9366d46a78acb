"""Why an operator is kept or recomputed, in words.

To recompute an operator of t ms and m bytes frees memory at t / m (the inverse of its MSPS, AUTO-SAC section 5.3). Where
memory is worth more, by the shadow price of the plan, the operator is recomputed; where it is worth less, it is kept. At the
price it may be either. What does not follow that rule follows another: it has nothing to decide, must be kept, is hidden,
or operators being whole, it filled what was left.
"""

from __future__ import annotations

from autosac.plans import Decision, Plan, Unit

_GIB = 2**30
_AT_THE_PRICE = 0.01


def price_of(plan: Plan) -> float | None:
    """The plan's shadow price in ms per GiB; None if it has none, or one for every pipeline stage."""
    return plan.reasons[0].ms_per_gib if len(plan.reasons) == 1 else None


def why(decision: Decision, unit: Unit, price_ms_per_gib: float | None, objective: str = "recompute") -> str:
    """The reason for one decision of a unit at a shadow price (None: not known); none if the unit keeps nothing at all."""
    if not any(other.keep for other in unit.decisions):
        return ""
    if decision.offload:
        return "its copies are hidden"
    if decision.runtime_ms <= 0:
        return "free to recompute" if not decision.keep else "must be kept"
    if decision.memory_bytes <= 0:
        return "needs no memory" if decision.keep else "decided with its group"
    if price_ms_per_gib is None:
        return ""
    cost = decision.runtime_ms / decision.memory_bytes * _GIB
    if abs(cost - price_ms_per_gib) <= _AT_THE_PRICE * price_ms_per_gib:
        return "break-even"
    if decision.keep:
        return "expensive to recompute" if cost > price_ms_per_gib else "required, or memory to spare"
    if cost < price_ms_per_gib:
        return "cheap to recompute"
    return "hidden, or needed to fit" if objective == "step" else "needed to fit"

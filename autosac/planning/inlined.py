"""Compiled functions that a unit calls, as a compiler of the whole unit sees them.

TorchTitan compiles flexible attention by itself, also in models that are not compiled. There a policy decides about this code
as one operator, Inductor's (``inductor_compiled_code``). Where the unit is compiled as a whole, Dynamo takes such functions
apart, and a policy meets what is inside. For flexible attention that is one operator, ``flex_attention``: decisions get its
name.
"""

from __future__ import annotations

from dataclasses import replace

from autosac.estimator.sac_stats import SACOperator
from autosac.planning.unit_policies import UnitPolicy
from autosac.trace import Call, Op, Trace

_COMPILED = "inductor_compiled_code"
_TEMPLATE = "flex_attention"
_OF_RESULTS = ("aten.new_empty.default", "aten.new_empty_strided.default", "aten.copy_.default")


def inlined(unit: UnitPolicy, trace: Trace) -> UnitPolicy | None:
    """The unit with the names that its operators have where it is compiled as a whole. None if it calls compiled functions
    that are more than one operator: nothing is known of what they consist of.
    """
    stats = unit.sac.stats
    operators: list[SACOperator] = []
    seen: dict[str, int] = {}
    for operator, call in zip(stats.operators, trace.regions[stats.region].calls, strict=True):
        name = operator.name
        if name == _COMPILED:
            if _kernels(call, trace) != [_TEMPLATE]:
                return None
            name = _TEMPLATE
            operator = operator._replace(name=name, occurrence=seen.get(name, 0))
        seen[name] = seen.get(name, 0) + 1
        operators.append(operator)
    return replace(unit, sac=replace(unit.sac, stats=replace(stats, operators=tuple(operators))))


def _kernels(call: Call, trace: Trace) -> list[str]:
    """What is launched inside, without what only makes the results' memory."""
    events = trace.events[call.first : call.last]
    names = [trace.signatures[event.signature].name for event in events if type(event) is Op]
    return [name for name in names if name not in _OF_RESULTS]

"""What each unit takes of a step that runs compiled: the time of its kernels and collectives, and the bytes that it saves.

Both come from the captured step, so they are what the partitioner and the fusion made of the unit's policy. A storage is
*saved* by the unit in whose forward it was allocated if the backward of that unit uses it. Inputs of a unit do not count, and
its results only where its own backward needs them: that of the next unit, or the sender to another pipeline stage, may hold
them as well. With several microbatches under way, what counts for a budget is the most that is saved at once (`unit_costs`);
a plan states what one forward saves (`as_executed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosac.plans import Plan, Unit
from autosac.simulation import Simulation
from autosac.solvers.mix import Cost
from autosac.trace import Alloc, Collective, Free, Label, ModuleEnter, Op, Phase, Trace

_WORKING = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
_USING = (Phase.BACKWARD, Phase.RECOMPUTE)
# What a forward allocates and is no gradient may have that label: the compiled backward reuses its memory for one.
_NOT_SAVED = (Label.PARAMETER, Label.UNSHARDED_PARAMETER)
_OF_MODEL = "_c10d_functional."  # results of the model's own collectives, not buffers of FSDP


def unit_costs(simulation: Simulation, names: Sequence[str]) -> Mapping[str, Cost]:
    """By module: the time of its kernels and collectives in forward and backward, and the bytes that it saves between them.

    Collectives count as if they were waited for; those that a policy does not repeat are the same under all.
    """
    trace = simulation.trace
    unit_of = _units(trace, names)
    ms = [0.0] * len(names)
    for event, event_ms in zip(trace.events, simulation.pricing.event_ms.tolist(), strict=True):
        if (type(event) is Op or type(event) is Collective) and event.phase in _WORKING and unit_of[event.module] >= 0:
            ms[unit_of[event.module]] += event_ms
    saved = _most_saved(trace, _saved(trace, unit_of), len(names))
    return {name: Cost(nbytes, time) for name, nbytes, time in zip(names, saved, ms, strict=True)}


def as_executed(plan: Plan, simulation: Simulation, none: Simulation) -> Plan:
    """The plan whose units state what they save and take in a compiled step under it: `simulation`. `none`: that without
    checkpointing.
    """
    if not simulation.trace.info.compiled or not plan.units:
        return plan
    names = [unit.fqn for unit in plan.units]
    kept, free = kept_bytes(simulation.trace, names), kept_bytes(none.trace, names)
    ms, free_ms = unit_costs(simulation, names), unit_costs(none, names)

    def executed(unit: Unit) -> Unit:
        nbytes, most = kept[unit.fqn], free[unit.fqn]
        return replace(
            unit,
            kept_bytes=nbytes,
            discard_fraction=min(1.0, max(0.0, 1 - nbytes / most)) if most else 0.0,
            recompute_ms=max(0.0, ms[unit.fqn].ms - free_ms[unit.fqn].ms),
        )

    return replace(plan, units=tuple(map(executed, plan.units)))


def kept_bytes(trace: Trace, names: Sequence[str]) -> Mapping[str, int]:
    """By module: the bytes that one of its forwards saves for its backward, on average."""
    unit_of = _units(trace, names)
    forwards = Counter(
        trace.modules[event.module]
        for event in trace.events
        if type(event) is ModuleEnter and event.phase is Phase.FORWARD
    )
    total = [0] * len(names)
    saved = _saved(trace, unit_of)
    for event in trace.events:
        if type(event) is Alloc and event.storage in saved:
            total[saved[event.storage]] += trace.storages[event.storage].nbytes
    return {name: nbytes // max(1, forwards[name]) for name, nbytes in zip(names, total, strict=True)}


def _units(trace: Trace, names: Sequence[str]) -> list[int]:
    """For each module the position of the unit that it is or lies in, -1 for none."""
    position = {name: i for i, name in enumerate(names)}
    found: list[int] = []
    for module, name in enumerate(trace.modules):
        parent = trace.module_parents[module]
        found.append(position.get(name, found[parent] if 0 <= parent < module else -1))
    return found


def _saved(trace: Trace, unit_of: Sequence[int]) -> dict[int, int]:
    """The storages that units save, with the unit of each."""
    home: dict[int, int] = {}
    for event in trace.events:
        if type(event) is Alloc:
            row = trace.storages[event.storage]
            others = row.label in _NOT_SAVED or (row.label is Label.COMMUNICATION and not row.op.startswith(_OF_MODEL))
            if unit_of[row.module] >= 0 and row.phase is Phase.FORWARD and not others:
                home[event.storage] = unit_of[row.module]
    found: dict[int, int] = {}
    for event in trace.events:
        if (type(event) is Op or type(event) is Collective) and event.phase in _USING:
            unit = unit_of[event.module]
            found.update((s, unit) for s in (*event.inputs, *event.outputs) if unit >= 0 and home.get(s) == unit)
    return found


def _most_saved(trace: Trace, saved: Mapping[int, int], count: int) -> list[int]:
    now, most = [0] * count, [0] * count
    for event in trace.events:
        if type(event) is Alloc and event.storage in saved:
            unit = saved[event.storage]
            now[unit] += trace.storages[event.storage].nbytes
            most[unit] = max(most[unit], now[unit])
        elif type(event) is Free and event.storage in saved:
            now[saved[event.storage]] -= trace.storages[event.storage].nbytes
    return most

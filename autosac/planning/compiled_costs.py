"""What each unit takes of a step that runs compiled: the time of its kernels and collectives, and the bytes that it saves.

Both come from the captured step, so they are what the partitioner and the fusion made of the unit's policy. A storage is
*saved* by the unit in whose forward it was allocated if it is still there when a backward of that unit begins. With several
microbatches under way, what counts is the most that is saved at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosac.simulation import Simulation
from autosac.solvers.mix import Cost
from autosac.trace import Alloc, Collective, Free, Label, Op, Phase, Trace

_WORKING = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
_NOT_SAVED = (Label.PARAMETER, Label.UNSHARDED_PARAMETER, Label.COMMUNICATION, Label.GRADIENT)


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
    saved = _most_saved(trace, unit_of, len(names))
    return {name: Cost(nbytes, time) for name, nbytes, time in zip(names, saved, ms, strict=True)}


def _units(trace: Trace, names: Sequence[str]) -> list[int]:
    """For each module the position of the unit that it is or lies in, -1 for none."""
    position = {name: i for i, name in enumerate(names)}
    found: list[int] = []
    for module, name in enumerate(trace.modules):
        parent = trace.module_parents[module]
        found.append(position.get(name, found[parent] if 0 <= parent < module else -1))
    return found


def _most_saved(trace: Trace, unit_of: Sequence[int], count: int) -> list[int]:
    freed = {event.storage: i for i, event in enumerate(trace.events) if type(event) is Free}
    backward: list[list[int]] = [[] for _ in range(count)]
    for i, event in enumerate(trace.events):
        if type(event) is Op and event.phase is Phase.BACKWARD and unit_of[event.module] >= 0:
            backward[unit_of[event.module]].append(i)
    now, most = [0] * count, [0] * count
    held: dict[int, int] = {}
    ahead = [0] * count  # of each unit, the next operator of a backward
    for i, event in enumerate(trace.events):
        if type(event) is Alloc:
            storage = trace.storages[event.storage]
            unit = unit_of[storage.module]
            if unit < 0 or storage.phase is not Phase.FORWARD or storage.label in _NOT_SAVED:
                continue
            while ahead[unit] < len(backward[unit]) and backward[unit][ahead[unit]] < i:
                ahead[unit] += 1
            first = backward[unit][ahead[unit]] if ahead[unit] < len(backward[unit]) else len(trace.events)
            if freed.get(event.storage, len(trace.events)) >= first:
                held[event.storage] = unit
                now[unit] += storage.nbytes
                most[unit] = max(most[unit], now[unit])
        elif type(event) is Free and event.storage in held:
            now[held.pop(event.storage)] -= trace.storages[event.storage].nbytes
    return most

"""What a plan does in each of a model's equal layers (members of ``layers``), and the plan of a model with fewer of them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import replace

from autosac.plans.plan import Plan

_IN_LAYER = re.compile(r"layers\.(\d+)(?:\.(.*))?")


def layer_number(name: str) -> int | None:
    """The number of the layer that the module of this name is, or lies in; None if there is none."""
    place = _IN_LAYER.fullmatch(name)
    return int(place[1]) if place is not None else None


def doings(plan: Plan, layers: int) -> list[Hashable]:
    """For each of so many layers what the plan does in it: equal values for equal doings."""
    found: list[list[Hashable]] = [[] for _ in range(layers)]
    for unit in plan.units:
        place = _IN_LAYER.fullmatch(unit.fqn)
        if place is not None and int(place[1]) < layers:
            found[int(place[1])].append((place[2], unit.policy))
    return [tuple(units) for units in found]


def is_alike(plan: Plan) -> bool:
    """Whether the plan does the same in all layers that it knows of, and something in the first one."""
    places = [_IN_LAYER.fullmatch(name) for name, _ in plan.made_for.parameters]
    layers = 1 + max((int(place[1]) for place in places if place), default=-1)
    found = doings(plan, layers)
    return layers > 0 and found[0] != () and all(doing == found[0] for doing in found)


def of_few_layers(plan: Plan, layers: int) -> Plan:
    """The plan without what is in later layers than the first so many."""

    def stays(name: str) -> bool:
        place = _IN_LAYER.fullmatch(name)
        return place is None or int(place[1]) < layers

    parameters = tuple(parameter for parameter in plan.made_for.parameters if stays(parameter[0]))
    return replace(
        plan,
        units=tuple(unit for unit in plan.units if stays(unit.fqn)),
        made_for=replace(plan.made_for, parameters=parameters),
    )

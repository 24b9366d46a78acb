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
    """Whether the plan does the same in all layers that it knows of, and something in the first one. TorchTitan's own does."""
    if plan.settings.job_checkpointing:
        return True
    places = [_IN_LAYER.fullmatch(name) for name, _ in plan.made_for.parameters]
    layers = 1 + max((int(place[1]) for place in places if place), default=-1)
    found = doings(plan, layers)
    return layers > 0 and found[0] != () and all(doing == found[0] for doing in found)


def in_all_layers(plan: Plan, layers: int) -> Plan | None:
    """The plan that does in each of so many layers what this one, of a pipeline stage, does in all of the stage's: with fewer
    layers in all, the stage has others. None if the plan does not do the same in all that it knows of.
    """
    names = [name for name, _ in plan.made_for.parameters]
    known = sorted({number for number in map(layer_number, names) if number is not None})
    found = doings(plan, layers)
    if not known or known[-1] >= layers or any(found[number] != found[known[0]] for number in known):
        return None

    def spread(name: str) -> list[str]:
        place = _IN_LAYER.fullmatch(name)
        if place is None:
            return [name]
        if int(place[1]) != known[0]:
            return []
        rest = "" if place[2] is None else f".{place[2]}"
        return [f"layers.{number}{rest}" for number in range(layers)]

    parameters = tuple((other, shape) for name, shape in plan.made_for.parameters for other in spread(name))
    return replace(
        plan,
        units=tuple(replace(unit, fqn=name) for unit in plan.units for name in spread(unit.fqn)),
        made_for=replace(plan.made_for, parameters=parameters),
    )


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

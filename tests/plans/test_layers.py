"""Plans of pipeline stages for models with other numbers of layers."""

from __future__ import annotations

from dataclasses import replace

from autosac.plans import Decision, Plan, Unit
from autosac.plans.layers import in_all_layers, is_alike, of_few_layers
from plans import MADE_FOR

SHAPE = (4, 4)


def plan_of(keep: tuple[bool, bool], *names: str) -> Plan:
    """Of a stage with layers 2 and 3 and a head: `keep` says what each layer's unit keeps."""
    parameters = tuple((name, SHAPE) for name in ("layers.2.w", "layers.3.w", *names))
    units = tuple(
        Unit(
            fqn=f"layers.{layer}.block",
            discard_fraction=1.0,
            kept_bytes=0,
            recompute_ms=1.0,
            decisions=(Decision(op="aten.mm.default", occurrence=0, keep=kept, outputs=(((4, 4), "float32"),)),),
        )
        for layer, kept in zip((2, 3), keep, strict=True)
    )
    return Plan(made_for=replace(MADE_FOR, parameters=parameters, pipeline_stages=4), units=units)


def test_a_stage_that_treats_its_layers_alike() -> None:
    """What it does in layers 2 and 3 is done in all 5; parameters of no layer stay as they are."""
    wide = in_all_layers(plan_of((True, True), "head.w"), 5)
    assert wide is not None and is_alike(wide)
    assert [unit.fqn for unit in wide.units] == [f"layers.{layer}.block" for layer in range(5)]
    assert {unit.policy for unit in wide.units} == {plan_of((True, True)).units[0].policy}
    assert wide.made_for.parameters == (*((f"layers.{layer}.w", SHAPE) for layer in range(5)), ("head.w", SHAPE))


def test_a_stage_of_one_layer() -> None:
    """What it does in layer 2 is done in all three."""
    plan = plan_of((True, True))
    alone = replace(plan, units=plan.units[:1], made_for=replace(plan.made_for, parameters=(("layers.2.w", SHAPE),)))
    wide = in_all_layers(alone, 3)
    assert wide is not None and [unit.fqn for unit in wide.units] == [f"layers.{layer}.block" for layer in range(3)]


def test_a_stage_that_does_not() -> None:
    """Layers that keep different things, and a layer that the model has not: there is no such plan."""
    assert in_all_layers(plan_of((True, False)), 5) is None
    assert in_all_layers(plan_of((True, True)), 3) is None
    assert in_all_layers(plan_of((True, True), "layers.4.w"), 5) is None


def test_later_layers_are_left_out() -> None:
    """Of layers 2 and 3 and a head the first three layers leave layer 2 and the head; two leave the head alone."""
    plan = plan_of((True, True), "head.w")
    three, two = of_few_layers(plan, 3), of_few_layers(plan, 2)
    assert [unit.fqn for unit in three.units] == ["layers.2.block"] and two.units == ()
    assert [name for name, _ in three.made_for.parameters] == ["layers.2.w", "head.w"]
    assert [name for name, _ in two.made_for.parameters] == ["head.w"]

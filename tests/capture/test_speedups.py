"""What only saves time: the functions it replaces exist, and what they answer is what PyTorch's own answer."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._library import simple_registry
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, TupleStrategy
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.capture.device.operators import per_operator
from autosac.capture.patches import speedups

aten = torch.ops.aten


@pytest.mark.parametrize(
    "path",
    [
        "torch._library.simple_registry:find_torch_dispatch_rule",
        "torch.distributed.tensor._sharding_prop:_expand_single_dim_strategy_to_mesh",
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._distribute_region",
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._get_device_state",
    ],
)
def test_what_is_replaced_exists(path: str) -> None:
    """A canary: without it the capture would be right, but slow."""
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    assert callable(value)


class Mode(TorchDispatchMode):
    """A mode with a dispatch rule."""


def test_dispatch_rules_are_found_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the faster code: no rule for most operators and modes, the registered one where there is one."""

    def rule(*_: Any) -> None:
        raise AssertionError

    entry = simple_registry.singleton.find(aten.mm.default.__qualname__)
    handle = entry.torch_dispatch_rules.register(Mode, rule)
    code = simple_registry.find_torch_dispatch_rule.__code__
    try:
        for install in (lambda: None, speedups.install_dispatch_rules):
            install()
            find = simple_registry.find_torch_dispatch_rule
            assert find(aten.mm.default, Mode) is rule
            assert find(aten.mm.default, TorchDispatchMode) is None
            assert find(aten.bmm.default, Mode) is None
        assert simple_registry.find_torch_dispatch_rule.__code__ is not code
    finally:
        simple_registry.find_torch_dispatch_rule.__code__ = code
        handle.destroy()


def strategy(*names: str) -> TupleStrategy:
    """A list argument whose elements have these specs (strings stand for them)."""
    return TupleStrategy([OpStrategy([OpSpec(name, None)]) for name in names])  # type: ignore[arg-type]


def schema(operator: Any, *args: Any) -> Any:
    """The part of an OpSchema that is read."""
    return SimpleNamespace(op=operator, args_schema=args, kwargs_schema={})


def test_elements_of_a_foreach_operator() -> None:
    """Two elements are the same if all their specs and their output's are; scalars are not asked."""
    lists = schema(aten._foreach_add.List, strategy("a", "b", "a"), strategy("x", "y", "x"))
    first, second, third = speedups.elements_of_lists(lists, TupleStrategy, ["m", "m", "m"])  # type: ignore[misc]
    assert first == third != second
    first, _, third = speedups.elements_of_lists(lists, TupleStrategy, ["m", "m", "other"])  # type: ignore[misc]
    assert first != third


@pytest.mark.parametrize(
    ("operator", "args", "metas"),
    [
        (aten.add.Tensor, (strategy("a"),), None),
        (aten._foreach_add.List, (strategy("a"), strategy("a", "b")), None),
        (aten._foreach_add.List, (strategy("a", "b"),), ["only one"]),
        (aten._foreach_add.List, (), None),
        (aten._foreach_add.List, (TupleStrategy([OpStrategy([OpSpec([], None)])]),), None),  # type: ignore[arg-type]
    ],
)
def test_unusual_operators_are_left_alone(operator: Any, args: Any, metas: Any) -> None:
    """Other operators, lists of different lengths, and specs that cannot be compared go PyTorch's own way."""
    assert speedups.elements_of_lists(schema(operator, *args), TupleStrategy, metas) is None


@pytest.mark.parametrize("flags", [(), (None,), (False, False), (True, False, True), (False, True), (True, True)])
def test_flags_of_strided_shards_are_as_before(monkeypatch: pytest.MonkeyPatch, flags: tuple[bool, ...]) -> None:
    """With any flags on the inputs, the faster look at them leaves in every output the flag that PyTorch's own leaves."""
    sharding_prop: Any = importlib.import_module("torch.distributed.tensor._sharding_prop")
    original = sharding_prop._propagate_use_strided_shard_flag
    monkeypatch.setattr(sharding_prop, "_propagate_use_strided_shard_flag", original)
    speedups.faster_strided_shard_flags()

    def spec(flag: bool | None) -> Any:
        placements = (placement_types._StridedShard(0, split_factor=2),)
        return SimpleNamespace(placements=placements, use_strided_shard_as_shard_order=flag, shard_order=())

    def left(propagate: Any) -> list[Any]:
        plain = SimpleNamespace(placements=(placement_types.Shard(0),))
        strategies = [
            SimpleNamespace(output_specs=(spec(flag), None), input_specs=(spec(flag),)) for flag in (True, False)
        ]
        op_schema = SimpleNamespace(args_spec=(plain, *map(spec, flags)))
        for own in strategies:  # one call for each element, with the same schema
            propagate(SimpleNamespace(strategies=[own]), op_schema)
        return [
            (s.use_strided_shard_as_shard_order, s.shard_order)
            for o in strategies
            for s in (o.output_specs[0], *o.input_specs)
        ]

    try:
        assert left(sharding_prop._propagate_use_strided_shard_flag) == left(original)
        assert sharding_prop._propagate_use_strided_shard_flag is not original
    finally:
        sharding_prop._propagate_use_strided_shard_flag = original


def test_per_operator_asks_once_for_each() -> None:
    """The function runs once per operator, also where operators are equal but not identical."""
    asked: list[Any] = []

    @per_operator
    def length(value: Any) -> int:
        """How long."""
        asked.append(value)
        return len(value)

    one, other = [1, 2], [1, 2]
    assert [length(one), length(one), length(other)] == [2, 2, 2]
    assert asked == [one, other] and inspect.getdoc(length) == "How long."

"""Modules by clean names, whatever stands around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from autosac.integrations import apply
from autosac.integrations.operators.modules import (
    class_name,
    clean_name,
    find_module,
    has_compiled,
    is_compiled,
    parameter_shapes,
    parameters_of,
    selectively_checkpointed,
    shapes_by_name,
    unwrapped,
)
from autosac.plans import Plan, Settings, Unit
from plans import MADE_FOR


def contexts() -> Any:
    """PyTorch's selective checkpointing that saves nothing."""
    return create_selective_checkpoint_contexts([])


def model() -> nn.Module:
    """Five linear layers: bare, checkpointed, selectively checkpointed, compiled, offloaded."""
    layers = [nn.Linear(2, n) for n in range(1, 6)]
    return nn.Sequential(
        layers[0],
        checkpoint_wrapper(layers[1]),
        checkpoint_wrapper(layers[2], context_fn=contexts),
        torch.compile(checkpoint_wrapper(layers[3], context_fn=contexts)),
        offload_wrapper(layers[4]),
    )


def test_names_have_no_levels_of_wrappers() -> None:
    """Neither checkpointing's nor compilation's."""
    assert clean_name("layers.0._checkpoint_wrapped_module._orig_mod.w") == "layers.0.w"
    assert clean_name("layers.0.w") == "layers.0.w"


def test_wrappers_are_taken_off() -> None:
    """All of them; a module without any is itself."""
    found = model()
    widths = [unwrapped(found[i]).out_features for i in range(5)]  # type: ignore[index]
    assert widths == [1, 2, 3, 4, 5]
    assert [is_compiled(found[i]) for i in range(5)] == [False, False, False, True, False]  # type: ignore[index]
    assert unwrapped(found) is found


def test_a_compiled_part_is_found() -> None:
    """By either way to compile it, however deep; a model without one has none."""
    plain, in_place = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    in_place[0][0].compile()  # type: ignore[index]
    assert [has_compiled(each) for each in (plain, in_place, model())] == [False, True, True]


def test_fabric_is_a_wrapper() -> None:
    """Lightning's wrapper, known by its name, has the module twice; names are those of the module in it."""

    class _FabricModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._forward_module = self._original_module = inner

    inner = model()
    wrapped = _FabricModule(torch.compile(inner))  # type: ignore[arg-type]
    assert unwrapped(wrapped) is inner
    assert find_module(wrapped, "0") is inner[0]  # type: ignore[index]
    assert parameters_of(wrapped) == parameters_of(inner)


def test_a_class_has_its_authors_name() -> None:
    """Whatever is around the module; `fully_shard` and the first FSDP give it another class."""

    class Body(nn.Linear):
        pass

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded = fully_shard(Body(2, 2), mesh=init_device_mesh("cpu", (2,)))
        first = FullyShardedDataParallel(checkpoint_wrapper(Body(2, 2)), device_id=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert type(sharded).__name__ == "FSDPBody"
    names = [class_name(each) for each in (Body(2, 2), checkpoint_wrapper(Body(2, 2)), sharded, first)]
    assert names == ["Body"] * 4


def test_modules_are_found_by_clean_names() -> None:
    """As they stand, with their wrappers; None for what is not there."""
    whole = nn.Sequential(torch.compile(model()))
    assert find_module(whole, "0.3") is whole[0]._orig_mod[3]
    assert find_module(whole, "0.9") is None and find_module(whole, "x.y") is None


def test_parameters_have_all_their_names() -> None:
    """A shared one has two; shapes come with clean names, of several parts together."""
    found = model()
    found[0].weight = unwrapped(found[4]).weight  # type: ignore[index,union-attr]
    shapes = dict(parameter_shapes(torch.compile(found)))  # type: ignore[arg-type]
    assert shapes["0.weight"] == shapes["4.weight"] == (5, 2) and shapes["3.bias"] == (4,)
    assert dict(parameters_of(found)) == shapes == shapes_by_name([found])
    assert shapes_by_name([nn.Linear(1, 1), nn.Linear(2, 1, bias=False)]) == {"weight": (1, 2), "bias": (1,)}


def test_which_modules_are_selectively_checkpointed() -> None:
    """Those with a context function, sorted; plain checkpointing and offloading are not."""
    assert selectively_checkpointed([model(), nn.Linear(1, 1)]) == ("2", "3")


def test_only_plans_for_the_compiler_set_its_partitioner() -> None:
    """A plan of decisions leaves its settings as they are; one with a memory budget sets it for what is compiled next."""
    config: Any = torch._functorch.config
    net = nn.Sequential(nn.Linear(2, 2))
    names = [
        name
        for name in ("activation_memory_budget", "unsafe_treat_script_objects_as_zero_size")
        if hasattr(config, name)
    ]
    before = {name: getattr(config, name) for name in names}
    try:
        apply.apply(net, Plan(made_for=MADE_FOR, units=()))
        assert {name: getattr(config, name) for name in before} == before
        apply.apply(net, Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=0.5)))
        assert config.activation_memory_budget == 0.5
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    assert not Plan(made_for=MADE_FOR, units=()).needs_compiler
    budgeted = Unit(fqn="0", discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=(), memory_budget=0.5)
    assert Plan(made_for=MADE_FOR, units=(budgeted,)).needs_compiler

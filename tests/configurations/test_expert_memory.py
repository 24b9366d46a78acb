"""What experts take beside what layers keep, added up by hand."""

from __future__ import annotations

from dataclasses import replace

from autosac.configurations.bounds.bounds import memory_bound_bytes, split_of
from autosac.configurations.bounds.memory import least_bytes
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import places

AHEAD = Sharding(gathers_at_once=1, inner_at_once=2)  # the next layer's experts are gathered beside a layer's
LAYERS_OF_EXPERTS = ModelCosts(
    layers=3,
    layer=LayerCosts(),
    first=LayerCosts(),
    last=LayerCosts(),
    layer_parameters=1e9,
    outside_parameters=0.0,
    message_parameters=0.8e9,
    layer_experts=0.8e9,
    reserved=True,
    sharding=AHEAD,
)
STATES = 12 * 3e9 / 16
REDUCED = (2 + 4) * 0.8e9  # gradients as they were computed and a message in float32
GATHERED = 2 * 0.8e9


def test_gathered_experts_are_on_a_stream_of_their_own() -> None:
    """Three layers of a billion parameters on 16 shards: of reserved memory, two layers' messages of experts; over 4 ranks of
    experts a quarter of them, over 16 none.
    """
    layout = Layout(gpu="any", shard=16, global_batch=16)
    model = LAYERS_OF_EXPERTS
    assert memory_bound_bytes(layout, model) == STATES + 2 * GATHERED + REDUCED
    assert memory_bound_bytes(layout, replace(model, reserved=False)) == STATES + REDUCED
    assert memory_bound_bytes(replace(layout, expert=4), model) == STATES + (2 * GATHERED + REDUCED) / 4
    assert memory_bound_bytes(replace(layout, expert=16), model) == 16 * 3e9 / 16
    one = replace(model, sharding=replace(AHEAD, inner_at_once=1))
    assert memory_bound_bytes(layout, one) == STATES + GATHERED + REDUCED


def test_a_layers_backward_needs_its_experts() -> None:
    """An operator of the backward needs 9 GB beside gathered experts, which count where FSDP frees and gathers them: neither
    where all ranks share them out, nor where parameters stay, all of which count then.
    """
    layer = LayerCosts(working_bytes=10 * 10**9, beside_experts_bytes=9 * 10**9)
    model = replace(LAYERS_OF_EXPERTS, layer=layer, sharding=NOTHING_KNOWN)
    layout = Layout(gpu="any", shard=16, global_batch=16, reshard="always")
    assert memory_bound_bytes(layout, model) == STATES + 9e9 + GATHERED
    assert memory_bound_bytes(replace(layout, expert=2), model) == STATES + 10e9  # 9 + 0.8 are less
    assert memory_bound_bytes(replace(layout, expert=16), model) == STATES + 10e9
    assert memory_bound_bytes(replace(layout, reshard="never"), model) == STATES + 3 * 2e9 + 10e9


def test_a_stage_gathers_the_experts_of_its_own_layers() -> None:
    """Two stages of two layers, the first of which has none: one message of experts on the first rank, two on the last."""
    model = replace(LAYERS_OF_EXPERTS, layers=4, leading=1, lead_parameters=1e9)
    layout = Layout(gpu="any", shard=16, pipeline=2, global_batch=32)
    split = split_of(layout, model)
    assert split == (2, 2)
    for place, messages in zip(places(layout, split, 1), (1, 2), strict=True):
        without = least_bytes(layout, replace(model, sharding=NOTHING_KNOWN), place)
        assert least_bytes(layout, model, place) == without + messages * GATHERED

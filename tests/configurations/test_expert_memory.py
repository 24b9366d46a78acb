"""What experts take beside what layers keep, added up by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from searches import TINY, inputs

from autosac.capture.process.server import CaptureServer
from autosac.configurations.bounds.bounds import memory_bound_bytes, split_of
from autosac.configurations.bounds.memory import least_bytes
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.bounds.sheets import Sheet
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
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


def test_no_simulated_step_of_experts_needs_less(tmp_path: Path, capture_server: CaptureServer) -> None:
    """DeepSeek-V3's debug model, two experts' ranks of four GPUs: two messages of experts at once, and in no way of
    checkpointing does a step need less than the bound that counts them.
    """
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nname = "deepseek_v3"\nflavor = "debugmodel"\n\n[training]\nlocal_batch_size = 8\nseq_len = 512\n'
    )
    space = TINY.model_copy(update={"expert_parallel": (2,)})
    offer = Offer(gpu="h100-sxm-80gb", world_size=4)
    with searching(inputs(job, space=space, offers=(offer,), budget="1MiB", study=tmp_path / "study")) as search:
        (layout,) = search.layouts
        search.ask_sheet(layout)
        sheet = search.sheet_of(layout)
        rows = search.task(layout, math.inf).run(capture_server)["rows"]
        assert isinstance(sheet, Sheet)
        assert (sheet.sharding.inner_at_once, sheet.layer.beside_experts_bytes > 0) == (2, True)
        assert {row["checkpointing"] for row in rows} == {"none", "full"}
        least = search.least_bytes(layout)
        assert 0 < least <= min(row["peak_reserved_bytes"] for row in rows)
        with_none = search.bounds.shape(layout, replace(sheet, sharding=replace(sheet.sharding, inner_at_once=0)))
        assert memory_bound_bytes(layout, with_none) < least

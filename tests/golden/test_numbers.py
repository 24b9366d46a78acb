"""Numbers that follow from stored steps and from layouts, pinned: what bounds of the search know, its bounds, its layouts.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pinned import check, digest, lines_of

from autosac.configurations.bounds.bounds import (
    any_split_bound_ms,
    bound_ms,
    memory_bound_bytes,
    recompute_bound_ms,
    recomputing_bound_ms,
    split_of,
    time_bound_ms,
)
from autosac.configurations.bounds.shapes import ModelCosts, costs_of_parameters
from autosac.configurations.bounds.sheets import Sheet, sheet_layout, sheet_of
from autosac.configurations.bounds.traffic import Roads
from autosac.configurations.space.layout import Layout, ModelFacts, arguments_of, legal, settings_of
from autosac.configurations.space.space import Space
from autosac.configurations.space.splits import balanced_split, module_names, torchtitan_split
from autosac.simulation import Target, simulation_of
from autosac.trace import Trace

FOLDER = Path(__file__).parent
TARGET = Target.of("h100-sxm-80gb", 8)
MIB = 2**20
PARAMETERS = {
    "tok_embeddings.weight": (2048, 256),
    "layers.0.attention.wq.weight": (256, 256),
    "layers.0.feed_forward.w1.weight": (768, 256),
    "layers.0.attention_norm.weight": (256,),
    "layers.0.experts": (4, 256, 768),
    "norm.weight": (256,),
    "output.weight": (2048, 256),
}


@cache
def sheet(name: str) -> Sheet:
    """What a stored step tells bounds."""
    return sheet_of(simulation_of(Trace.load(FOLDER / f"{name}.trace"), TARGET))


@pytest.mark.parametrize("name", ["observed", "selective"])
def test_sheets(name: str) -> None:
    """Of a stored step: written, read, and as the shape of one rank and of a pipeline's."""
    found = sheet(name)
    assert Sheet.of(found.document()) == found
    shapes = {str(pipeline): asdict(found.shape(pipeline=pipeline)) for pipeline in (False, True)}
    check(FOLDER / f"sheet-{name}.txt", lines_of({"sheet": found.document(), **shapes}))


def layouts() -> Iterator[Layout]:
    """On 8 and on 16 GPUs."""
    base = Layout(gpu="h100-sxm-80gb", shard=8, global_batch=64)
    yield from (base, replace(base, microbatch=2), replace(base, reshard="never"), replace(base, cpu_offload=True))
    yield from (
        replace(base, activation_offload=True),
        replace(base, shard=4, tensor=2),
        replace(base, shard=2, replicate=4),
    )
    yield from (replace(base, shard=4, context=2), replace(base, expert=4), replace(base, expert=4, tensor=2, shard=4))
    yield replace(base, shard=1, replicate=8)
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        yield replace(base, shard=2, pipeline=4, schedule=schedule)
    yield replace(base, shard=4, pipeline=4, microbatch=4)
    yield replace(base, shard=2, pipeline=4, split="balanced")
    yield replace(base, shard=2, pipeline=2, tensor=2, reshard="never", split="balanced")


def bounds(layout: Layout, shape: ModelCosts, budget_bytes: float) -> dict[str, Any]:
    """All that is known of a layout before it is captured."""
    return {
        "split": split_of(layout, shape),
        "time": time_bound_ms(layout, shape),
        "recomputing": recomputing_bound_ms(layout, shape, 0.5),
        "any split": any_split_bound_ms(layout, shape),
        "memory": memory_bound_bytes(layout, shape),
        "recomputation": [recompute_bound_ms(layout, shape, rank, budget_bytes) for rank in range(layout.pipeline)],
        "within": bound_ms(layout, shape, budget_bytes),
    }


def test_bounds() -> None:
    """Of layouts of every kind: from parameters alone, and from a sheet, with little memory and with enough."""
    roads = Roads(TARGET)
    found: dict[str, Any] = {}
    for layout in layouts():
        captured = replace(sheet("observed").shape(pipeline=layout.pipeline > 1), layers=16)
        counted = costs_of_parameters(PARAMETERS, ModelFacts(layers=16, seq_len=2048), layout, 989e12)
        for name, shape, budget_mib in (
            ("counted", counted, 64),
            ("captured", captured, 900),
            ("small", captured, 300),
        ):
            traffic = roads.traffic(layout, shape.layers, shape.layer_parameters, 2, 4)
            whole = replace(shape, traffic=traffic, memory_gbps=3350.0, budget_bytes=budget_mib * MIB)
            found[f"{layout} {layout.gpu} {name}"] = {
                **bounds(layout, whole, budget_mib * MIB),
                "traffic": asdict(traffic),
            }
    check(FOLDER / "bounds.txt", lines_of(found))


def test_layouts() -> None:
    """The settings of layouts, their arguments, the layouts that serve as their sheets, and which are legal for a model."""
    found: dict[str, Any] = {}
    for layout in layouts():
        split = torchtitan_split(16, layout.pipeline * layout.stages_per_rank)
        for python in (False, True):
            float8 = replace(layout, float8=python, compile=python)
            settings = settings_of(float8, ("mine",), split if layout.pipeline > 1 else None, python=python)
            name = f"{float8} {'python' if python else 'file'}"
            found[name] = {"sheet": sheet_layout(layout).key, "arguments": " ".join(arguments_of(settings))}
    space = Space(
        tensor_parallel=(1, 2, 3),
        context_parallel=(1, 2),
        pipeline_parallel=(1, 2),
        expert_parallel=(1, 2),
        expert_tensor_parallel=(1, 2),
        microbatch=(1, 2),
        reshard_after_forward=("always", "never"),
        cpu_offload=(False, True),
    )
    facts = ModelFacts(layers=8, heads=12, kv_heads=4, experts=4, seq_len=2048)
    for gpus, more in ((8, facts), (2, facts._replace(pipelines=False)), (12, facts._replace(experts=0, heads=0))):
        names = [str(layout) for layout in legal(space, "any", gpus, 4, 24, more, True)]
        found[f"legal on {gpus}"] = [len(names), digest(names), *names[::200]]
    check(FOLDER / "layouts.txt", lines_of(found))


def test_splits() -> None:
    """How 1 to 12 layers are divided over 1 to 6 stages by TorchTitan, and where stages cost alike but the last one."""
    found: dict[str, Any] = {}
    for layers in range(1, 13):
        for stages in range(1, min(layers, 6) + 1):
            own = [torchtitan_split(layers, stages, *less) for less in ((1, 1), (2, 0), (0, 3))]
            even = balanced_split(layers, stages, lambda s, i, j, last=stages - 1: (j - i) * 1.0 + 2 * (s == last))
            found[f"{layers} in {stages}"] = [*own, even, digest(module_names(even))]
    check(FOLDER / "splits.txt", lines_of(found))

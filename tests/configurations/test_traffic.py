"""What is known of FSDP's transfers against executed steps, and against the model of collectives."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.bounds.bounds import time_bound_ms
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.bounds.traffic import NO_TRAFFIC, Roads, Traffic, Transfers, busy_ms, least_slowdown
from autosac.configurations.space.layout import Layout
from autosac.estimator.pricing import default_models
from autosac.runtime_sim import INSTANT_HOST, ConstantOverlap, LinkUse, simulate
from autosac.simulation import Target
from autosac.trace import Collective, Event, Group, Op, Phase, Signature, TensorMeta
from traces import trace_of


class Priced(NamedTuple):
    """The durations of a trace's events, and what transfers take of the links."""

    event_ms: np.ndarray
    link_use: dict[int, LinkUse]


SHARES = st.tuples(*[st.floats(0.0, 1.0)] * 2)


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.1, 5)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 3),
    st.floats(0.1, 5),
    st.floats(0.1, 5),
    SHARES,
    SHARES,
    st.floats(1.01, 3),
    st.randoms(),
)
def test_no_step_is_faster_than_its_transfers_allow(
    chain: list[tuple[bool, float]],
    gathers: int,
    scatters: int,
    gather_ms: float,
    scatter_ms: float,
    gather_use: tuple[float, float],
    scatter_use: tuple[float, float],
    slowdown: float,
    random: Random,
) -> None:
    """A chain of operators (or of transfers that they wait for) beside gathers and scatters in any order, executed by the
    engine: it takes no less than the bound of a layer that holds them.
    """
    groups = tuple(Group.of(name, range(0, 16, 8)) for name in ("gather", "scatter", "wait"))
    rows: list[tuple[int, float]] = [(0 if is_op else 3, ms) for is_op, ms in chain]
    others = [(1, gather_ms)] * gathers + [(2, scatter_ms)] * scatters
    random.shuffle(others)
    for other in others:
        rows.insert(random.randrange(len(rows) + 1), other)
    events: list[Event] = []
    uses: dict[int, LinkUse] = {}
    for stream, _ in rows:
        if stream in (1, 2):
            port, adapter = gather_use if stream == 1 else scatter_use
            uses[len(events)] = LinkUse(port=port, adapter=adapter, rate=max(port, adapter, 0.01))
        if stream == 0:
            events.append(Op(0, 0, 0, Phase.FORWARD, 0, (0,), (1,)))
        else:
            kind, own = ("reduce_scatter" if stream == 2 else "all_gather"), 0 if stream == 3 else stream
            events.append(Collective(kind, 8, stream - 1, own, False, -1, -1, -1, 0, 0, Phase.FORWARD, 0, (), ()))
    meta = TensorMeta((4,), (1,), "float32")
    trace = trace_of(events, signatures=(Signature("aten.mm.default", (meta, meta), (meta,)),), groups=groups)
    overlap = ConstantOverlap(compute_intra=slowdown, compute_inter=slowdown)
    priced = Priced(np.array([ms for _, ms in rows]), uses)
    step_ms = simulate([trace], [priced], host=INSTANT_HOST, overlap=overlap, steps=1).makespan_ms
    traffic = Traffic(
        gather_ms=gather_ms,
        scatter_ms=scatter_ms,
        gather_links_ms=tuple(gather_ms * share for share in gather_use),
        scatter_links_ms=tuple(scatter_ms * share for share in scatter_use),
        slowdown=slowdown,
    )
    waits = sum(ms for is_op, ms in chain if not is_op)
    busy = busy_ms(Transfers(traffic, gathers, scatters))
    beside = max(0.0, busy - waits)
    least_ms = max(busy, sum(ms for _, ms in chain) + (1 - 1 / slowdown) * beside)
    assert least_ms <= step_ms * (1 + 1e-9)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 60))
def test_larger_messages_are_no_slower_for_each_byte(doublings: int, stride: int, mebibytes: int) -> None:
    """Which the traffic of layers assumes of the model of collectives: on one node and on several."""
    roads = Roads(Target.of("h100-sxm-80gb", 64))
    layout = Layout(gpu="any", shard=2**doublings, tensor=2**stride if doublings + stride <= 6 else 1)

    def gather_ms(layers: int) -> float:
        return roads.traffic(layout, layers, mebibytes * 2**20, 2, 4).gather_ms

    assert gather_ms(80) <= gather_ms(2) * (1 + 1e-9) and gather_ms(2) <= gather_ms(1) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shard", "tensor", "pipeline", "known"),
    [
        *((2, 1, 1, True), (1, 1, 1, False), (1, 2, 1, False), (64, 1, 1, True)),
        *((4, 1, 2, True), (8, 1, 2, True), (16, 1, 2, True), (12, 1, 2, False), (3, 1, 4, False), (3, 4, 2, False)),
    ],
)
def test_traffic_is_known_of_aligned_stages(shard: int, tensor: int, pipeline: int, known: bool) -> None:
    """A pipeline's stages fill whole nodes of eight GPUs, or several of them one node; without FSDP nothing is gathered."""
    roads = Roads(Target.of("h100-sxm-80gb", shard * tensor * pipeline))
    layout = Layout(gpu="any", shard=shard, tensor=tensor, pipeline=pipeline)
    traffic = roads.traffic(layout, 4, 2.0**24, 2, 4)
    assert (traffic.gather_ms > 0) is (traffic.scatter_ms > 0) is known
    assert roads.traffic(layout, 4, 0.2 * tensor, 2, 4).gather_ms == 0.0


@pytest.mark.parametrize(("expert", "expert_tensor", "ranks", "stride"), [(8, 1, 16, 8), (8, 2, 8, 16), (64, 1, 2, 64)])
def test_experts_are_gathered_by_those_that_hold_the_same(
    expert: int, expert_tensor: int, ranks: int, stride: int
) -> None:
    """Of 128 ranks (FSDP 64, TP 2), divided by those that hold other experts, or other parts of the same."""
    target = Target.of("h100-sxm-80gb", 128)
    roads = Roads(target)
    layout = Layout(gpu="any", shard=64, tensor=2, expert=expert, expert_tensor=expert_tensor)
    traffic = roads.expert_traffic(layout, 4, 2.0**28, 2, 4)
    models = default_models(target.hardware).collectives
    group = target.cluster.place(range(0, ranks * stride, stride))
    nbytes = 4 * 2**28 * 2 // (expert * expert_tensor)
    assert traffic.gather_ms == models.estimate("all_gather", nbytes, group).ms / 4
    assert traffic.scatter_ms == models.estimate("reduce_scatter", 2 * nbytes, group).ms / 4
    assert roads.expert_traffic(replace(layout, expert=1, expert_tensor=1), 4, 2.0**28, 2, 4) is NO_TRAFFIC
    assert roads.expert_traffic(replace(layout, shard=expert * expert_tensor // 2), 4, 2.0**28, 2, 4) is NO_TRAFFIC


def test_links_carry_all_kinds() -> None:
    """Three gathers of 2 ms, one with the whole link two of experts with a half, and scatters: a kind's sum, or a link's."""
    whole = Traffic(gather_ms=2.0, scatter_ms=1.0, gather_links_ms=(2.0,), scatter_links_ms=(1.0,), slowdown=1.5)
    half = Traffic(gather_ms=2.0, scatter_ms=1.0, gather_links_ms=(1.0,), scatter_links_ms=(0.5,), slowdown=1.2)
    assert busy_ms(Transfers(whole, 1, 0), Transfers(half, 2, 0)) == 6.0
    assert busy_ms(Transfers(whole, 1, 4), Transfers(half, 2, 2)) == 2 + 4 + 2 + 1
    assert busy_ms(Transfers(NO_TRAFFIC, 5, 5), Transfers(half, 0, 2)) == 2.0
    assert least_slowdown(Transfers(whole, 1, 1), Transfers(half, 1, 1)) == 1.2
    assert least_slowdown(Transfers(whole, 1, 1), Transfers(NO_TRAFFIC, 1, 1)) == 1.5


def two_layers(forward_ms: float, backward_ms: float) -> ModelCosts:
    """A model of nothing but two layers."""
    layer = LayerCosts(forward_ms=forward_ms, backward_ms=backward_ms)
    none = LayerCosts()
    return ModelCosts(layers=2, layer=layer, first=none, last=none, layer_parameters=0.0, outside_parameters=0.0)


def test_transfers_lengthen_the_computation_beside_them() -> None:
    """Two layers of 6 ms, gathered twice in 2 ms and scattered in 3 with the whole link: of 14 ms beside 12 ms, at a factor
    of 2, half adds to the step; 1 ms of each layer in which it waits for transfers takes 2 ms from that. Experts, gathered by
    themselves in 1 ms and scattered in 1, make it 20 ms, and the slowdown the lesser one. A step of shorter layers takes as
    long as the transfers; where a leading layer lacks half of its parameters, a quarter of them is gone.
    """
    traffic = Traffic(gather_ms=2.0, scatter_ms=3.0, gather_links_ms=(2.0,), scatter_links_ms=(3.0,), slowdown=2.0)
    model = replace(two_layers(2.0, 4.0), traffic=traffic)
    layout = Layout(gpu="any", shard=2, global_batch=2)
    assert time_bound_ms(layout, model) == pytest.approx(12 + 14 / 2)
    waiting = replace(model, layer=replace(model.layer, waits_ms=1.0))
    assert time_bound_ms(layout, waiting) == pytest.approx(12 + 12 / 2)
    of_experts = Traffic(gather_ms=1.0, scatter_ms=1.0, gather_links_ms=(1.0,), scatter_links_ms=(1.0,), slowdown=1.25)
    assert time_bound_ms(layout, replace(model, expert_traffic=of_experts)) == pytest.approx(20)
    assert time_bound_ms(layout, replace(waiting, expert_traffic=of_experts)) == pytest.approx(20)
    slow = replace(two_layers(8.0, 8.0), traffic=traffic, expert_traffic=of_experts)
    assert time_bound_ms(layout, slow) == pytest.approx(32 + 20 / 5)
    short = replace(two_layers(1.0, 2.0), traffic=traffic)
    assert time_bound_ms(layout, short) == pytest.approx(14)
    assert time_bound_ms(layout, replace(short, missing=0.5)) == pytest.approx(6 + 14 * 3 / 4 / 2)

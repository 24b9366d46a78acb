"""Lower bounds against what they bound: executed pipelines, plans over all subsets, states that are added up by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.bounds.beside import awaited_ms, beside_ms, received_bytes
from autosac.configurations.bounds.bounds import (
    any_split_bound_ms,
    bound_ms,
    memory_bound_bytes,
    path_bound_ms,
    recompute_bound_ms,
    recomputing_bound_ms,
    split_of,
    time_bound_ms,
)
from autosac.configurations.bounds.pipeline_paths import StageTimes, longest_path_ms
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts, OtherTimes
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.bounds.traffic import Traffic
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import places
from autosac.estimator import load_hardware
from autosac.estimator.power import Mix, PowerBudget, sustained_clock

TIMES = st.floats(0.1, 10)


def shape(layers: int, f: float, b: float, f_out: float = 0.0, b_out: float = 0.0, **more: float) -> ModelCosts:
    """A model without memory."""
    return ModelCosts(
        layers=layers,
        layer=LayerCosts(forward_ms=f, backward_ms=b),
        first=LayerCosts(),
        last=LayerCosts(forward_ms=f_out, backward_ms=b_out),
        layer_parameters=more.get("parameters", 0.0),
        outside_parameters=0.0,
    )


def pipeline(ranks: int, microbatches: int, schedule: str, layers: int = 0) -> Layout:
    """A pipeline without other parallelism."""
    return Layout(gpu="any", pipeline=ranks, schedule=schedule, global_batch=microbatches)


def cycle_ms(layout: Layout, model: ModelCosts, steps: int = 4) -> float:
    """The time from one step to the next when 1F1B or GPipe is executed operator by operator, ranks running free."""
    counts, p = split_of(layout, model), layout.pipeline
    layers = [model.lead] * model.leading + [model.layer] * (model.layers - model.leading)
    parts = [layers[sum(counts[:s]) : sum(counts[: s + 1])] + [model.last] * (s == p - 1) for s in range(p)]
    forward = [sum(part.forward_ms for part in own) for own in parts]
    backward = [sum(part.backward_ms for part in own) for own in parts]
    return executed_ms(layout, forward, backward, steps)


def executed_ms(layout: Layout, forward: Sequence[float], backward: Sequence[float], steps: int = 4) -> float:
    """As `cycle_ms`, of ranks whose forwards and backwards take so long."""
    m, p = layout.microbatches, layout.pipeline
    orders = []
    for rank in range(p):
        warm = m if layout.schedule == "GPipe" else min(m, p - rank)
        order = [("F", i) for i in range(warm)]
        for i in range(m):
            order.append(("B", i))
            if warm + i < m:
                order.append(("F", warm + i))
        orders.append(order)
    free, ends = [0.0] * p, []
    for _ in range(steps):
        done: dict[tuple[str, int, int], float] = {}
        at = [0] * p
        while any(at[r] < len(orders[r]) for r in range(p)):
            for r in range(p):
                while at[r] < len(orders[r]):
                    kind, i = orders[r][at[r]]
                    needs = ("F", i, r - 1) if kind == "F" else ("B", i, r + 1)
                    if 0 <= needs[2] < p and needs not in done:
                        break
                    start = max(free[r], done.get(needs, 0.0))
                    free[r] = done[kind, i, r] = start + (forward if kind == "F" else backward)[r]
                    at[r] += 1
        ends.append(max(free))
    return ends[-1] - ends[-2]


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9),
    TIMES,
    TIMES,
    TIMES,
    TIMES,
    st.sampled_from(["1F1B", "GPipe"]),
    st.integers(0, 4),
    st.sampled_from(["torchtitan", "balanced"]),
)
def test_no_pipeline_is_faster_than_its_bound(
    ranks: int,
    m: int,
    more: int,
    f: float,
    b: float,
    f_out: float,
    b_out: float,
    schedule: str,
    leading: int,
    split: str,
) -> None:
    """Steps executed one after the other take at least the bounds each, whatever the layers and stages cost, leading layers
    unlike the others among them.
    """
    lead = LayerCosts(forward_ms=b_out, backward_ms=f_out)
    model = replace(shape(max(4, 2 * ranks) + more, f, b, f_out, b_out), leading=leading, lead=lead)
    layout = replace(pipeline(ranks, m, schedule), split=split)
    step_ms = cycle_ms(layout, model) * (1 + 1e-9)
    assert time_bound_ms(layout, model) <= step_ms and path_bound_ms(layout, model) <= step_ms
    assert any_split_bound_ms(layout, model) <= step_ms


SHARES = st.floats(0.0, 1.0)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    TIMES,
    TIMES,
    st.tuples(SHARES, SHARES, SHARES),
    st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=4, max_size=4),
    st.sampled_from(["1F1B", "GPipe"]),
)
def test_no_pipeline_is_faster_than_its_bound_at_the_clock_of_its_ranks(
    ranks: int,
    m: int,
    f: float,
    b: float,
    kinds: tuple[float, float, float],
    unknown: list[tuple[float, float, float]],
    schedule: str,
) -> None:
    """Each rank runs at the clock that its whole mix leaves: what is known of its products and transfers, more of each kind in
    every forward and backward, and what it does beside them, up to what is said to be the most.
    """
    waits, products, others = kinds[0] * (f + b) / 2, kinds[1] * (f + b) / 2, OtherTimes(0.5, 0.1, 0.2, kinds[2])
    layer = LayerCosts(forward_ms=f, backward_ms=b, least_waits_ms=waits, products_ms=products)
    power = PowerBudget(1.0, 1.22)
    model = replace(shape(2 * ranks, f, b), layer=layer, others=others, power=power)
    layout = replace(pipeline(ranks, m, schedule), split="balanced")
    forward, backward = [], []
    for more_products, more_rest, beside in unknown[:ranks]:
        rest = 2 * (f + b - waits - products) + more_rest
        matrix = 2 * products + more_products
        alone = beside * beside_ms(layout, model, 2) if ranks > 1 else 0.0
        gpu = replace(load_hardware("h100-sxm-80gb"), power_limit_w=0.0, product_power=power.product_power)
        clock = sustained_clock(gpu, Mix(m * matrix, 0.0, m * rest + alone))
        whole = 2 * waits + matrix / clock + rest
        forward.append(whole * f / (f + b) if f + b else 0.0)
        backward.append(whole - forward[-1])
    step_ms = executed_ms(layout, forward, backward) * (1 + 1e-6) + 1e-9
    assert time_bound_ms(layout, model) <= step_ms and path_bound_ms(layout, model) <= step_ms


def test_what_a_rank_does_beside_its_work_follows_from_the_size_of_its_shards() -> None:
    """A quarter of the layers on shards eight times as large as FSDP's over all ranks: copied into messages for each of 3
    microbatches, or once where parameters stay. Without a pipeline gradients are added up, unless there is one microbatch.
    """
    model = replace(shape(8, 1.0, 2.0), others=OtherTimes(gathers=1.0, adds=0.5, copies=4.0, once=2.0))
    layout = Layout(gpu="any", pipeline=4, replicate=2, shard=2, global_batch=12)
    assert beside_ms(layout, model, 2) == (8 * (3 * 1 + 2) + 2 * 4) / 4
    assert beside_ms(replace(layout, reshard="never"), model, 2) == (8 * (1 + 2) + 2 * 4) / 4
    assert beside_ms(Layout(gpu="any", replicate=2, shard=4, global_batch=16), model, 8) == 2 * 2 * (1 + 0.5)
    assert beside_ms(Layout(gpu="any", replicate=2, shard=4, global_batch=8), model, 8) == 2


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_stages_that_run_forth_and_back_are_balanced(schedule: str) -> None:
    """Two ranks, the first with the first and the last of four stages: 3 ms behind the layers of 3 ms each leave it one of 7
    layers less than the other, and both take 12 ms for a microbatch.
    """
    model, layout = shape(7, 1.0, 2.0, 1.0, 2.0), replace(pipeline(2, 4, schedule), split="balanced")
    counts = split_of(layout, model)
    assert counts[0] + counts[3] == 3 and counts[1] + counts[2] == 4
    assert time_bound_ms(layout, model) == pytest.approx(4 * 12)


def test_leading_layers_count_by_themselves() -> None:
    """Two stages of 3 and 1 layers, the first a light one, and 2 microbatches: times, memory and the balanced split are of
    its own layers. 1 + 2 x 4 = 9 ms against 4 + 5 ms.
    """
    light = LayerCosts(forward_ms=0.5, backward_ms=0.5, kept=((1, math.inf),))
    layer = LayerCosts(forward_ms=2.0, backward_ms=2.0, kept=((10, math.inf),))
    model = replace(
        shape(4, 0, 0, 2.0, 3.0, parameters=4), layer=layer, leading=1, lead=light, lead_parameters=1.0, state_bytes=12
    )
    layout = replace(pipeline(2, 2, "1F1B"), split="balanced")
    assert split_of(layout, model) == (3, 1)
    assert time_bound_ms(layout, model) == pytest.approx(9 + 2 * 9)  # the second rank, behind the first microbatch
    # States of 9 parameters, gradients of one microbatch, and inputs of 2 microbatches: the first rank's.
    assert memory_bound_bytes(layout, model) == 9 * 12 + max(9 * 4, 2 * (2 * 10 + 1))


def test_equal_stages_meet_the_bound() -> None:
    """Four equal stages, eight microbatches: (8 + 4 - 1) times a stage's 3 ms, which is what the pipeline takes."""
    model = shape(10, 0.5, 1.0)  # of 10 layers TorchTitan gives the first and last stage 2, the others 3
    layout = pipeline(4, 8, "1F1B")
    assert split_of(layout, model) == (2, 3, 3, 2)
    assert time_bound_ms(layout, model) == pytest.approx(8 * 3 * 1.5 + (2 + 3) * 1.5)
    assert time_bound_ms(layout, model) <= cycle_ms(layout, model)


KEPT = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5)), min_size=1, max_size=7)


@given(KEPT, st.integers(0, 60), st.integers(0, 250))
def test_no_plan_recomputes_less_than_the_bound(kept: list[tuple[int, float]], floor: int, budget: int) -> None:
    """Of all subsets that may be freed, none that fits costs less than the bound; where none fits, the bound is infinite."""
    layer = LayerCosts(forward_ms=1.0, backward_ms=1.0, kept=(*((s, ms) for s, ms in kept), (floor, math.inf)))
    model = ModelCosts(
        layers=1, layer=layer, first=LayerCosts(), last=LayerCosts(), layer_parameters=0, outside_parameters=0
    )
    costs = [
        sum(ms for (_, ms), freed in zip(kept, choice, strict=True) if freed)
        for choice in itertools.product((False, True), repeat=len(kept))
        if floor + sum(size for (size, _), freed in zip(kept, choice, strict=True) if not freed) <= budget
    ]
    found = recompute_bound_ms(Layout(gpu="any"), model, 0, budget)
    assert found <= min(costs, default=math.inf) + 1e-9
    if not costs:
        assert math.isinf(bound_ms(Layout(gpu="any"), model, budget))


def test_states_by_hand() -> None:
    """A billion parameters on 4 shards of 2 tensor-parallel ranks: 16 bytes each at the optimizer's step."""
    model = shape(10, 1.0, 2.0, parameters=1e8)
    layout = Layout(gpu="any", shard=4, tensor=2, global_batch=4)
    assert memory_bound_bytes(layout, model) == 16 * 1e9 / 8


def test_gathered_parameters_count_where_they_stay() -> None:
    """Without resharding, 2 bytes of every parameter of a tensor-parallel rank are there when activations are most."""
    model = shape(10, 1.0, 2.0, parameters=1e8)
    layout = Layout(gpu="any", shard=4, tensor=2, global_batch=4, reshard="never")
    assert memory_bound_bytes(layout, model) == 12 * 1e9 / 8 + 2 * 1e9 / 2


def _two_layers_and_a_loss() -> ModelCosts:
    """Layers keep 10 bytes each, half of which 1 ms frees; the loss needs 30."""
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((5, math.inf), (5, 1.0)))
    return ModelCosts(
        layers=2,
        layer=layer,
        first=LayerCosts(),
        last=LayerCosts(kept=((30, math.inf),)),
        layer_parameters=0,
        outside_parameters=0,
    )


def test_what_runs_behind_the_layers_needs_memory_beside_them() -> None:
    """Two layers keep 10 bytes each, half of which 1 ms frees; the loss needs 30: with 45, one layer in two frees its half."""
    model = _two_layers_and_a_loss()
    assert memory_bound_bytes(Layout(gpu="any"), model) == 30 + 2 * 5
    assert recompute_bound_ms(Layout(gpu="any"), model, 0, 45) == pytest.approx(1.0)
    assert bound_ms(Layout(gpu="any"), model, 45) == pytest.approx(2 * 3 + 1.0)
    assert math.isinf(bound_ms(Layout(gpu="any"), model, 39))


def test_a_chunked_loss_may_need_no_memory() -> None:
    """The same step with its loss in chunks: only what the two layers cannot free is sure to be there."""
    model = _two_layers_and_a_loss()
    layout = Layout(gpu="any", chunk_loss=True)
    assert memory_bound_bytes(layout, model) == 2 * 5
    assert recompute_bound_ms(layout, model, 0, 15) == pytest.approx(1.0)


def test_what_fsdp_holds_beside_the_layers() -> None:
    """Ten layers of a billion parameters on 4 shards, of reserved memory: two gathered messages and all gradients on streams
    of their own; beside what eight layers keep, a layer's parameters and gradients and the message before it.
    """
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((10**9, math.inf),))
    known = Sharding(gathers_at_once=2, gradients_apart=True, scatter_waits=True)
    model = ModelCosts(
        layers=10,
        layer=layer,
        first=LayerCosts(),
        last=LayerCosts(),
        layer_parameters=1e9,
        least_parameters=1e9,
        message_parameters=1e9,
        outside_parameters=0.0,
        sharding=known,
    )
    layout = Layout(gpu="any", shard=4, global_batch=4)
    states = 10e9 / 4
    assert memory_bound_bytes(layout, replace(model, sharding=NOTHING_KNOWN)) == 12 * states + 9e9 + 6e9
    assert memory_bound_bytes(layout, model) == 12 * states + 8e9 + 8e9
    assert memory_bound_bytes(layout, replace(model, reserved=True)) == 16 * states + 2 * 2e9 + 8e9 + 8e9


def test_experts_are_gathered_and_reduced_together() -> None:
    """Three layers of a billion parameters, 800 million of them experts', on 16 shards, that keep nothing: experts'
    gradients as they were computed and a message in float32. Over 4 ranks of experts a quarter of both; over 16 no message.
    """
    model = replace(shape(3, 1.0, 2.0, parameters=1e9), message_parameters=0.8e9)
    states = 12 * 3e9 / 16
    layout = Layout(gpu="any", shard=16, global_batch=16)
    assert memory_bound_bytes(layout, model) == states + (2 + 4) * 0.8e9
    assert memory_bound_bytes(replace(layout, expert=4), model) == states + (2 + 4) * 0.8e9 / 4
    assert memory_bound_bytes(replace(layout, expert=16), model) == 16 * 3e9 / 16
    known = Sharding(
        scatter_waits=True, gathered_bytes=1.0
    )  # whole layers have one message: the next one waits for the last
    assert memory_bound_bytes(layout, replace(model, sharding=known)) == states + (2 + 2 + 4) * 0.8e9


def test_stages_hold_whole_parameters_and_gradients_after_their_backward() -> None:
    """Two stages of five layers of a billion parameters, on 4 shards, that free parameters after each forward: after the last
    backward a rank's 5 billion are gathered (2 bytes) and have gradients (4).
    """
    model = shape(10, 1.0, 2.0, parameters=1e9)
    layout = replace(pipeline(2, 2, "1F1B"), shard=4, global_batch=8, reshard="always")
    assert split_of(layout, model) == (5, 5)
    assert memory_bound_bytes(layout, model) == 12 * 5e9 / 4 + (2 + 4) * 5e9


def test_copies_of_gradients_take_time() -> None:
    """One layer of a billion parameters on 2 shards, 1,000 GB/s: 4 ms for each of two gathers, 6 for the gradients' message;
    as a capture tells, 5 and 8; and 28 bytes of each of a rank's parameters for the optimizer.
    """
    model = replace(shape(1, 1.0, 2.0, parameters=1e9), memory_gbps=1e3)
    layout = Layout(gpu="any", shard=2, global_batch=2)
    optimizer_ms = (2 * 12 + 4) * 0.5e9 / 1e9
    assert time_bound_ms(layout, model) == pytest.approx(3 + 2 * 4 + 6 + optimizer_ms)
    known = replace(model, sharding=Sharding(gather_ns=5 / 2e3, scatter_ns=8 / 4e3))
    assert time_bound_ms(layout, known) == pytest.approx(3 + 2 * 5 + 8 + optimizer_ms)


def test_stages_of_a_rank_share_its_memory() -> None:
    """Two ranks with two stages each, 12 layers of 100 bytes. The first rank holds three microbatches of its first stage and
    two of its second: 1500 bytes if stages are equal. With less memory, a layer of each rank moves to its longer stage.
    """
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((100, math.inf),))
    model = replace(shape(12, 1.0, 2.0), layer=layer)
    layout = replace(pipeline(2, 4, "Interleaved1F1B"), split="balanced")
    assert split_of(layout, model) == (3, 3, 3, 3)
    assert memory_bound_bytes(layout, model) == 1500
    tight = replace(model, budget_bytes=1400)
    assert split_of(layout, tight) == (2, 4, 4, 2)
    assert memory_bound_bytes(layout, tight) == 1400
    other = _path(layout, (2, 3, 4, 3)), _path(layout, (4, 3, 2, 3))
    assert _path(layout, (2, 4, 4, 2)) < min(other)


def _path(layout: Layout, split: tuple[int, ...]) -> float:
    """The longest path with a millisecond forward and two backward for each layer."""
    stages = [StageTimes(forward=float(n), backward=2.0 * n) for n in split]
    return longest_path_ms(layout.schedule, layout.pipeline, layout.microbatches, stages, [0.0] * layout.pipeline)


def test_a_stage_without_layers_needs_nothing() -> None:
    """Of 6 layers on 8 stages TorchTitan gives the first and the last none: what their ranks keep is that of the other one."""
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((10, math.inf), (90, 1.0)))
    model = replace(shape(6, 1.0, 2.0, parameters=1.0), layer=layer)
    layout = replace(pipeline(4, 8, "Interleaved1F1B"), shard=2, global_batch=16)
    assert split_of(layout, model) == (0, 1, 1, 1, 1, 1, 1, 0)
    kept = [recompute_bound_ms(layout, model, rank, 150.0) for rank in range(4)]
    assert all(0.0 <= ms < math.inf for ms in kept)


def test_the_last_stage_has_the_loss() -> None:
    """Two stages, two microbatches: the first holds two of its layer's 10 bytes, the last one of them and the loss's 30."""
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((10, math.inf),))
    model = ModelCosts(
        layers=3,
        layer=layer,
        first=LayerCosts(),
        last=LayerCosts(kept=((30, math.inf),)),
        layer_parameters=0,
        outside_parameters=0,
    )
    layout = pipeline(2, 2, "1F1B")
    assert split_of(layout, model) == (2, 1)
    assert memory_bound_bytes(layout, model) == max(2 * 2 * 10, 1 * 10 + 30)


@given(st.integers(2, 3), st.integers(3, 9), st.integers(1, 6), st.integers(10, 200), TIMES)
def test_balanced_stages_are_as_short_as_memory_allows(
    ranks: int, layers: int, m: int, budget: int, f_out: float
) -> None:
    """Of all divisions, with what each stage has to recompute within the budget, none has a shorter slowest stage."""
    layer = LayerCosts(forward_ms=1.0, backward_ms=2.0, kept=((4, math.inf), (6, 1.0)))
    model = ModelCosts(
        layers=layers,
        layer=layer,
        first=LayerCosts(),
        last=LayerCosts(forward_ms=f_out),
        layer_parameters=1,
        outside_parameters=0,
        budget_bytes=budget,
    )

    def slowest(split: tuple[int, ...]) -> float:
        worst = 0.0
        for rank, count in enumerate(split):
            # What 1F1B holds before its first backward, and later with gradients, which the last backward gives away.
            copies = min(m, ranks - rank)
            freed = 0.0
            for held, gradients in [(copies, 0), (min(m - 1, copies), 4 * count)][: 2 if m > 2 else 1]:
                room = budget - 12 * count - gradients - held * count * 4
                excess = held * count * 6 - room
                freed = max(freed, 0.0 if excess <= 0 else excess / 6 / held if room >= 0 else math.inf)
            freed = math.inf if 16 * count > budget else freed
            worst = max(worst, 3 * count + freed + (f_out if rank == ranks - 1 else 0.0))
        return worst

    found = split_of(replace(pipeline(ranks, m, "1F1B"), split="balanced"), model)
    cuts = itertools.combinations(range(1, layers), ranks - 1)
    ways = [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]
    assert sum(found) == layers and slowest(found) == pytest.approx(min(map(slowest, ways)))


def test_forwards_wait_for_what_they_gather() -> None:
    """Six layers on two ranks, three on each, gathered in 10 ms each: 10 ms for the first layer; the other two's 20 ms, less
    3 ms in which the layers wait for transfers, slow by a half what they lie beside. So the second of two forwards is longer,
    on both ranks. Nothing where parameters stay, where messages hold parts of layers, and where four stages of a rank let some
    gather ahead.
    """
    layer = LayerCosts(forward_ms=50.0, backward_ms=99.0, waits_ms=1.0)
    model = replace(
        shape(6, 1.0, 2.0, parameters=100.0),
        layer=layer,
        least_parameters=100.0,
        message_parameters=100.0,
        traffic=Traffic(gather_ms=10.0, gather_links_ms=(0.0,), scatter_links_ms=(0.0,), slowdown=2.0),
        sharding=Sharding(gathered_bytes=200.0),
    )
    layout = replace(pipeline(2, 4, "GPipe"), shard=2, reshard="always")
    assert awaited_ms(layout, model, 3, 0) == pytest.approx(10 + (20 - 3) / 2)
    assert awaited_ms(layout, model, 0, 0) == 0
    assert awaited_ms(replace(layout, reshard="never"), model, 3, 0) == 0
    assert awaited_ms(layout, replace(model, sharding=NOTHING_KNOWN), 3, 0) == 0
    assert awaited_ms(replace(layout, schedule="Interleaved1F1B", stages=4), model, 3, 0) == 0
    without = path_bound_ms(layout, replace(model, sharding=NOTHING_KNOWN))
    assert path_bound_ms(layout, model) == pytest.approx(without + 2 * 18.5)


def test_stages_hold_what_they_receive() -> None:
    """Eight microbatches of 1 MB: of one neighbour at the ends, of two in the middle; two stages of a rank have one more."""
    model = replace(shape(12, 1.0, 2.0), hop_bytes=1e6)
    looped, plain = pipeline(4, 8, "Interleaved1F1B"), pipeline(4, 8, "1F1B")
    for layout, counts in ((plain, (8, 16, 16, 8)), (looped, (24, 32, 32, 24))):
        of_stages = split_of(layout, model)
        ranks = places(layout, of_stages, 0)
        assert [received_bytes(layout, model, rank) / 1e6 for rank in ranks] == list(counts)
    assert memory_bound_bytes(plain, model) == 16e6
    assert received_bytes(pipeline(4, 8, "ZBVZeroBubble"), model, ranks[0]) == 0


def test_recomputing_everything_is_a_bound() -> None:
    """Three layers, two microbatches, 4 ms of recomputation in each of them."""
    model = shape(3, 1.0, 2.0)
    layout = Layout(gpu="any", global_batch=2)
    assert recomputing_bound_ms(layout, model, 4.0) == pytest.approx(2 * 3 * (3 + 4))


@given(st.integers(1, 8), st.integers(1, 8))
def test_more_microbatches_never_lower_the_bound(ranks: int, m: int) -> None:
    """The bound grows with the microbatches."""
    model = shape(32, 1.0, 2.0, 0.5, 0.5)
    bounds = [time_bound_ms(pipeline(ranks, count, "1F1B"), model) for count in (m, m + 1)]
    assert bounds[0] < bounds[1]

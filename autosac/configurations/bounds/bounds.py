"""Lower bounds of a layout's step time and peak memory, before it is captured. None depends on its checkpointing.

`ModelCosts` is what a bound knows of the model: for each microbatch, what one layer and what all else do forward and backward
at least, and which memory a layer and all else keep for the backward. It comes from the parameters' shapes
(`bounds.shapes`) or, tighter, from a captured few-layer step (`bounds.sheets`).

**Time** (`time_bound_ms`). m microbatches, stage s with l_s layers, f, b: forward and backward of one layer and one
microbatch, f', b' those of what stands behind the layers (last stage). What stands before them counts without a pipeline.

1. A stream executes its operators one after the other. A rank's compute stream holds, for each microbatch, the forward and
   backward of its layers: m l_s (f + b), on the last stage m (f' + b') more. The step is no shorter.
2. A rank starts a step no sooner than the first microbatch has passed the stages j before its own first one: sum of l_j f.
   Under schedules with whole backwards (1F1B, GPipe, Interleaved1F1B) its last operator is the backward of the last
   microbatch in that stage, and the backwards of the stages before follow: sum of l_j b. The first rank begins its next
   step after them, so both sums are in the time from one step to the next. Schedules that divide backwards (ZeroBubble,
   DualPipeV) get neither.
   For these schedules, `path_bound_ms` takes the longest path through all ranks' operations (`pipeline_paths`).
3. FSDP copies what it gathered into the layers' parameters on the compute stream: each of a layer's gathers reads and
   writes them once, at no more than the memory's bandwidth, or as a captured layer does (`bounds.sharding`);
   once for each microbatch's forward, and again for its backward where parameters were freed. In a pipeline, where they stay
   from a backward to the next forward, every forward frees them, and after each of m forwards something reads them again:
   m + 1 gathers a step; one where forwards do not free them. Gradients are copied into the message that is reduced, alike.
   In a pipeline they are reduced after the last microbatch: m - 1 backwards of each layer add theirs, unsharded, to those that
   are there, which reads both and writes the sum (whole backwards).
4. The optimizer reads and writes a rank's parameters and their states once, and reads their gradients. With CPU offload the
   host does, after it has waited for the gradients and before it begins the next step.
5. Checkpointing only adds operators to the compute stream: with r the least recomputation that fits the memory (below), a
   rank's own part grows by r.
6. Computation beside a transfer of FSDP is slower by a factor k > 1. Of a rank's own part W, w is transfers that the model
   waits for (tensor and context parallelism), the rest is computation. FSDP's transfers are under way for X at least
   (`bounds.traffic`). At most w of X lies beside w, at most as much as the rank has nothing to do lies beside
   that (in 2., at least the sum F of the stages before), and what lies beside computation makes it take (1 - 1/k) of it
   longer. Time with nothing to do adds more to the step than it takes from X. So a step takes no less than
   F + W + (1 - 1/k) max(0, X - w - F). It grows with W and with w: lower bounds of both give a lower bound; a larger w
   with the same W gives a smaller one. Nor does it take less than X and the optimizer's step, beside which none of them lies.
7. Where products draw more power than the GPU has, the clock falls, and they take longer
   (`autosac.estimator.power.least_sustained_ms`): a rank's own part W, without transfers, takes no less than at the clock
   that is left to its products, all else in W, and what runs on other streams.
8. One thread issues all that a rank does: without a pipeline, a step takes no less than that (`bounds.hosts`).

**Memory** (`memory_bound_bytes`): see `bounds.memory`.

**Recomputation** (`recompute_bound_ms`). What a step keeps without checkpointing must shrink to the budget. What that costs a
layer at least is a convex function of the bytes it frees (`bounds.recomputation`). So the least recomputation
is no less than the fractional knapsack over all layers: free what has the most bytes per millisecond first. This is the linear
relaxation of every plan. A second one counts the products alone that must run again: for the clock (7.), what is known of
recomputation but not of its kind counts as no product. What is freed of a stage's microbatch is freed of all of them. It holds
only without offloading. With the loss in chunks, what stands behind the layers counts no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

from autosac.configurations.bounds.beside import (
    add_ms,
    adds_ms,
    awaited_ms,
    beside_ms,
    copies_ms,
    gather_copy_ms,
    gathers_of,
    messages_of,
    optimizer_ms,
    scatter_copy_ms,
    scatters_of,
    transfers_of,
)
from autosac.configurations.bounds.hosts import host_bound_ms
from autosac.configurations.bounds.memory import least_bytes, needs
from autosac.configurations.bounds.pipeline_paths import StageTimes, longest_path_ms, works_ms
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.bounds.traffic import busy_ms, least_slowdown
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import (
    WHOLE_BACKWARDS,
    PipelineRank,
    leading_of,
    places,
    rank_of,
)
from autosac.configurations.space.splits import balanced_split, improved_split, torchtitan_split
from autosac.estimator.power import least_sustained_ms

INFEASIBLE = math.inf


def split_of(layout: Layout, shape: ModelCosts) -> tuple[int, ...]:
    """Layers of each stage."""
    stages = layout.pipeline * layout.stages_per_rank
    if layout.split == "balanced":
        return _balanced(layout, shape)
    own = torchtitan_split(shape.layers, stages, *shape.ends_less)
    assert own is not None, "an illegal layout"
    return own


@lru_cache(maxsize=4096)
def _balanced(layout: Layout, shape: ModelCosts) -> tuple[int, ...]:
    """The slowest stage as short as possible, then improved layer by layer, from there and from TorchTitan's own split. Where
    a rank has several stages, the one of these with the shortest path through the schedule. Within the memory if that can
    be, else as if there were enough.
    """
    stages = layout.pipeline * layout.stages_per_rank
    stage_ms = cache(partial(_stage_ms, layout, shape))
    lead = shape.leading
    found = balanced_split(
        shape.layers, stages, lambda stage, i, j: stage_ms(stage, j - i, min(j, lead) - min(i, lead))
    )
    counts = enumerate(zip(found, leading_of(found, lead), strict=True))
    if all(math.isfinite(stage_ms(s, *count)) for s, count in counts):
        own, cost = torchtitan_split(shape.layers, stages, *shape.ends_less), _split_cost(layout, shape)
        starts = [found, *([own] if own is not None and min(own) >= 1 else [])]
        improved = [improved_split(start, cost) for start in starts]
        if layout.stages_per_rank == 1 or layout.schedule not in WHOLE_BACKWARDS:
            return min(improved, key=cost)
        return min((*improved, *starts), key=lambda split: (cost(split)[0], _path_ms(layout, shape, split)))
    return _balanced(layout, replace(shape, budget_bytes=math.inf))


def _split_cost(layout: Layout, shape: ModelCosts) -> Callable[[Sequence[int]], tuple[float, ...]]:
    """Of a split: the most bytes of a rank above the budget, the longest time of a rank, the longest until one is through
    (with the stages before it, for its first microbatch), and the longest stage.
    """
    stage_ms = cache(partial(_stage_ms, layout, replace(shape, budget_bytes=math.inf)))
    fills = layout.schedule in WHOLE_BACKWARDS

    @cache
    def of_rank(place: PipelineRank, own_ms: float) -> tuple[float, float]:
        if math.isinf(shape.budget_bytes):
            return 0.0, own_ms
        excess = max(0.0, least_bytes(layout, shape, place) - shape.budget_bytes)
        return excess, own_ms + _recompute_ms(layout, shape, place, shape.budget_bytes)

    def cost(split: Sequence[int]) -> tuple[float, ...]:
        counts = zip(split, leading_of(split, shape.leading), strict=True)
        each_ms = [stage_ms(stage, *count) for stage, count in enumerate(counts)]
        own_ms = [0.0] * layout.pipeline
        for stage, ms in enumerate(each_ms):
            own_ms[rank_of(layout, stage)] += layout.microbatches * ms
        found = [(place.rank, *of_rank(place, own_ms[place.rank])) for place in places(layout, split, shape.leading)]
        through = max(ms + (sum(each_ms[:rank]) if fills else 0.0) for rank, _, ms in found)
        return max(excess for _, excess, _ in found), max(ms for _, _, ms in found), through, max(each_ms)

    return cost


def _stage_ms(layout: Layout, shape: ModelCosts, stage: int, count: int, leading: int) -> float:
    """What a stage with so many layers, so many of them leading ones, takes for a microbatch, with what it has to
    recompute within its memory; infinite if nothing is enough. Of several stages on a rank, only the time is known.
    """
    last = stage == layout.pipeline * layout.stages_per_rank - 1
    found = shape.both_ms(count, leading) + (shape.last.both_ms if last else 0.0)
    if layout.stages_per_rank > 1 or math.isinf(shape.budget_bytes):
        return found
    place = PipelineRank(stage, (count,), last, (leading,))
    if least_bytes(layout, shape, place) > shape.budget_bytes:
        return INFEASIBLE
    return found + _recompute_ms(layout, shape, place, shape.budget_bytes) / layout.microbatches


def _places(layout: Layout, shape: ModelCosts) -> list[PipelineRank]:
    return places(layout, split_of(layout, shape), shape.leading)


def time_bound_ms(
    layout: Layout, shape: ModelCosts, extra_ms: Sequence[float] = (), products_ms: Sequence[float] = ()
) -> float:
    """The least step time. `extra_ms`: recomputation that each pipeline rank cannot avoid in the step; `products_ms`: products
    that it cannot. See the module.
    """
    counts, m = split_of(layout, shape), layout.microbatches
    leading = leading_of(counts, shape.leading)
    worst = 0.0
    for place in places(layout, counts, shape.leading):
        rank, own, leads = place.rank, place.layers, sum(place.leading)
        parts = [(m * (own - leads), shape.layer), (m * leads, shape.lead)]
        parts += [(m, shape.last)] if place.last else []
        parts += [(m, shape.first)] if layout.pipeline == 1 else []
        work = sum(times * part.both_ms for times, part in parts)
        messages = messages_of(shape, own, leads)
        work += (extra_ms[rank] if extra_ms else 0.0) + messages * copies_ms(layout, shape)
        updated = optimizer_ms(layout, shape, own, leads)
        work += updated
        before = shape.both_ms(sum(counts[:rank]), sum(leading[:rank]))
        fill = before if layout.schedule in WHOLE_BACKWARDS else 0.0
        waits = sum(times * part.waits_ms for times, part in parts)
        products = sum(times * part.products_ms for times, part in parts)
        products += products_ms[rank] if products_ms else 0.0
        work += adds_ms(layout, shape) * messages
        others = sum(times * part.least_waits_ms for times, part in parts)
        work = others + least_sustained_ms(shape.power, products, work - others, beside_ms(layout, shape, own))
        if waits and extra_ms:  # what is made again may be transfers, too
            waits += extra_ms[rank]
        transfers = transfers_of(layout, shape, own, leads)
        busy, slowdown = busy_ms(*transfers), least_slowdown(*transfers)
        beside = max(0.0, busy - waits - fill)
        worst = max(worst, fill + work + (1 - 1 / slowdown) * beside, busy + updated)
    issued = host_bound_ms(layout, shape.host, shape.layers)
    updated = (
        optimizer_ms(layout, shape, shape.layers, 0) if issued and layout.cpu_offload else 0.0
    )  # by the same thread
    return max(worst, issued + updated)


def path_bound_ms(
    layout: Layout, shape: ModelCosts, extra_ms: Sequence[float] = (), products_ms: Sequence[float] = ()
) -> float:
    """The least step time by the longest path through the schedule's operations (`pipeline_paths`), as `time_bound_ms`; 0
    where there is no pipeline or nothing is known of its schedule.
    """
    if layout.pipeline == 1 or layout.schedule not in WHOLE_BACKWARDS:
        return 0.0
    return _path_ms(layout, shape, split_of(layout, shape), extra_ms, products_ms)


def _path_ms(
    layout: Layout,
    shape: ModelCosts,
    counts: Sequence[int],
    extra_ms: Sequence[float] = (),
    products_ms: Sequence[float] = (),
) -> float:
    """The longest path with so many layers on each stage."""
    last, leading = layout.pipeline * layout.stages_per_rank - 1, leading_of(counts, shape.leading)
    own, leads = sum(counts[:: layout.pipeline]), sum(leading[:: layout.pipeline])  # of the first rank
    gathered = gather_copy_ms(layout, shape) if gathers_of(layout) and not layout.keeps_parameters else 0.0
    added = add_ms(layout, shape)
    stages = [
        StageTimes(
            forward=_stage_sum(shape, count, lead, stage == last, lambda part: part.forward_ms),
            backward=_stage_sum(shape, count, lead, stage == last, lambda part: part.backward_ms),
            gathered=messages_of(shape, count, lead) * gathered,
            accumulated=messages_of(shape, count, lead) * added,
            awaited=awaited_ms(layout, shape, count, lead),
        )
        for stage, (count, lead) in enumerate(zip(counts, leading, strict=True))
    ]
    return longest_path_ms(
        layout.schedule,
        layout.pipeline,
        layout.microbatches,
        stages,
        extra_ms or [0.0] * layout.pipeline,
        hop_ms=shape.hop_ms,
        after_ms=optimizer_ms(layout, shape, own, leads)
        + messages_of(shape, own, leads) * scatters_of(layout) * scatter_copy_ms(layout, shape)
        + shape.traffic.gather_ms
        + messages_of(shape, counts[0], leading[0]) * shape.traffic.scatter_ms,
        lengthened_ms=_lengthened_ms(layout, shape, counts, stages, extra_ms, products_ms),
    )


def _lengthened_ms(
    layout: Layout,
    shape: ModelCosts,
    counts: Sequence[int],
    stages: Sequence[StageTimes],
    extra_ms: Sequence[float],
    products_ms: Sequence[float],
) -> list[float]:
    """By how much each rank's whole work takes longer at the clock that its power leaves."""
    m, found = layout.microbatches, []
    works = works_ms(stages, layout.pipeline, m)
    for place in places(layout, counts, shape.leading):
        leads = sum(place.leading)
        parts = [(place.layers - leads, shape.layer), (leads, shape.lead), (int(place.last), shape.last)]
        waits = m * sum(times * part.least_waits_ms for times, part in parts)
        products = m * sum(times * part.products_ms for times, part in parts)
        products += products_ms[place.rank] if products_ms else 0.0
        work = works[place.rank] + (extra_ms[place.rank] if extra_ms else 0.0) - waits
        beside = beside_ms(layout, shape, place.layers)
        found.append(least_sustained_ms(shape.power, products, work, beside) - work)
    return found


def _stage_sum(shape: ModelCosts, layers: int, leading: int, last: bool, of: Callable[[LayerCosts], float]) -> float:
    """Of a stage's layers, and of what stands behind them on the last."""
    return (layers - leading) * of(shape.layer) + leading * of(shape.lead) + last * of(shape.last)


def memory_bound_bytes(layout: Layout, shape: ModelCosts) -> float:
    """The least peak of the fullest rank, whatever is checkpointed. See the module."""
    return max(least_bytes(layout, shape, place) for place in _places(layout, shape))


def recompute_bound_ms(layout: Layout, shape: ModelCosts, rank: int, budget_bytes: float) -> float:
    """The least recomputation of a pipeline rank in a step within the budget; infinite if none is enough."""
    return _recompute_ms(layout, shape, _places(layout, shape)[rank], budget_bytes)


def _recompute_ms(layout: Layout, shape: ModelCosts, place: PipelineRank, budget_bytes: float) -> float:
    if layout.activation_offload:
        return 0.0
    return max(_least_ms(kept, budget_bytes - before) for before, kept in needs(layout, shape, place))


def _least_ms(kept: Sequence[tuple[float, float]], room_bytes: float) -> float:
    """The fractional knapsack: what it costs to free so much that the rest has room; infinite if that cannot be."""
    excess = sum(size for size, _ in kept) - room_bytes
    spent = 0.0
    for size, ms in sorted(kept, key=lambda item: item[1] / item[0] if item[0] else math.inf):
        if excess <= 0:
            return spent
        if math.isinf(ms):
            break
        share = min(1.0, excess / size) if size else 0.0
        spent += share * ms
        excess -= size
    return spent if excess <= 0 else INFEASIBLE


def bound_ms(layout: Layout, shape: ModelCosts, budget_bytes: float, *, paths: bool = False) -> float:
    """The least step time within the budget, infinite if no checkpointing is enough. See the module. `paths`: look at the
    paths through a pipeline's schedule, too, which takes some milliseconds.
    """
    if memory_bound_bytes(layout, shape) > budget_bytes:
        return INFEASIBLE
    counts = split_of(layout, shape)
    extra = [_recompute_ms(layout, shape, place, budget_bytes) for place in places(layout, counts, shape.leading)]
    if math.inf in extra:
        return INFEASIBLE
    known = shape.of_products
    products = [_recompute_ms(layout, known, place, budget_bytes) for place in places(layout, counts, shape.leading)]
    found = time_bound_ms(layout, shape, extra, products)
    return max(found, path_bound_ms(layout, shape, extra, products)) if paths else found


def any_split_bound_ms(layout: Layout, shape: ModelCosts) -> float:
    """The least step time however layers are divided over stages: no less than the average of the ranks."""
    return layout.microbatches * (shape.both_ms(shape.layers, shape.leading) + shape.last.both_ms) / layout.pipeline


def recomputing_bound_ms(layout: Layout, shape: ModelCosts, layer_ms: float) -> float:
    """The least step time, whatever the memory, if every layer recomputes for so long for each microbatch."""
    counts = split_of(layout, shape)
    extra = [
        layer_ms * layout.microbatches * sum(n for stage, n in enumerate(counts) if rank_of(layout, stage) == rank)
        for rank in range(layout.pipeline)
    ]
    return max(time_bound_ms(layout, shape, extra), path_bound_ms(layout, shape, extra))

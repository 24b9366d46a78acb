"""Lower bounds of a layout's step time and peak memory, before it is captured. None depends on its checkpointing.

`Shape` is what a bound knows of the model: for each microbatch, what one layer and what all else do forward and backward at
least, and which memory a layer and all else keep for the backward. It comes from the parameters' shapes
(`shape_of_parameters`) or, tighter, from a captured few-layer step (`autosac.configurations.sheets`).

**Time** (`time_bound_ms`). m microbatches, stage s with l_s layers, f, b: forward and backward of one layer and one
microbatch, f', b' those of what stands behind the layers (last stage). What stands before them counts without a pipeline.

1. A stream executes its operators one after the other. A rank's compute stream holds, for each microbatch, the forward and
   backward of its layers: m l_s (f + b), on the last stage m (f' + b') more. The step is no shorter.
2. A rank starts a step no sooner than the first microbatch has passed the stages j before its own first one: sum of l_j f.
   Under schedules with whole backwards (1F1B, GPipe, Interleaved1F1B) its last operator is the backward of the last
   microbatch in that stage, and the backwards of the stages before follow: sum of l_j b. The first rank begins its next
   step after them, so both sums are in the time from one step to the next. Schedules that divide backwards (ZeroBubble,
   DualPipeV) get neither.
3. FSDP copies what it gathered into the layers' parameters on the compute stream: each of a layer's gathers reads and
   writes them once, at no more than the memory's bandwidth; once for each microbatch's forward, and again for its backward
   where parameters were freed. Counted once a step in a pipeline.
4. Checkpointing only adds operators to the compute stream: with r the least recomputation that fits the memory (below), a
   rank's own part grows by r.

**Memory** (`memory_bound_bytes`): parameters and optimizer states live during the whole step, on P / (tensor * FSDP's
shards) of the parameters of a stage. With accumulated gradients, those too, after the first microbatch; at the optimizer's
step all of them. The first stage's rank holds min(m, stages from its own to the last) microbatches at once under 1F1B, all
under GPipe; one at least in every schedule. Of each it keeps, whatever is checkpointed, the inputs of its layers: a unit of
checkpointing is a layer or lies in one, and what it recomputes from is not freed. While what stands behind the layers runs,
between their forward and their backward, all that the layers keep is there, and what the operator at work reads and writes.

**Recomputation** (`recompute_bound_ms`). What a step keeps without checkpointing must shrink to the budget. To free a
tensor that an operator made, that operator runs again, at least. So the least recomputation is no less than the fractional
knapsack over all kept tensors: free those with the most bytes per millisecond first. This is the linear relaxation of every
plan. It holds only without offloading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autosac.configurations.layout import SINGLE_STAGE, Layout
from autosac.configurations.splits import balanced_split, torchtitan_split

INFEASIBLE = math.inf
_WHOLE_BACKWARDS = (*SINGLE_STAGE, "Interleaved1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer, or what stands before or behind all layers, for one microbatch on one rank.

    `kept`: (bytes, least milliseconds that recomputing them takes) of what the step keeps for the backward without
    checkpointing; infinite milliseconds for what cannot be freed. Times are lower bounds, bytes are those of a rank.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    kept: tuple[tuple[int, float], ...] = ()

    @property
    def both_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What bounds know of a model: its layers, what stands before them (`first`) and behind them (`last`).

    `layer_parameters`: of one layer on average; sizes are of the whole model, unsharded. The `last` part's kept tensors are
    those that are there while the last of the model runs, beside what the layers keep.
    """

    layers: int
    layer: Part
    first: Part
    last: Part
    layer_parameters: float
    outside_parameters: float
    state_bytes: int = 12
    gradient_bytes: int = 4
    compute_bytes: int = 2
    memory_gbps: float = math.inf


def split_of(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """Layers of each stage."""
    stages = layout.pipeline * layout.stages_per_rank
    if layout.split == "balanced":
        return balanced_split([shape.layer.both_ms] * shape.layers, stages, 0.0, shape.last.both_ms)
    found = torchtitan_split(shape.layers, stages)
    assert found is not None, "an illegal layout"
    return found


def time_bound_ms(layout: Layout, shape: Shape, extra_ms: Sequence[float] = ()) -> float:
    """The least step time. `extra_ms`: recomputation that each pipeline rank cannot avoid in the step. See the module."""
    counts, ranks, m = split_of(layout, shape), layout.pipeline, layout.microbatches
    stages = len(counts)
    both = shape.layer.both_ms
    worst = 0.0
    for rank in range(ranks):
        own = sum(counts[stage] for stage in range(stages) if _rank_of(layout, stage) == rank)
        work = m * own * both + (extra_ms[rank] if extra_ms else 0.0) + own * _copies_ms(layout, shape)
        if _rank_of(layout, stages - 1) == rank:
            work += m * shape.last.both_ms
        if ranks == 1:
            work += m * shape.first.both_ms
        fill = sum(counts[:rank]) * both if layout.schedule in _WHOLE_BACKWARDS else 0.0
        worst = max(worst, work + fill)
    return worst


def _copies_ms(layout: Layout, shape: Shape) -> float:
    """What FSDP's copies of one layer's gathered parameters take in a step at least."""
    if layout.shard * layout.context == 1:
        return 0.0
    gathers = 1 if layout.keeps_parameters else 2
    if layout.pipeline == 1:
        gathers *= layout.microbatches
    elif not layout.keeps_parameters:
        gathers = 1
    nbytes = 2 * shape.compute_bytes * shape.layer_parameters / _expert_shards(layout)
    return gathers * nbytes / shape.memory_gbps / 1e6


def _rank_of(layout: Layout, stage: int) -> int:
    """The pipeline rank that holds a stage: in a loop, or forth and back for V-shaped schedules."""
    if layout.schedule in ("ZBVZeroBubble", "DualPipeV") and layout.stages_per_rank == 2:
        return min(stage, 2 * layout.pipeline - 1 - stage)
    return stage % layout.pipeline


def states_bytes(layout: Layout, shape: Shape, rank: int, *, gradients: bool) -> float:
    """What parameters, optimizer states and, if asked for, gradients of a pipeline rank take at least."""
    if layout.cpu_offload:
        return 0.0
    counts = split_of(layout, shape)
    layers = sum(count for stage, count in enumerate(counts) if _rank_of(layout, stage) == rank)
    parameters = layers * shape.layer_parameters
    if layout.pipeline == 1:
        parameters += shape.outside_parameters
    each = shape.state_bytes + (shape.gradient_bytes if gradients else 0)
    return each * parameters / (layout.tensor * layout.shard * layout.context)


def _before_backward_bytes(layout: Layout, shape: Shape, rank: int) -> float:
    """States when a rank holds most activations: with the gradients of earlier microbatches, which FSDP has reduced and added
    up (in a pipeline it may wait), and with the gathered parameters of all layers that are not freed after their forward.
    """
    earlier = layout.pipeline == 1 and layout.microbatches > 1
    found = states_bytes(layout, shape, rank, gradients=earlier)
    if layout.keeps_parameters:
        found += shape.compute_bytes * split_of(layout, shape)[rank] * shape.layer_parameters / _expert_shards(layout)
    return found


def _expert_shards(layout: Layout) -> int:
    """Of how many ranks' parameters a gathered layer may be a part at most: tensor and expert parallelism leave the rest."""
    return layout.tensor * layout.expert


def held(layout: Layout, rank: int) -> int:
    """How many microbatches a pipeline rank holds at once, at least."""
    if layout.pipeline == 1:
        return 1
    if layout.schedule == "GPipe":
        return layout.microbatches
    return min(layout.microbatches, layout.pipeline - rank) if layout.schedule == "1F1B" else 1


class _Moment(NamedTuple):
    """When a rank holds much: (bytes, milliseconds to free them) of all that it keeps then, of so many microbatches."""

    kept: list[tuple[float, float]]
    microbatches: int


def _moments(layout: Layout, shape: Shape, rank: int) -> list[_Moment]:
    """When a pipeline rank holds most layers' tensors, and, where the last stage is, while what is behind the layers runs."""
    counts, times = split_of(layout, shape), held(layout, rank)
    layers = sum(count for stage, count in enumerate(counts) if _rank_of(layout, stage) == rank)
    if layout.pipeline > 1 and layout.stages_per_rank > 1:
        layers = counts[rank]  # the first of its stages, at the moment when only that one is held

    def of_layers(count: int) -> list[tuple[float, float]]:
        return [(count * size, count * ms) for size, ms in shape.layer.kept]

    behind = _Moment([*of_layers(counts[-1]), *shape.last.kept], 1)
    if layout.pipeline == 1:
        return [behind]
    most = _Moment(of_layers(times * layers), times)
    return [most, behind] if _rank_of(layout, len(counts) - 1) == rank else [most]


def memory_bound_bytes(layout: Layout, shape: Shape) -> float:
    """The least peak of the fullest rank, whatever is checkpointed. See the module."""
    worst = 0.0
    for rank in range(layout.pipeline):
        worst = max(worst, states_bytes(layout, shape, rank, gradients=True))
        for moment in _moments(layout, shape, rank):
            fixed = sum(size for size, ms in moment.kept if math.isinf(ms) and not layout.activation_offload)
            worst = max(worst, _before_backward_bytes(layout, shape, rank) + fixed)
    return worst


def recompute_bound_ms(layout: Layout, shape: Shape, rank: int, budget_bytes: float) -> float:
    """The least recomputation of a pipeline rank in a step within the budget; infinite if none is enough."""
    if layout.activation_offload:
        return 0.0
    before = _before_backward_bytes(layout, shape, rank)
    # Microbatches of a step are alike: what one needs, each needs.
    return max(
        _least_ms(moment.kept, budget_bytes - before) * layout.microbatches / moment.microbatches
        for moment in _moments(layout, shape, rank)
    )


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


def bound_ms(layout: Layout, shape: Shape, budget_bytes: float) -> float:
    """The least step time within the budget, infinite if no checkpointing is enough. See the module."""
    if memory_bound_bytes(layout, shape) > budget_bytes:
        return INFEASIBLE
    extra = [recompute_bound_ms(layout, shape, rank, budget_bytes) for rank in range(layout.pipeline)]
    return INFEASIBLE if math.inf in extra else time_bound_ms(layout, shape, extra)


def recomputing_bound_ms(layout: Layout, shape: Shape, layer_ms: float) -> float:
    """The least step time, whatever the memory, if every layer recomputes for so long for each microbatch."""
    counts = split_of(layout, shape)
    extra = [
        layer_ms * layout.microbatches * sum(n for stage, n in enumerate(counts) if _rank_of(layout, stage) == rank)
        for rank in range(layout.pipeline)
    ]
    return time_bound_ms(layout, shape, extra)


def shape_of_parameters(
    parameters: Mapping[str, Sequence[int]], layers: int, layout: Layout, seq_len: int, peak_flops: float
) -> Shape:
    """What the parameters' shapes alone tell: every matrix of a layer and the output is multiplied with every token, forward
    once and backward twice, at no more than the peak rate. Embeddings are looked up, experts may not be asked: they count
    nothing. A layer's input has the width of its norms and 16 bits a number at least, divided among tensor-parallel ranks
    at most.
    """
    tokens = layout.microbatch * seq_len / layout.context
    per_number_ms = 2 * tokens / layout.tensor / peak_flops * 1e3
    of_layers = {name: shape for name, shape in parameters.items() if name.startswith("layers.")}
    others = {name: shape for name, shape in parameters.items() if name not in of_layers}
    present = len({name.split(".")[1] for name in of_layers}) or 1
    width = max(
        (shape[0] for name, shape in of_layers.items() if name.endswith("norm.weight") and len(shape) == 1), default=0
    )
    inner = sum(math.prod(shape) for shape in of_layers.values() if len(shape) == 2) / present
    outer = sum(math.prod(shape) for name, shape in others.items() if len(shape) == 2 and name.startswith("output"))
    return Shape(
        layers=layers,
        layer=Part(
            forward_ms=inner * per_number_ms,
            backward_ms=2 * inner * per_number_ms,
            kept=((int(2 * tokens * width / layout.tensor), math.inf),),
        ),
        first=Part(),
        last=Part(forward_ms=outer * per_number_ms, backward_ms=2 * outer * per_number_ms),
        layer_parameters=sum(math.prod(shape) for shape in of_layers.values()) / present,
        outside_parameters=sum(math.prod(shape) for shape in others.values()),
    )

"""What a rank of a layout holds at least, whatever is checkpointed, at the moments when that is most.

Parameters and optimizer states live during the whole step, on P / (tensor * FSDP's shards) of the parameters of a stage. With
accumulated gradients, those too, after the first microbatch; at the optimizer's step all of them. FSDP reduces a pipeline's
gradients once, after the last microbatch: in between, a stage that has run backward has gradients of all its parameters, which
are divided among tensor and expert parallel ranks only. Parameters that are not freed after the forward are gathered alike; of
those that are, one layer's as its backward begins. While a layer runs backward, what its hungriest operator reads and writes
is there (`bounds.kept`), and as that ends, its gradients as they were computed, beside what the other layers keep. Experts
are one of FSDP's units: their operators read what it gathered, which it frees when their gradients are complete, so all of a
layer's experts are there beside each of them, and of operators that a capture shows to run in that time. No backward of a
pipeline frees what it gathers: as a stage's last one ends, all its parameters and gradients are there. How many
microbatches a rank holds as a backward begins is the schedule's (`space.schedules`). Of each it keeps, whatever is
checkpointed, the inputs of its layers: a unit of checkpointing is a layer or lies in one, and what it recomputes from is not
freed. While what stands behind the layers runs, between their forward and their backward, all that the layers keep is there,
and what the operator at work reads and writes. Without a pipeline, what the other layers keep is there while FSDP reduces the
gradients of the layer that ran backward first: as they were computed, and in float32 as one message (of experts at least
these, which may have one of their own); and as the next layer's backward ends, with what it gathered and its gradients, while
that message waits. A pipeline's stages hold what they receive, for all microbatches of the step (`beside.received_bytes`). A
budget of reserved memory holds, at any time, the most that is there at once of what FSDP allocates on streams of its own
(`bounds.sharding`): gathered messages, those of experts by themselves, and reduced gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.configurations.bounds.beside import (
    REDUCED_BYTES,
    expert_shards,
    gathers_of,
    own_parameters,
    received_bytes,
)
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import WHOLE_BACKWARDS, Moment, PipelineRank, moments


def _states_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank, *, gradients: bool) -> float:
    """What parameters, optimizer states and, if asked for, gradients of a pipeline rank take at least."""
    if layout.cpu_offload:
        return 0.0
    each = shape.state_bytes + (shape.gradient_bytes if gradients else 0)
    return each * own_parameters(layout, shape, place.layers, sum(place.leading))


def _before_backward_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank, moment: Moment) -> float:
    """States and what is whole of parameters and gradients, at a moment when a rank holds most activations. See the module."""
    accumulated = layout.pipeline == 1 and layout.microbatches > 1
    found = _states_bytes(layout, shape, place, gradients=accumulated or _pools(layout, shape).gradients_apart)
    found += received_bytes(layout, shape, place)
    found += _gathered_pool_bytes(layout, shape, place)
    gathers = layout.pipeline > 1 and gathers_of(layout) and not layout.keeps_parameters
    one = min(shape.layer_parameters, shape.lead_parameters) if any(place.leading) else shape.layer_parameters
    whole = one * shape.compute_bytes if gathers and not moment.behind else 0.0
    stages = zip(place.counts, place.leading, moment.held, moment.accumulating, strict=True)
    for count, leading, held, accumulating in stages:
        each = shape.compute_bytes if layout.keeps_parameters and (held or accumulating) else 0
        each += shape.gradient_bytes if accumulating else 0
        whole += each * shape.parameters(count, leading)
    return found + whole / expert_shards(layout)


def _pools(layout: Layout, shape: ModelCosts) -> Sharding:
    """What FSDP holds on streams of its own that counts at any time: where the budget is of reserved memory."""
    return shape.sharding if shape.reserved and layout.shard * layout.context > 1 else NOTHING_KNOWN


def _gathered_pool_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank) -> float:
    """The most that gathered messages of a rank's layers take together, on their own stream; of layers with experts, those of
    the experts of layers one behind the other, where FSDP shards them.
    """
    pools = _pools(layout, shape)
    at_once = min(pools.gathers_at_once, max(place.counts)) * shape.least_parameters
    if _shards_experts(layout, shape):
        repeating = max(count - leading for count, leading in zip(place.counts, place.leading, strict=True))
        at_once += min(pools.inner_at_once, repeating) * shape.message_parameters
    return at_once * shape.compute_bytes / expert_shards(layout)


def _moments(layout: Layout, place: PipelineRank) -> Sequence[Moment]:
    """When a rank holds most. Without a pipeline, that is while what stands behind the layers runs."""
    if layout.pipeline == 1:
        return (Moment((1,), (False,), True, 0),)
    found = moments(layout.schedule, layout.pipeline, layout.microbatches, len(place.counts), place.rank)
    return [moment._replace(behind=moment.behind and place.last) for moment in found]


def _kept(layout: Layout, shape: ModelCosts, place: PipelineRank, moment: Moment) -> list[tuple[float, float]]:
    """(bytes, milliseconds of a step to free them) of all that a rank keeps at a moment. What is freed of one microbatch of a
    stage is freed of all of them.
    """
    m = layout.microbatches
    kept: list[tuple[float, float]] = [
        (times * layers * size, m * layers * ms)
        for times, count, leading in zip(moment.held, place.counts, place.leading, strict=True)
        for layers, part in ((count - leading, shape.layer), (leading, shape.lead))
        for size, ms in part.kept
        if times * layers
    ]
    if moment.behind and not layout.chunk_loss:
        kept += [(size, m * ms) for size, ms in shape.last.kept]
    return kept


def needs(layout: Layout, shape: ModelCosts, place: PipelineRank) -> list[tuple[float, list[tuple[float, float]]]]:
    """When a rank holds much: bytes that no plan changes, and what it keeps (`_kept`)."""
    found = [
        (_before_backward_bytes(layout, shape, place, moment), _kept(layout, shape, place, moment))
        for moment in _moments(layout, place)
    ]
    found += [
        _in_a_layer(layout, shape, place, moment)
        for moment in _moments(layout, place)
        if moment.stage >= 0 and place.counts[moment.stage]  # TorchTitan may give the ends no layer
    ]
    if layout.pipeline > 1 and gathers_of(layout):
        found.append((_after_backward_bytes(layout, shape, place), []))
    if layout.pipeline == 1 and layout.shard * layout.context > layout.expert and shape.message_parameters:
        # Two layers one after the other are only known to be alike where they have no messages of their own for experts.
        most = min(shape.layers - 1, 2 if shape.least_parameters or shape.sharding.gathered_bytes else 1)
        found += [_reducing(layout, shape, place, done) for done in range(1, most + 1)]
    return found


def _after_backward_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank) -> float:
    """What is there, beside what is kept, as the last backward of a rank's largest stage ends: all its parameters, gathered,
    and all its gradients, which FSDP reduces after that. Backwards of weights alone leave them as they were computed.
    """
    largest = max(map(shape.parameters, place.counts, place.leading))
    count = len(place.counts)
    ended = Moment((0,) * count, (False,) * count, behind=True)  # no layer is gathered for a backward to come
    found = _before_backward_bytes(layout, shape, place, ended)
    gradient_bytes = shape.gradient_bytes if layout.schedule in WHOLE_BACKWARDS else shape.compute_bytes
    return found + (shape.compute_bytes + gradient_bytes) * largest / expert_shards(layout)


def _in_a_layer(
    layout: Layout, shape: ModelCosts, place: PipelineRank, moment: Moment
) -> tuple[float, list[tuple[float, float]]]:
    """As `needs`, while the last layer of the moment's stage runs backward: what that needs at once or, in a pipeline, at its
    end, its gradients.
    """
    counts, leading, stage = place.counts, place.leading, moment.stage
    m, held = layout.microbatches, moment.held[stage]
    leads = int(counts[stage] == leading[stage])  # whether that layer is a leading one
    before = _before_backward_bytes(layout, shape, place, moment._replace(behind=False))
    less = place._replace(
        counts=(*counts[:stage], counts[stage] - 1, *counts[stage + 1 :]),
        leading=(*leading[:stage], leading[stage] - leads, *leading[stage + 1 :]),
    )
    kept = _kept(layout, shape, less, moment._replace(behind=False))
    part = shape.lead if leads else shape.layer
    if held > 1:  # that layer's other microbatches
        kept += [((held - 1) * size, m * ms) for size, ms in part.kept]
    gradients = layout.pipeline > 1 and gathers_of(layout)
    own = shape.compute_bytes * shape.parameters(1, leads) / expert_shards(layout) if gradients else 0.0
    return before + max(own, part.working_bytes, _beside_experts_bytes(layout, shape, part)), kept


def _beside_experts_bytes(layout: Layout, shape: ModelCosts, part: LayerCosts) -> float:
    """What a layer's backward needs while its experts are gathered, with them, where nothing else counts them: FSDP shards
    them, and frees them after each forward.
    """
    freed = layout.pipeline == 1 and not layout.keeps_parameters
    if not freed or not part.beside_experts_bytes or not _shards_experts(layout, shape):
        return 0.0
    return part.beside_experts_bytes + shape.compute_bytes * shape.message_parameters / expert_shards(layout)


def _shards_experts(layout: Layout, shape: ModelCosts) -> bool:
    """Whether FSDP gathers experts: over more ranks than those that share them out."""
    return shape.layer_experts > 0 and layout.shard * layout.context > layout.expert


def _reducing(
    layout: Layout, shape: ModelCosts, place: PipelineRank, done: int
) -> tuple[float, list[tuple[float, float]]]:
    """As `needs`, when one layer or, by then, two have run backward: the first one's gradients in a message, beside them or,
    where the message waits, beside the second one's parameters and gradients.
    """
    layer = shape.message_parameters / expert_shards(layout)
    before = _before_backward_bytes(layout, shape, place, Moment((1,), (False,), False))
    if layout.keeps_parameters:
        before -= shape.compute_bytes * shape.layer_parameters / expert_shards(layout)
    elif done == 2:
        before += shape.compute_bytes * layer
    waits = REDUCED_BYTES if done == 1 or shape.sharding.scatter_waits else 0
    left = PipelineRank(0, (shape.layers - done,), False, (0,))
    return before + (shape.compute_bytes + waits) * layer, _kept(layout, shape, left, Moment((1,), (False,), False))


def least_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank) -> float:
    worst = _states_bytes(layout, shape, place, gradients=True) + received_bytes(layout, shape, place)
    for before, kept in needs(layout, shape, place):
        fixed = sum(size for size, ms in kept if math.isinf(ms) and not layout.activation_offload)
        worst = max(worst, before + fixed)
    return worst

"""What a rank does in a step beside its layers, at least, and what it does at most that only leaves power to products:
copies of FSDP's messages, additions of gradients, the optimizer. Why is said in `bounds.bounds`. What a pipeline's transfers
make it wait for, and hold.
"""

from __future__ import annotations

from autosac.configurations.bounds.shapes import ModelCosts
from autosac.configurations.bounds.traffic import Transfers
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import WHOLE_BACKWARDS, PipelineRank

REDUCED_BYTES = 4  # of a gradient as FSDP reduces it, in float32
_ACTIVE_STAGES = 3  # of more on one rank, PyTorch's schedules gather some ahead of their forwards


def messages_of(shape: ModelCosts, layers: int, leading: int) -> float:
    """How many layers' messages the parameters of so many layers make, of which so many are leading ones."""
    messages = shape.parameters(layers, leading) / shape.layer_parameters if shape.layer_parameters else layers
    return max(0.0, messages - shape.missing)


def gathers_of(layout: Layout) -> int:
    """How often FSDP gathers a layer's parameters in a step, at least."""
    if layout.shard * layout.context == 1:
        return 0
    if layout.pipeline > 1:
        return 1 if layout.keeps_parameters else layout.microbatches + 1
    return layout.microbatches * (1 if layout.keeps_parameters else 2)


def scatters_of(layout: Layout) -> int:
    """How often FSDP scatters a layer's gradients in a step, at least."""
    if layout.shard * layout.context == 1:
        return 0
    return 1 if layout.pipeline > 1 else layout.microbatches


def transfers_of(layout: Layout, shape: ModelCosts, layers: int, leading: int) -> tuple[Transfers, Transfers]:
    """FSDP's transfers in a step of so many layers, of which so many are leading ones, at least: those of experts apart."""
    gathers, scatters = gathers_of(layout), scatters_of(layout)
    messages = messages_of(shape, layers, leading)
    return (
        Transfers(shape.traffic, messages * gathers, messages * scatters),
        Transfers(shape.expert_traffic, (layers - leading) * gathers, (layers - leading) * scatters),
    )


def copies_ms(layout: Layout, shape: ModelCosts) -> float:
    """What FSDP's copies of one layer's parameters and gradients take in a step at least."""
    return gathers_of(layout) * gather_copy_ms(layout, shape) + scatters_of(layout) * scatter_copy_ms(layout, shape)


def gather_copy_ms(layout: Layout, shape: ModelCosts) -> float:
    """Out of a gathered message of one layer: reads and writes it."""
    ns = max(2 / shape.memory_gbps, shape.sharding.gather_ns)
    return ns * shape.compute_bytes * shape.layer_parameters / expert_shards(layout) / 1e6


def scatter_copy_ms(layout: Layout, shape: ModelCosts) -> float:
    """Into a message that is reduced, of one layer: reads gradients as they were computed, and writes them in float32."""
    ns = max((shape.compute_bytes / REDUCED_BYTES + 1) / shape.memory_gbps, shape.sharding.scatter_ns)
    return ns * REDUCED_BYTES * shape.layer_parameters / expert_shards(layout) / 1e6


def awaited_ms(layout: Layout, shape: ModelCosts, layers: int, leading: int) -> float:
    """By how much FSDP's gathers lengthen a pipeline's forward of so many layers, of which so many are leading ones, if it has
    to gather them. 0 where parts of layers have messages of their own.

    The first layer's gather lies beside nothing (`pipeline_paths`). The others', X in all, lie in the forward. At most all
    that it waits for lies beside transfers of the model, and what lies beside its computation makes that slower: as in
    `bounds.bounds`, 6.
    """
    known = shape.sharding.gathered_bytes and shape.least_parameters and layout.stages_per_rank <= _ACTIVE_STAGES
    if not gathers_of(layout) or layout.keeps_parameters or not known:
        return 0.0
    traffic, messages = shape.traffic, messages_of(shape, layers, leading)
    first = min(1.0, messages, shape.lead_parameters / shape.layer_parameters if leading else 1.0)
    waits = (layers - leading) * shape.layer.waits_ms + leading * shape.lead.waits_ms
    beside = (messages - first) * traffic.gather_ms - waits
    return first * traffic.gather_ms + (1 - 1 / traffic.slowdown) * max(0.0, beside)


def adds_ms(layout: Layout, shape: ModelCosts) -> float:
    """What a pipeline's additions of one layer's gradients take in a step at least."""
    return (layout.microbatches - 1) * add_ms(layout, shape)


def add_ms(layout: Layout, shape: ModelCosts) -> float:
    """Of one microbatch of a pipeline, to those that are there: reads gradients as they were computed, and reads and writes
    the sum. Of schedules that divide backwards nothing is said.
    """
    if layout.pipeline == 1 or layout.schedule not in WHOLE_BACKWARDS:
        return 0.0
    each = (shape.compute_bytes + 2 * shape.gradient_bytes) / shape.memory_gbps
    return each * shape.layer_parameters / expert_shards(layout) / 1e6


def optimizer_ms(layout: Layout, shape: ModelCosts, layers: int, leading: int) -> float:
    """What the optimizer's step takes at least on a rank with so many layers, of which so many are leading ones."""
    own = own_parameters(layout, shape, layers, leading)
    if layout.cpu_offload:
        offloaded = (shape.state_bytes + shape.gradient_bytes) * own
        return shape.host_gb_us * offloaded / 1e12
    each = 2 * shape.state_bytes + shape.gradient_bytes
    return each * own / shape.memory_gbps / 1e6


def own_parameters(layout: Layout, shape: ModelCosts, layers: int, leading: int) -> float:
    """The parameters of a rank with so many layers, at least; FSDP's, tensor and expert parallelism's parts of them."""
    parameters = shape.parameters(layers, leading) + (shape.outside_parameters if layout.pipeline == 1 else 0.0)
    return parameters / (layout.tensor * layout.shard * layout.context)


def received_bytes(layout: Layout, shape: ModelCosts, place: PipelineRank) -> float:
    """What a pipeline rank holds during the whole step to receive in, at least. PyTorch allocates it once, before the first
    step, for every microbatch of each of its stages: what the stage before sends, and the gradients of the stage behind. Of
    V-shaped schedules, which have neighbours on one rank, nothing is said.
    """
    if layout.pipeline == 1 or layout.schedule not in WHOLE_BACKWARDS:
        return 0.0
    received = 2 * len(place.counts) - (place.rank == 0) - place.last
    return received * layout.microbatches * shape.hop_bytes


def expert_shards(layout: Layout) -> int:
    """Of how many ranks' parameters a gathered layer may be a part at most: tensor and expert parallelism leave the rest."""
    return layout.tensor * layout.expert


def beside_ms(layout: Layout, shape: ModelCosts, layers: int) -> float:
    """What a rank with so many layers does in a step beside its work that is no product, at most. See the module."""
    others, m = shape.others, layout.microbatches
    share = layers / shape.layers
    larger = layout.pipeline * layout.replicate  # than the shards of FSDP over all ranks
    if layout.pipeline == 1:
        return larger * share * m * (others.gathers + (others.adds if m > 1 else 0.0))
    gathers = 1 if layout.keeps_parameters else m
    return share * (larger * (gathers * others.gathers + others.once) + 2 * others.copies)

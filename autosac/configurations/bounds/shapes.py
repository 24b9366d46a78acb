"""What bounds know of a model: its layers, and what stands before and behind them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autosac.configurations.bounds.hosts import NO_HOST, HostTimes
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.bounds.traffic import NO_TRAFFIC, Traffic
from autosac.configurations.space.layout import Layout, ModelFacts
from autosac.estimator.power import FULL_CLOCK, PowerBudget

_OUTPUTS = ("output", "lm_head")  # what TorchTitan 0.2 and 0.3 call it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer, or what stands before or behind all layers, for one microbatch on one rank.

    `kept`: (bytes, least milliseconds that recomputing them takes) of what the step keeps for the backward without
    checkpointing; infinite milliseconds for what cannot be freed. Times are lower bounds, bytes are those of a rank.
    `waits_ms`: what of forward and backward is transfers that computation waits for, at most; `least_waits_ms`: at least.
    `products_ms`: what of both is matrix products that take longer at a lower clock, at least; `kept_products`: as `kept`, of
    these alone, where that is known. `working_bytes`: what one layer's backward needs at once (`bounds.kept`), at least;
    `beside_experts_bytes`: beside its gathered experts, as long as they are there.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    waits_ms: float = 0.0
    least_waits_ms: float = 0.0
    products_ms: float = 0.0
    kept: tuple[tuple[int, float], ...] = ()
    kept_products: tuple[tuple[int, float], ...] = ()
    working_bytes: int = 0
    beside_experts_bytes: int = 0

    @property
    def of_products(self) -> LayerCosts:
        """With `kept` of products alone."""
        known = self.kept_products or tuple((size, ms if math.isinf(ms) else 0.0) for size, ms in self.kept)
        return replace(self, kept=known)

    @property
    def both_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


class OtherTimes(NamedTuple):
    """Milliseconds of operators that are no products and belong to no layer's forward or backward, at most: of all layers,
    with FSDP over all ranks, for one microbatch. They leave power to products.

    `gathers`: on other streams than the model's, which copy parameters into messages, forward and backward. `adds`: those that
    add a rank's shards of gradients to what is there. `copies`: between messages and parameters or gradients, on the model's
    stream. `once`: outside of the forward and backward (clipping, the optimizer).
    """

    gathers: float = 0.0
    adds: float = 0.0
    copies: float = 0.0
    once: float = 0.0


NO_OTHERS = OtherTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What bounds know of a model: its layers, what stands before them (`first`) and behind them (`last`).

    `layer_parameters`: of one layer on average, `least_parameters` of any whose gradients FSDP reduces together (0 if that is
    not known), `message_parameters` at least of those whose gradients it reduces together in a layer that repeats; sizes are
    of the whole model, unsharded. The `last` part's kept tensors are those that are there while the last of the model runs,
    beside what the layers keep. `budget_bytes`: within which stages are balanced. `traffic`: of FSDP, for one layer.
    `ends_less`: how many layers fewer TorchTitan gives the first and the last stage. `hop_bytes`, `hop_ms`: a layer's input,
    and to send it to the next pipeline stage. `reserved`: the budget is of reserved memory. `leading`: how many layers at the
    front are like `lead`, with `lead_parameters`; all others are like `layer`. `missing`: where they are not told apart, how
    many layers' parameters they lack. `layer_experts`: the most that experts are of a layer's parameters; `expert_parameters`:
    what they are at least of a layer that is like `layer`, and `expert_traffic` FSDP's for these. `others`: what a step does
    beside its layers that is no product. `host`: what a rank's host pays. `power`: what the GPU may draw.
    """

    layers: int
    layer: LayerCosts
    first: LayerCosts
    last: LayerCosts
    layer_parameters: float
    outside_parameters: float
    least_parameters: float = 0.0
    message_parameters: float = 0.0
    state_bytes: int = 12
    gradient_bytes: int = 4
    compute_bytes: int = 2
    memory_gbps: float = math.inf
    host_gb_us: float = 0.0
    budget_bytes: float = math.inf
    traffic: Traffic = NO_TRAFFIC
    sharding: Sharding = NOTHING_KNOWN
    ends_less: tuple[int, int] = (1, 1)
    hop_bytes: float = 0.0
    hop_ms: float = 0.0
    reserved: bool = False
    leading: int = 0
    lead: LayerCosts = LayerCosts()
    lead_parameters: float = 0.0
    missing: float = 0.0
    layer_experts: float = 0.0
    expert_parameters: float = 0.0
    expert_traffic: Traffic = NO_TRAFFIC
    others: OtherTimes = NO_OTHERS
    host: HostTimes = NO_HOST
    power: PowerBudget = FULL_CLOCK

    @property
    def of_products(self) -> ModelCosts:
        """With what recomputing costs in products alone."""
        return replace(self, layer=self.layer.of_products, lead=self.lead.of_products, last=self.last.of_products)

    @property
    def partly_trained(self) -> ModelCosts:
        """With no more for parameters than what those take that are frozen: they have neither gradients nor states, and FSDP
        may leave them as they are.
        """
        return replace(
            self,
            state_bytes=self.gradient_bytes,  # a parameter is as large as its gradient
            gradient_bytes=0,
            compute_bytes=0,
            memory_gbps=math.inf,
            host_gb_us=0.0,
            least_parameters=0.0,
            message_parameters=0.0,
            traffic=NO_TRAFFIC,
            expert_traffic=NO_TRAFFIC,
            sharding=NOTHING_KNOWN,
        )

    @property
    def forward_only(self) -> ModelCosts:
        """Without backward."""
        layer, lead, last = (replace(part, backward_ms=0.0) for part in (self.layer, self.lead, self.last))
        return replace(self, layer=layer, lead=lead, last=last)

    def both_ms(self, layers: int, leading: int) -> float:
        """Forward and backward of so many layers, of which so many are leading ones."""
        return (layers - leading) * self.layer.both_ms + leading * self.lead.both_ms

    def parameters(self, layers: int, leading: int) -> float:
        """Of so many layers, of which so many are leading ones."""
        return (layers - leading) * self.layer_parameters + leading * self.lead_parameters


class Experts(NamedTuple):
    """What parameters of experts are of a layer's: the most of any layer's, the least of any but the leading ones, and that of
    a layer on average.
    """

    most: float
    least: float
    average: float


def experts_of(parameters: Mapping[str, Sequence[int]], leading: int, layers: int) -> Experts:
    """`parameters`: of the `leading` first of so many layers, and of some of those that repeat behind them. Those of all
    experts of a layer are one tensor.
    """
    found: dict[int, float] = defaultdict(float)
    for name, size in parameters.items():
        if name.startswith("layers."):
            found[int(name.split(".")[1])] += math.prod(size) if len(size) > 2 else 0
    each = [found[layer] for layer in sorted(found)]
    return Experts(max(each, default=0.0), min(each[leading:], default=0.0), _average(each, leading, layers))


def _average(values: Sequence[float], leading: int, layers: int) -> float:
    """Of so many layers, of which `values` are the `leading` first ones and some of those that repeat."""
    first, repeating = values[:leading], values[leading:] or [0.0]
    return (sum(first) + (layers - len(first)) * sum(repeating) / len(repeating)) / layers


def costs_of_parameters(
    parameters: Mapping[str, Sequence[int]], facts: ModelFacts, layout: Layout, peak_flops: float, *, leading: int = 0
) -> ModelCosts:
    """What the parameters' shapes alone say: every matrix of a layer and the output is multiplied with every token, forward
    once and backward twice, at no more than the peak rate. Embeddings are looked up, and biases added (those of experts are a
    matrix). Tokens are shared out evenly among experts, of which each token has as many as `facts` say, and experts among
    ranks. A layer's input has the width of its norms and 16 bits a number at least, divided among tensor-parallel ranks at
    most.

    `parameters` are those of some layers: the `leading` first ones, and some of those that repeat behind them.
    """
    tokens = layout.microbatch * facts.seq_len / layout.context / layout.tensor
    token_ms = 2 * tokens / peak_flops * 1e3  # for a parameter that is multiplied with every token
    of_layers: dict[int, dict[str, Sequence[int]]] = defaultdict(dict)
    others: dict[str, Sequence[int]] = {}
    for name, size in parameters.items():
        if name.startswith("layers."):
            of_layers[int(name.split(".")[1])][name] = size
        else:
            others[name] = size
    norms = (size for layer in of_layers.values() for name, size in layer.items() if name.endswith("norm.weight"))
    kept = ((int(2 * tokens * max((size[0] for size in norms if len(size) == 1), default=0)), math.inf),)
    present = [of_layers[number] for number in sorted(of_layers)]
    multiplied = [
        sum(_multiplied(size, facts, tokens) for name, size in layer.items() if not name.endswith("bias"))
        for layer in present
    ]
    numbers = [float(sum(math.prod(size) for size in layer.values())) for layer in present]
    outer = sum(math.prod(size) for name, size in others.items() if len(size) == 2 and name.startswith(_OUTPUTS))
    spread = layout.pipeline > 1  # over stages, of which each may hold any layers

    def costs(count: float) -> LayerCosts:
        return LayerCosts(forward_ms=count * token_ms, backward_ms=2 * count * token_ms, kept=kept)

    def usual(values: Sequence[float]) -> float:
        """Of a layer that repeats, at least; of any layer on average where all are on one rank."""
        return min(values[leading:], default=0.0) if spread else _average(values, leading, facts.layers)

    experts = experts_of(parameters, leading, facts.layers)
    return ModelCosts(
        layers=facts.layers,
        layer=costs(usual(multiplied)),
        first=LayerCosts(),
        last=replace(costs(outer), kept=()),
        layer_parameters=usual(numbers),
        outside_parameters=sum(math.prod(size) for size in others.values()),
        leading=leading if spread else 0,
        lead=costs(min(multiplied[:leading], default=0.0)),
        lead_parameters=min(numbers[:leading], default=0.0),
        layer_experts=experts.most,
        expert_parameters=experts.least if spread else experts.average,
    )


def _multiplied(size: Sequence[int], facts: ModelFacts, tokens: float) -> float:
    """How many numbers of a parameter each of so many tokens is multiplied with on average, at least."""
    if len(size) == 2:
        return float(math.prod(size))
    if len(size) == 3 and facts.active_experts and tokens >= 1:
        each = tokens * facts.active_experts // size[0]  # tokens of an expert, but for what cannot be shared out evenly
        return each / tokens * math.prod(size)
    return 0.0

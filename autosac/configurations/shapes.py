"""What bounds know of a model: its layers, and what stands before and behind them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autosac.configurations.layout import Layout
from autosac.configurations.sharding import NOTHING_KNOWN, Sharding
from autosac.configurations.traffic import NO_TRAFFIC, Traffic

_OUTPUTS = ("output", "lm_head")  # what TorchTitan 0.2 and 0.3 call it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer, or what stands before or behind all layers, for one microbatch on one rank.

    `kept`: (bytes, least milliseconds that recomputing them takes) of what the step keeps for the backward without
    checkpointing; infinite milliseconds for what cannot be freed. Times are lower bounds, bytes are those of a rank.
    `waits_ms`: what of forward and backward is transfers that computation waits for.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    waits_ms: float = 0.0
    kept: tuple[tuple[int, float], ...] = ()

    @property
    def both_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What bounds know of a model: its layers, what stands before them (`first`) and behind them (`last`).

    `layer_parameters`: of one layer on average, `least_parameters` of any whose gradients FSDP reduces together (0 if
    that is not known); sizes are of the whole model, unsharded. The `last` part's kept tensors are those that are there
    while the last of the model runs, beside what the layers keep. `budget_bytes`: within which stages are balanced.
    `traffic`: of FSDP, for one layer. `ends_less`: how many layers fewer TorchTitan gives the first and the last stage.
    `hop_ms`: to send a layer's input to the next pipeline stage. `reserved`: the budget is of reserved memory. `leading`:
    how many layers at the front are like `lead`, with `lead_parameters`; all others are like `layer`. `layer_experts`:
    the most that experts are of a layer's parameters.
    """

    layers: int
    layer: LayerCosts
    first: LayerCosts
    last: LayerCosts
    layer_parameters: float
    outside_parameters: float
    least_parameters: float = 0.0
    state_bytes: int = 12
    gradient_bytes: int = 4
    compute_bytes: int = 2
    memory_gbps: float = math.inf
    host_gb_us: float = 0.0
    budget_bytes: float = math.inf
    traffic: Traffic = NO_TRAFFIC
    sharding: Sharding = NOTHING_KNOWN
    ends_less: tuple[int, int] = (1, 1)
    hop_ms: float = 0.0
    reserved: bool = False
    leading: int = 0
    lead: LayerCosts = LayerCosts()
    lead_parameters: float = 0.0
    layer_experts: float = 0.0

    def both_ms(self, layers: int, leading: int) -> float:
        """Forward and backward of so many layers, of which so many are leading ones."""
        return (layers - leading) * self.layer.both_ms + leading * self.lead.both_ms

    def parameters(self, layers: int, leading: int) -> float:
        """Of so many layers, of which so many are leading ones."""
        return (layers - leading) * self.layer_parameters + leading * self.lead_parameters


def most_experts(parameters: Mapping[str, Sequence[int]]) -> float:
    """The most that parameters of experts are of any layer's. Those of all experts are one tensor."""
    layers: dict[str, float] = defaultdict(float)
    for name, size in parameters.items():
        if name.startswith("layers.") and len(size) > 2:
            layers[name.split(".")[1]] += math.prod(size)
    return max(layers.values(), default=0.0)


def costs_of_parameters(
    parameters: Mapping[str, Sequence[int]], layers: int, layout: Layout, seq_len: int, peak_flops: float
) -> ModelCosts:
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
    outer = sum(math.prod(shape) for name, shape in others.items() if len(shape) == 2 and name.startswith(_OUTPUTS))
    return ModelCosts(
        layers=layers,
        layer=LayerCosts(
            forward_ms=inner * per_number_ms,
            backward_ms=2 * inner * per_number_ms,
            kept=((int(2 * tokens * width / layout.tensor), math.inf),),
        ),
        first=LayerCosts(),
        last=LayerCosts(forward_ms=outer * per_number_ms, backward_ms=2 * outer * per_number_ms),
        layer_parameters=sum(math.prod(shape) for shape in of_layers.values()) / present,
        outside_parameters=sum(math.prod(shape) for shape in others.values()),
        layer_experts=most_experts(parameters),
    )

"""Sheets: what one microbatch does on one rank, measured on the capture of a single period of layers.

Every operator and tensor knows the module that made it. What belongs to a layer (a member of ``layers``) is a layer's; the
rest stands before the layers or behind them, in the forward and, the other way round, in the backward. The cut holds one of
each kind of layer that the whole job has, so n layers take

    before + n times the average of the repeating layers + (leading layers less as many average ones) + behind

A sheet is captured once for all layouts that differ only in how ranks share data and stages (`sheet_layout`): replicas, FSDP's
shards, accumulation, pipelines, resharding and the optimizer change neither the operators of the model nor their sizes.

Counted is a *chain* (`bounds.chains`), the sum of which is a lower bound of the time.

What layers keep and need at once is in `bounds.kept`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from autosac.configurations.bounds.chains import (
    NO_LAYER,
    ChainTimes,
    Sums,
    chain_of,
    layer_of_name,
    parts,
    sums,
)
from autosac.configurations.bounds.hosts import NO_HOST, HostTimes, hosts_of
from autosac.configurations.bounds.kept import (
    Items,
    Kept,
    items_of,
    kept_of,
    layer_modules,
    least_kept_of,
    working_bytes,
)
from autosac.configurations.bounds.others import others_of
from autosac.configurations.bounds.recomputation import rerun_ms
from autosac.configurations.bounds.shapes import NO_OTHERS, LayerCosts, ModelCosts, OtherTimes, experts_of
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding, sharding_of
from autosac.configurations.space.layout import USUAL_STAGES, Layout
from autosac.estimator.pricing import kinds_of
from autosac.simulation import Simulation
from autosac.trace import Label, Phase, Trace, TraceInfo

_KEPT = ("kept", "kept_products")
_SMALL = 1e-3
_PART_NAMES = ("layer", "least", "lead", "first", "last")
# What TorchTitan's selective checkpointing may save; of products it saves every second one.
_SAVED = re.compile(r"aten\.(mm|addmm|linear|max)\b|attention|attn|reduce_scatter|inductor_compiled_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A layout's microbatch: a repeating layer on average, what any of those takes at least, what any of the `leading` layers
    before them takes at least (`lead`), what stands before the layers and behind them.

    A layer's `kept` is that of the layer which keeps least; `least` and `lead` have their own. `least_parameters` are of
    any layer, `repeating_parameters` and `lead_parameters` at least of one of those. `full_ms` and `selective_ms`: what
    of such a layer full and selective checkpointing recompute at least. `parameter_shapes`: by name, of the layers that
    were captured. `states_share`, `gradients_share`: bytes of optimizer states and of gradients for each of parameters.
    """

    layers: int
    layer: LayerCosts
    least: LayerCosts
    first: LayerCosts
    last: LayerCosts
    layer_parameters: float
    least_parameters: float
    outside_parameters: float
    flops_per_token: float
    leading: int
    lead: LayerCosts
    lead_parameters: float
    repeating_parameters: float
    full_ms: float = 0.0
    selective_ms: float = 0.0
    parameter_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sharding: Sharding = NOTHING_KNOWN
    others: OtherTimes = NO_OTHERS
    host: HostTimes = NO_HOST
    states_share: float = math.inf
    gradients_share: float = math.inf

    def trains_everything(self, states: float) -> bool:
        """Whether all parameters have gradients, and so many times their bytes of optimizer states."""
        return self.states_share >= states * (1 - _SMALL) and self.gradients_share >= 1 - _SMALL

    def shape(self, *, pipeline: bool) -> ModelCosts:
        """For the bounds. A stage of a pipeline may hold any of the layers that repeat: there, the least of them counts, and
        leading ones by themselves.
        """
        experts = experts_of(dict(self.parameter_shapes), self.leading, self.layers)
        smaller = max(0.0, 1 - self.lead_parameters / self.layer_parameters) if self.layer_parameters else 0.0
        return ModelCosts(
            layers=self.layers,
            layer=self.least if pipeline else self.layer,
            first=self.first,
            last=self.last,
            layer_parameters=self.repeating_parameters if pipeline else self.layer_parameters,
            outside_parameters=self.outside_parameters,
            # FSDP reduces experts apart from what else a layer has.
            least_parameters=0.0 if experts.most else self.least_parameters,
            message_parameters=experts.least if experts.most else self.least_parameters,
            sharding=self.sharding,
            layer_experts=experts.most,
            expert_parameters=experts.least if pipeline else experts.average,
            leading=self.leading if pipeline else 0,
            lead=self.lead,
            lead_parameters=self.lead_parameters,
            missing=0.0 if pipeline else self.leading * smaller,
            others=self.others,
            host=self.host,
        )

    def document(self) -> dict[str, Any]:
        """As JSON's types; infinite costs are None."""
        found = asdict(self) | {"others": self.others._asdict(), "host": self.host._asdict()}
        for part in _PART_NAMES:
            for name in _KEPT:
                found[part][name] = [[size, None if math.isinf(ms) else ms] for size, ms in found[part][name]]
        return found

    @staticmethod
    def of(document: Mapping[str, Any]) -> Sheet:
        """The inverse of `document`."""

        def part(table: Mapping[str, Any]) -> LayerCosts:
            kept = {
                name: tuple((int(size), math.inf if ms is None else float(ms)) for size, ms in table[name])
                for name in _KEPT
            }
            return LayerCosts(**{**table, **kept})

        shapes = tuple((str(name), tuple(shape)) for name, shape in document["parameter_shapes"])
        parts = {name: part(document[name]) for name in _PART_NAMES}
        sharding = Sharding(**document["sharding"])
        tables = {"others": OtherTimes(**document["others"]), "host": HostTimes(**document["host"])}
        return Sheet(**{**document, **parts, **tables, "parameter_shapes": shapes, "sharding": sharding})


def sheet_layout(layout: Layout) -> Layout:
    """The layout whose sheet serves this one: the same operators, no pipeline, one microbatch, no replicas."""
    ranks = layout.world_size // (layout.tensor * layout.context)
    return replace(
        layout,
        replicate=1,
        shard=ranks,
        pipeline=1,
        schedule="1F1B",
        stages=USUAL_STAGES,
        split="torchtitan",
        global_batch=ranks * layout.microbatch,
        reshard="always",
        optimizer="fused",
        cpu_offload=False,
        activation_offload=False,
        chunk_loss=False,
        allocator="",
    )


def sheet_layouts(layout: Layout) -> tuple[Layout, ...]:
    """The layouts whose sheets may serve this one. The second is for where TorchTitan refuses the first, FSDP, as of models
    with tied parameters on some releases of PyTorch: without shards and pipeline the model runs as on one rank of its own.
    """
    first = sheet_layout(layout)
    if layout.has_shards or layout.pipeline > 1 or first.shard == 1:
        return (first,)
    return first, replace(first, shard=1, global_batch=first.microbatch)


def runs_as_its_sheet(layout: Layout) -> bool:
    """Whether TorchTitan refuses a layout if it refuses its sheet: with FSDP among as many ranks, and all layers on a rank.
    FSDP refuses experts that its ranks do not divide; replicas leave it fewer ranks.
    """
    return layout.pipeline == 1 and layout.replicate == 1 and layout.shard * layout.context > 1


class _Layers(NamedTuple):
    """The numbers of a capture's layers, of those at the front that are unlike the others, of these; how many a job has."""

    present: list[int]
    leading: list[int]
    repeating: list[int]
    total: int


def _layers_of(info: TraceInfo) -> _Layers:
    present = sorted({layer_of_name(name) for name in info.parameter_shapes} - {NO_LAYER})
    if info.cut is None:
        return _Layers(present, [], present, len(present))
    repeating = present[-info.cut.period :]
    return _Layers(present, present[: len(present) - len(repeating)], repeating, info.cut.total)


def sheet_of(simulation: Simulation) -> Sheet:
    """The sheet of a job, from a cut of it (`autosac.capture.jobs.layers`) or from the whole job."""
    trace = simulation.trace
    info = trace.info
    event_ms = simulation.pricing.event_ms.tolist()
    layer_of = [layer_of_name(name) for name in trace.modules]
    members = chain_of(trace, event_ms)
    chain, waits = parts(members, layer_of), sums(members, layer_of, lambda member: member.transfer)
    kinds = kinds_of(trace, simulation.pricing, simulation.target.hardware)
    products = sums(members, layer_of, lambda member: bool(kinds.matrix[member.event]))
    present, leading, repeating, total = _layers_of(info)
    added = total - len(present)  # layers that are not there
    numbers = [(layer_of_name(name), math.prod(shape)) for name, shape in info.parameter_shapes.items()]
    parameters = {layer: sum(n for number, n in numbers if number == layer) for layer in (NO_LAYER, *present)}

    def average(of_layers: Mapping[int, float]) -> float:
        return sum(of_layers.get(layer, 0.0) for layer in repeating) / max(1, len(repeating))

    costs_ms = {member.event: member.ms for member in members if not info.compiled}
    # Compiled, a kernel makes several results, and it need not be the same one that makes one of them again.
    kept, rest = kept_of(trace, event_ms, costs_ms, layer_of, {i for i in costs_ms if kinds.matrix[i]})
    least_kept = least_kept_of([kept[layer] for layer in present])
    working = _working_of(trace, layer_of)

    def least_parameters(some: Sequence[int]) -> float:
        return float(min((parameters[layer] for layer in some), default=0))

    layer_parameters = average(parameters)
    flops = info.flops_per_token or 0.0
    parameter_bytes = max(1, _labelled(trace, Label.PARAMETER))
    return Sheet(
        layers=max(1, total),
        layer=LayerCosts(
            forward_ms=average(chain.layers[Phase.FORWARD]),
            backward_ms=average(chain.layers[Phase.BACKWARD]),
            waits_ms=average(waits.layers),
            least_waits_ms=average(waits.layers),
            products_ms=average(products.layers),
            **_memory(least_kept, working, repeating),
        ),
        least=_least(chain, waits, products, kept, working, repeating),
        leading=len(leading),
        lead=_least(chain, waits, products, kept, working, leading),
        lead_parameters=least_parameters(leading),
        repeating_parameters=least_parameters(repeating),
        first=_first(chain, waits, products, present, average),
        last=_last(chain, waits, products, rest),
        layer_parameters=layer_parameters,
        least_parameters=least_parameters(present),
        outside_parameters=sum(parameters.values()) + added * layer_parameters - total * layer_parameters,
        flops_per_token=flops,
        full_ms=rerun_ms(least_kept.forward, lambda _: False),
        selective_ms=rerun_ms(least_kept.forward, lambda name: bool(_SAVED.search(name))),
        parameter_shapes=tuple(info.parameter_shapes.items()),
        sharding=_sharding_of(simulation, layer_of, total - len(leading)),
        others=others_of(simulation, max(1, total) / max(1, len(present))),
        host=hosts_of(simulation, layer_of, present, repeating, total),
        states_share=_labelled(trace, Label.OPTIMIZER_STATE) / parameter_bytes,
        gradients_share=_labelled(trace, Label.GRADIENT) / parameter_bytes,
    )


def _labelled(trace: Trace, label: Label) -> int:
    return sum(row.nbytes for row in trace.storages if row.label is label)


class _Working(NamedTuple):
    """What backwards need at once, by layer: `bounds.kept.working_bytes`, and that beside parts (experts)."""

    whole: Mapping[int, int]
    beside: Mapping[int, int]


def _working_of(trace: Trace, layer_of: Sequence[int]) -> _Working:
    if trace.info.compiled:  # what is recomputed fuses into other kernels
        return _Working({}, {})
    return _Working(working_bytes(trace, layer_of), working_bytes(trace, layer_of, beside_parts=True))


def _sharding_of(simulation: Simulation, layer_of: Sequence[int], repeating: int) -> Sharding:
    """Of a job in which so many layers repeat: no more have messages for parts of them."""
    found = sharding_of(simulation, layer_modules(simulation.trace, layer_of))
    return replace(found, inner_at_once=min(found.inner_at_once, repeating))


def _memory(kept: Kept, working: _Working, layers: Sequence[int]) -> dict[str, Any]:
    """The memory of any of these layers, at least, as fields of `LayerCosts`."""
    whole, beside = (min((of.get(layer, 0) for layer in layers), default=0) for of in working)
    memory = {"working_bytes": whole, "beside_experts_bytes": beside}
    return {"kept": kept.items(), "kept_products": kept.products(), **memory}


def _least(
    chain: ChainTimes,
    waits: Sums,
    products: Sums,
    kept: Mapping[int, Kept],
    working: _Working,
    layers: Sequence[int],
) -> LayerCosts:
    """Any of these layers, at least."""
    least_kept = least_kept_of([kept[layer] for layer in layers])

    def least_ms(phase: Phase) -> float:
        return min((chain.layers[phase].get(layer, 0.0) for layer in layers), default=0.0)

    return LayerCosts(
        forward_ms=least_ms(Phase.FORWARD),
        backward_ms=least_ms(Phase.BACKWARD),
        waits_ms=max((waits.layers.get(layer, 0.0) for layer in layers), default=0.0),
        least_waits_ms=min((waits.layers.get(layer, 0.0) for layer in layers), default=0.0),
        products_ms=min((products.layers.get(layer, 0.0) for layer in layers), default=0.0),
        **_memory(least_kept, working, layers),
    )


def _first(
    chain: ChainTimes,
    waits: Sums,
    products: Sums,
    present: Sequence[int],
    average: Callable[[Mapping[int, float]], float],
) -> LayerCosts:
    """What comes before the layers, and what those that do not repeat take beyond the average."""

    def excess(of_layers: Mapping[int, float]) -> float:
        return sum(of_layers.get(layer, 0.0) - average(of_layers) for layer in present)

    return LayerCosts(
        forward_ms=chain.first[Phase.FORWARD] + excess(chain.layers[Phase.FORWARD]),
        backward_ms=chain.first[Phase.BACKWARD] + excess(chain.layers[Phase.BACKWARD]),
        waits_ms=waits.first + excess(waits.layers),
        least_waits_ms=waits.first + excess(waits.layers),
        products_ms=products.first + excess(products.layers),
    )


def _last(chain: ChainTimes, waits: Sums, products: Sums, kept: Items) -> LayerCosts:
    """What comes behind the layers."""
    return LayerCosts(
        forward_ms=chain.last[Phase.FORWARD],
        backward_ms=chain.last[Phase.BACKWARD],
        waits_ms=waits.last,
        least_waits_ms=waits.last,
        products_ms=products.last,
        kept=items_of(kept),
    )

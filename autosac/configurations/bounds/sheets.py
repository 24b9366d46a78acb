"""Sheets: what one microbatch does on one rank, measured on the capture of a single period of layers.

Every operator and tensor knows the module that made it. What belongs to a layer (a member of ``layers``) is a layer's; the
rest stands before the layers or behind them, in the forward and, the other way round, in the backward. The cut holds one of
each kind of layer that the whole job has, so n layers take

    before + n times the average of the repeating layers + (leading layers less as many average ones) + behind

A sheet is captured once for all layouts that differ only in how ranks share data and stages (`sheet_layout`): replicas, FSDP's
shards, accumulation, pipelines, resharding and the optimizer change neither the operators of the model nor their sizes.

Counted is a *chain* (`bounds.chains`), the sum of which is a lower bound of the time.

Kept is what a layer allocated in its forward and lives on in the backward. To free it, its operator or collective runs again,
and what made the inputs of that (`bounds.recomputation`); a layer's input is never freed. What others read
as well (the last layer's result) does not count. Between the layers' forward and backward, all of that is there, and whatever
the operator that runs reads and writes: logits and their gradient, which no plan makes smaller.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from autosac.configurations.bounds.chains import (
    COMPUTE,
    NO_LAYER,
    PHASES,
    ChainTimes,
    Sums,
    chain_of,
    layer_number,
    parts,
    sums,
)
from autosac.configurations.bounds.hosts import NO_HOST, HostTimes, hosts_of
from autosac.configurations.bounds.others import others_of
from autosac.configurations.bounds.recomputation import LayerForward, Made, Run, frontier, products_frontier, rerun_ms
from autosac.configurations.bounds.shapes import NO_OTHERS, LayerCosts, ModelCosts, OtherTimes, experts_of
from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding, sharding_of
from autosac.configurations.space.layout import USUAL_STAGES, Layout
from autosac.estimator.pricing import kinds_of
from autosac.simulation import Simulation
from autosac.trace import Alloc, Collective, Free, Label, ModuleEnter, Op, Phase, Trace, TraceInfo

_MODELS_OWN = "_c10d_functional."  # collectives of tensor, sequence and context parallelism
_Items = Counter[tuple[int, float, str]]  # (bytes, milliseconds of the operator, its name)
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
        experts, least_experts = experts_of(dict(self.parameter_shapes), self.leading)
        return ModelCosts(
            layers=self.layers,
            layer=self.least if pipeline else self.layer,
            first=self.first,
            last=self.last,
            layer_parameters=self.repeating_parameters if pipeline else self.layer_parameters,
            outside_parameters=self.outside_parameters,
            # FSDP reduces experts apart from what else a layer has.
            least_parameters=0.0 if experts else self.least_parameters,
            message_parameters=least_experts if experts else self.least_parameters,
            sharding=self.sharding,
            layer_experts=experts,
            leading=self.leading if pipeline else 0,
            lead=self.lead,
            lead_parameters=self.lead_parameters,
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


def runs_as_its_sheet(layout: Layout) -> bool:
    """Whether TorchTitan refuses a layout if it refuses its sheet: with FSDP, and all layers on a rank."""
    return layout.pipeline == 1 and layout.shard * layout.context > 1


class _Layers(NamedTuple):
    """The numbers of a capture's layers, of those at the front that are unlike the others, of these; how many a job has."""

    present: list[int]
    leading: list[int]
    repeating: list[int]
    total: int


def _layers_of(info: TraceInfo) -> _Layers:
    present = sorted({layer_number(name) for name in info.parameter_shapes} - {NO_LAYER})
    if info.cut is None:
        return _Layers(present, [], present, len(present))
    repeating = present[-info.cut.period :]
    return _Layers(present, present[: len(present) - len(repeating)], repeating, info.cut.total)


def sheet_of(simulation: Simulation) -> Sheet:
    """The sheet of a job, from a cut of it (`autosac.capture.jobs.layers`) or from the whole job."""
    trace = simulation.trace
    info = trace.info
    event_ms = simulation.pricing.event_ms.tolist()
    layer_of = [layer_number(name) for name in trace.modules]
    members = chain_of(trace, event_ms)
    chain, waits = parts(members, layer_of), sums(members, layer_of, lambda member: member.transfer)
    kinds = kinds_of(trace, simulation.pricing, simulation.target.hardware)
    products = sums(members, layer_of, lambda member: bool(kinds.matrix[member.event]))
    present, leading, repeating, total = _layers_of(info)
    added = total - len(present)  # layers that are not there
    numbers = [(layer_number(name), math.prod(shape)) for name, shape in info.parameter_shapes.items()]
    parameters = {layer: sum(n for number, n in numbers if number == layer) for layer in (NO_LAYER, *present)}

    def average(of_layers: Mapping[int, float]) -> float:
        return sum(of_layers.get(layer, 0.0) for layer in repeating) / max(1, len(repeating))

    layer_ms = {phase: average(chain.layers[phase]) for phase in PHASES}
    costs_ms = {member.event: member.ms for member in members if not info.compiled}
    # Compiled, a kernel makes several results, and it need not be the same one that makes one of them again.
    kept, rest = _kept(trace, event_ms, costs_ms, layer_of, {i for i in costs_ms if kinds.matrix[i]})
    least_kept = _least_kept([kept[layer] for layer in present])

    def least_parameters(some: Sequence[int]) -> float:
        return float(min((parameters[layer] for layer in some), default=0))

    layer_parameters = average(parameters)
    flops = info.flops_per_token or 0.0
    parameter_bytes = max(1, _labelled(trace, Label.PARAMETER))
    return Sheet(
        layers=max(1, total),
        layer=LayerCosts(
            forward_ms=layer_ms[Phase.FORWARD],
            backward_ms=layer_ms[Phase.BACKWARD],
            waits_ms=average(waits.layers),
            least_waits_ms=average(waits.layers),
            products_ms=average(products.layers),
            kept=least_kept.items(),
            kept_products=least_kept.products(),
        ),
        least=_least(chain, waits, products, kept, repeating),
        leading=len(leading),
        lead=_least(chain, waits, products, kept, leading),
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
        sharding=sharding_of(simulation, _layer_modules(trace, layer_of)),
        others=others_of(simulation, max(1, total) / max(1, len(present))),
        host=hosts_of(simulation, layer_of, present, repeating, total),
        states_share=_labelled(trace, Label.OPTIMIZER_STATE) / parameter_bytes,
        gradients_share=_labelled(trace, Label.GRADIENT) / parameter_bytes,
    )


def _labelled(trace: Trace, label: Label) -> int:
    return sum(row.nbytes for row in trace.storages if row.label is label)


def _least(
    chain: ChainTimes, waits: Sums, products: Sums, kept: Mapping[int, _Kept], layers: Sequence[int]
) -> LayerCosts:
    """Any of these layers, at least."""
    least_kept = _least_kept([kept[layer] for layer in layers])

    def least_ms(phase: Phase) -> float:
        return min((chain.layers[phase].get(layer, 0.0) for layer in layers), default=0.0)

    return LayerCosts(
        forward_ms=least_ms(Phase.FORWARD),
        backward_ms=least_ms(Phase.BACKWARD),
        waits_ms=max((waits.layers.get(layer, 0.0) for layer in layers), default=0.0),
        least_waits_ms=min((waits.layers.get(layer, 0.0) for layer in layers), default=0.0),
        products_ms=min((products.layers.get(layer, 0.0) for layer in layers), default=0.0),
        kept=least_kept.items(),
        kept_products=least_kept.products(),
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


def _last(chain: ChainTimes, waits: Sums, products: Sums, kept: _Items) -> LayerCosts:
    """What comes behind the layers."""
    return LayerCosts(
        forward_ms=chain.last[Phase.FORWARD],
        backward_ms=chain.last[Phase.BACKWARD],
        waits_ms=waits.last,
        least_waits_ms=waits.last,
        products_ms=products.last,
        kept=_items(kept),
    )


def _least_kept(kept: Sequence[_Kept]) -> _Kept:
    """What the layer that keeps least keeps."""
    return min(kept, key=lambda layer: layer.nbytes, default=_Kept((), LayerForward((), ())))


def _items(kept: _Items) -> tuple[tuple[int, float], ...]:
    return tuple((size * n, ms * n) for (size, ms, _), n in kept.items())


# ---- memory ---------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What a layer leaves to its backward: `fixed` bytes that no plan frees, and what it can run again."""

    fixed: tuple[int, ...]
    forward: LayerForward

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.fixed) + self.forward.needed_bytes

    def items(self) -> tuple[tuple[int, float], ...]:
        """(bytes, least milliseconds that recomputing them takes)."""
        return (*((size, math.inf) for size in self.fixed), *frontier(self.forward))

    def products(self) -> tuple[tuple[int, float], ...]:
        """(bytes, least milliseconds of products that recomputing them takes)."""
        return (*((size, math.inf) for size in self.fixed), *products_frontier(self.forward))


class _Forwards:
    """The forwards of all layers: which operator made which tensor from which others."""

    def __init__(self, costs_ms: Mapping[int, float], products: Collection[int]) -> None:
        self._costs_ms, self._products = costs_ms, products
        self.layer: dict[int, int] = {}  # of storages that layers made
        self._maker: dict[int, int] = {}  # event that took longest to write a storage
        self._runs: dict[int, tuple[str, list[tuple[int, int]]]] = {}

    def note(self, event: int, name: str, layer: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """An operator or collective of a layer. `outputs`: those that are activations."""
        reads = [(storage, self._maker[storage]) for storage in inputs if self.layer.get(storage) == layer]
        self._runs[event] = name, [(storage, maker) for storage, maker in reads if storage not in outputs]
        for storage in outputs:
            self.layer.setdefault(storage, layer)
            if storage not in self._maker or self._cost_ms(event) >= self._cost_ms(self._maker[storage]):
                self._maker[storage] = event

    def _cost_ms(self, event: int) -> float:
        return self._costs_ms.get(event, 0.0)

    def of(self, layer: int, needed: Collection[int], elsewhere: Collection[int], sizes: Sequence[int]) -> LayerForward:
        """One layer's. `elsewhere`: storages that others keep or read, which are there; `sizes`: of all storages."""
        own = [storage for storage, home in self.layer.items() if home == layer and storage not in elsewhere]
        position = {storage: i for i, storage in enumerate(own)}
        events = sorted(
            {self._maker[storage] for storage in own}
            | {maker for event in self._runs for storage, maker in self._runs[event][1] if storage in position}
        )
        number = {event: i for i, event in enumerate(events)}
        runs = tuple(
            Run(
                round(self._cost_ms(event), 6),
                self._runs[event][0],
                tuple(
                    (position[storage], number[maker]) for storage, maker in self._runs[event][1] if storage in position
                ),
                event in self._products,
            )
            for event in events
        )
        made = tuple(Made(sizes[storage], storage in needed, number[self._maker[storage]]) for storage in own)
        return LayerForward(runs, made)


def _kept(
    trace: Trace,
    event_ms: Sequence[float],
    costs_ms: Mapping[int, float],
    layer_of: Sequence[int],
    products: Collection[int],
) -> tuple[dict[int, _Kept], _Items]:
    """Every tensor that the forward leaves to the backward, by layer; and of the
    others, at the operator between the layers' forward and backward at which they are most: what that one reads and writes
    is fixed. `costs_ms`: of the chain's members, by their events, of which some are products.
    """
    inputs = _layer_inputs(trace, layer_of)
    alive: dict[int, tuple[float, str]] = {}  # longest operator that wrote it: milliseconds and name
    forwards = _Forwards(costs_ms, products)
    shared: set[int] = set()  # made by a layer and read by others
    behind: _Items = Counter()
    event: Any
    for i, (event, ms) in enumerate(zip(trace.events, event_ms, strict=True)):
        kind = type(event)
        if kind is Alloc and _is_activation(trace, event.storage):
            alive[event.storage] = 0.0, ""
        elif kind is Free:
            alive.pop(event.storage, None)
        elif kind is Op or kind is Collective:
            layer = layer_of[event.module] if event.module >= 0 else NO_LAYER
            name = trace.signatures[event.signature].name if kind is Op else event.kind
            if kind is Op and event.phase is Phase.BACKWARD and layer != NO_LAYER:
                break
            if kind is Op and layer != NO_LAYER:
                behind = Counter()
            elif kind is Op and event.stream == COMPUTE and event.phase in PHASES:
                behind = max(behind, _at_once(trace, event, alive, layer_of, inputs), key=_total)
            for storage in event.inputs if kind is Op else ():
                if storage in alive and layer_of[trace.storages[storage].module] not in (NO_LAYER, layer):
                    shared.add(storage)
            if event.phase is Phase.BACKWARD or event.stream != COMPUTE:
                continue
            written = [storage for storage in event.outputs if storage in alive]
            for storage in written:
                alive[storage] = max(alive[storage], (ms, name))
            if layer != NO_LAYER:
                own = [storage for storage in written if layer_of[trace.storages[storage].module] == layer]
                forwards.note(i, name, layer, event.inputs, own)
    sizes = [row.nbytes for row in trace.storages]
    fixed: dict[int, list[int]] = defaultdict(list)
    for storage in alive:
        if storage in inputs:
            fixed[inputs[storage]].append(sizes[storage])
    layers = {layer for layer in (*forwards.layer.values(), *fixed) if layer != NO_LAYER}
    elsewhere = shared | set(inputs)
    return {
        layer: _Kept(tuple(fixed[layer]), forwards.of(layer, alive.keys() - elsewhere, elsewhere, sizes))
        for layer in layers
    }, behind


def _at_once(
    trace: Trace, op: Op, alive: Mapping[int, tuple[float, str]], layer_of: Sequence[int], inputs: Mapping[int, int]
) -> _Items:
    """What is there while an operator outside of the layers runs, without what layers keep."""
    found: _Items = Counter()
    touched = {storage for storage in (*op.inputs, *op.outputs) if storage >= 0}
    for storage in touched:
        row = trace.storages[storage]
        if row.stream == COMPUTE and row.label is Label.NONE and storage not in inputs:
            found[row.nbytes, math.inf, ""] += 1
    for storage, (ms, name) in alive.items():
        if storage not in touched and storage not in inputs and layer_of[trace.storages[storage].module] == NO_LAYER:
            found[trace.storages[storage].nbytes, round(ms, 6), name] += 1
    return found


def _total(kept: _Items) -> int:
    return sum(size * n for (size, _, _), n in kept.items())


def _layer_inputs(trace: Trace, layer_of: Sequence[int]) -> dict[int, int]:
    """The storages that layers (members of ``layers``) read first of those that were there before their forwards, and who."""
    layers = _layer_modules(trace, layer_of)
    found: dict[int, int] = {}
    before: frozenset[int] = frozenset()
    layer = NO_LAYER
    alive: set[int] = set()
    event: Any
    for event in trace.events:
        kind = type(event)
        if kind is Alloc and _is_activation(trace, event.storage):
            alive.add(event.storage)
        elif kind is Free:
            alive.discard(event.storage)
        elif kind is ModuleEnter and event.module in layers and event.phase is Phase.FORWARD:
            before, layer = frozenset(alive), layer_of[event.module]
        elif before and kind is Op and event.stream == COMPUTE and event.phase is Phase.FORWARD:
            read = [storage for storage in event.inputs if storage in before]
            if read:
                before = frozenset()
                found.setdefault(read[0], layer)
    return found


def _layer_modules(trace: Trace, layer_of: Sequence[int]) -> set[int]:
    """The modules that are members of ``layers``."""
    return {i for i, name in enumerate(trace.modules) if layer_of[i] != NO_LAYER and name.count(".") == 1}


def _is_activation(trace: Trace, storage: int) -> bool:
    """Made by the model's own forward, its own collectives included: neither gathered parameters nor FSDP's buffers."""
    row = trace.storages[storage]
    own = row.label is Label.NONE or (row.label is Label.COMMUNICATION and row.op.startswith(_MODELS_OWN))
    return own and row.phase is Phase.FORWARD and row.stream == COMPUTE

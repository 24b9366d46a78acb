"""Sheets: what one microbatch does on one rank, measured on captures of a few layers.

    cuts of n and n + p layers   ->   one period of layers = their difference,   outside = the smaller less its layers

A sheet is captured once for all layouts that differ only in how ranks share data and stages (`sheet_layout`): replicas, FSDP's
shards, accumulation, pipelines, resharding and the optimizer change neither the operators of the model nor their sizes.

Counted is a *chain* (`_chain_ms`): operators of the compute stream, which run one after the other, and collectives that were
issued from it and that it waits for before its next operator (tensor and context parallelism). FSDP's own copies are left out:
their shapes depend on the shards. Neither host nor interference shortens a chain, so the sum is a lower bound of the time.

Kept is what was allocated in the forward and lives on in the backward. To free it, its operator runs again at least; the input
of a layer is never freed (`autosac.configurations.bounds`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autosac.configurations.bounds import Part, Shape
from autosac.configurations.layout import Layout
from autosac.simulation import Simulation
from autosac.trace import Alloc, Collective, Free, Label, ModuleEnter, Op, Phase, Trace, WorkWait

_SHARDS_OWN = ("fsdp.", "aten.split_with_sizes_copy", "c10d.", "_c10d_functional.")
_COMPUTE = 0  # the stream that models run on


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A layout's microbatch: one layer, and all else. `parameter_shapes`: by name, of the few layers that were captured."""

    layers: int
    layer: Part
    outside: Part
    layer_parameters: float
    outside_parameters: float
    flops_per_token: float
    parameter_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def shape(self) -> Shape:
        """For the bounds."""
        return Shape(
            layers=self.layers,
            layer=self.layer,
            outside=self.outside,
            layer_parameters=self.layer_parameters,
            outside_parameters=self.outside_parameters,
        )

    def document(self) -> dict[str, Any]:
        """As JSON's types; infinite costs are None."""
        found = asdict(self)
        for part in ("layer", "outside"):
            found[part]["kept"] = [[size, None if math.isinf(ms) else ms] for size, ms in found[part]["kept"]]
        return found

    @staticmethod
    def of(document: Mapping[str, Any]) -> Sheet:
        """The inverse of `document`."""

        def part(table: Mapping[str, Any]) -> Part:
            kept = tuple((int(size), math.inf if ms is None else float(ms)) for size, ms in table["kept"])
            return Part(forward_ms=table["forward_ms"], backward_ms=table["backward_ms"], kept=kept)

        shapes = tuple((str(name), tuple(shape)) for name, shape in document["parameter_shapes"])
        parts = {name: part(document[name]) for name in ("layer", "outside")}
        return Sheet(**{**document, **parts, "parameter_shapes": shapes})


def sheet_layout(layout: Layout) -> Layout:
    """The layout whose sheet serves this one: the same operators, no pipeline, one microbatch, no replicas."""
    ranks = layout.world_size // (layout.tensor * layout.context)
    return replace(
        layout,
        replicate=1,
        shard=ranks,
        pipeline=1,
        schedule="1F1B",
        split="torchtitan",
        global_batch=ranks * layout.microbatch,
        reshard="always",
        optimizer="fused",
        cpu_offload=False,
        activation_offload=False,
        allocator="",
    )


def sheet_of(cuts: Sequence[Simulation]) -> Sheet:
    """The sheet of a job from two cuts of it (few layers and a period more), or from the whole job alone."""
    found = [_Microbatch(simulation) for simulation in cuts]
    info = cuts[0].trace.info
    small = found[0]
    if len(found) == 1:
        # All layers are there: what one takes cannot be told from the rest, so the rest counts as nothing.
        count = max(1, small.layers)
        layer = Part(
            forward_ms=small.forward_ms / count,
            backward_ms=small.backward_ms / count,
            kept=tuple((size * n // count, ms * n / count) for (size, ms), n in small.kept.items()),
        )
        return Sheet(
            layers=count,
            layer=layer,
            outside=Part(forward_ms=0.0, backward_ms=0.0),
            layer_parameters=small.layer_parameters / count,
            outside_parameters=small.outside_parameters,
            flops_per_token=info.flops_per_token or 0.0,
            parameter_shapes=tuple(info.parameter_shapes.items()),
        )
    cut, large = info.cut, found[1]
    assert cut is not None
    grown = large.layers - small.layers
    more = large.kept - small.kept

    def outside(own: float, other: float) -> float:
        return max(0.0, own - (other - own) / grown * small.layers)

    layer = Part(
        forward_ms=(large.forward_ms - small.forward_ms) / grown,
        backward_ms=(large.backward_ms - small.backward_ms) / grown,
        kept=_shared(more, grown),
    )
    rest = small.kept.copy()
    for item, n in more.items():
        rest[item] -= n * small.layers // grown
    growth = (large.flops_per_token - small.flops_per_token) / grown
    return Sheet(
        layers=cut.total,
        layer=layer,
        outside=Part(
            forward_ms=outside(small.forward_ms, large.forward_ms),
            backward_ms=outside(small.backward_ms, large.backward_ms),
            kept=tuple((size * n, ms * n) for (size, ms), n in rest.items() if n > 0),
        ),
        layer_parameters=(large.layer_parameters - small.layer_parameters) / grown,
        outside_parameters=outside(
            small.layer_parameters + small.outside_parameters, large.layer_parameters + large.outside_parameters
        ),
        flops_per_token=small.flops_per_token + growth * (cut.total - small.layers),
        parameter_shapes=tuple(info.parameter_shapes.items()),
    )


def _shared(kept: Counter[tuple[int, float]], layers: int) -> tuple[tuple[int, float], ...]:
    """Kept tensors of several layers as those of one of them, on average."""
    return tuple((int(size * n / layers), ms * n / layers) for (size, ms), n in kept.items())


class _Microbatch:
    """What a captured step of one microbatch does."""

    def __init__(self, simulation: Simulation) -> None:
        trace = simulation.trace
        event_ms = simulation.pricing.event_ms.tolist()
        self.forward_ms, self.backward_ms = _chain_ms(trace, event_ms)
        self.kept = _kept(trace, event_ms)
        shapes = trace.info.parameter_shapes
        numbers = {name: math.prod(shape) for name, shape in shapes.items()}
        of_layers = {name: n for name, n in numbers.items() if name.startswith("layers.")}
        self.layers = len({name.split(".")[1] for name in of_layers})
        self.layer_parameters = float(sum(of_layers.values()))
        self.outside_parameters = float(sum(numbers.values())) - self.layer_parameters
        self.flops_per_token = trace.info.flops_per_token or 0.0


def _chain_ms(trace: Trace, event_ms: Sequence[float]) -> tuple[float, float]:
    """Milliseconds of the chain in the forward and in the backward. See the module."""
    found = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    issued: dict[int, tuple[Phase, float]] = {}  # collectives since the last operator, by their work
    event: Any
    for event, ms in zip(trace.events, event_ms, strict=True):
        kind = type(event)
        if kind is Op and event.stream == _COMPUTE and ms:
            issued.clear()
            if event.phase in found and not trace.signatures[event.signature].name.startswith(_SHARDS_OWN):
                found[event.phase] += ms
        elif kind is Collective and event.stream == _COMPUTE and event.phase in found:
            if event.asynchronous:
                issued[event.work] = (event.phase, ms)
            else:
                found[event.phase] += ms
        elif kind is WorkWait and event.stream == _COMPUTE and event.work in issued:
            # Of several in flight at once only the longest counts: they may run side by side.
            phase, longest = issued.pop(event.work)
            overlapping = max((other for _, other in issued.values()), default=0.0)
            found[phase] += max(0.0, longest - overlapping)
    return found[Phase.FORWARD], found[Phase.BACKWARD]


def _kept(trace: Trace, event_ms: Sequence[float]) -> Counter[tuple[int, float]]:
    """(bytes, milliseconds of its operator) of every tensor that the forward leaves to the backward."""
    inputs = _layer_inputs(trace)
    alive: dict[int, float] = {}
    kept: Counter[tuple[int, float]] = Counter()
    event: Any
    for event, ms in zip(trace.events, event_ms, strict=True):
        kind = type(event)
        if kind is Alloc and _is_activation(trace, event.storage):
            alive[event.storage] = 0.0
        elif kind is Free:
            alive.pop(event.storage, None)
        elif kind is Op:
            if event.phase is Phase.BACKWARD:
                break
            for storage in event.outputs:
                if storage in alive and event.stream == _COMPUTE:
                    alive[storage] = max(alive[storage], ms)
    for storage, ms in alive.items():
        size = trace.storages[storage].nbytes
        kept[size, math.inf if storage in inputs else round(ms, 6)] += 1
    return kept


def _layer_inputs(trace: Trace) -> frozenset[int]:
    """The storages that layers (members of ``layers``) read first of those that were there before their forwards."""
    layers = {i for i, name in enumerate(trace.modules) if name.startswith("layers.") and name.count(".") == 1}
    found: set[int] = set()
    before: frozenset[int] = frozenset()
    alive: set[int] = set()
    event: Any
    for event in trace.events:
        kind = type(event)
        if kind is Alloc and _is_activation(trace, event.storage):
            alive.add(event.storage)
        elif kind is Free:
            alive.discard(event.storage)
        elif kind is ModuleEnter and event.module in layers and event.phase is Phase.FORWARD:
            before = frozenset(alive)
        elif before and kind is Op and event.stream == _COMPUTE and event.phase is Phase.FORWARD:
            read = [storage for storage in event.inputs if storage in before]
            if read:
                before = frozenset()
                found.add(read[0])
    return frozenset(found)


def _is_activation(trace: Trace, storage: int) -> bool:
    """Made by the model's own forward: neither gathered parameters nor buffers of communication."""
    row = trace.storages[storage]
    return row.phase is Phase.FORWARD and row.stream == _COMPUTE and row.label is Label.NONE

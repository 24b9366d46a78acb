"""What the layers of a captured step keep for their backward, and what one needs at once as it runs backward.

Kept is what a layer allocated in its forward and lives on in the backward. To free it, its operator or collective runs again,
and what made the inputs of that (`bounds.recomputation`); a layer's input is never freed. What others read
as well (the last layer's result) does not count. Between the layers' forward and backward, all of that is there, and whatever
the operator that runs reads and writes: logits and their gradient, which no plan makes smaller.

A layer's backward needs at once what its hungriest operator reads and writes: whatever is checkpointed, all that is there as
that operator runs. Of what backwards have made, the rest of what is used later is there, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from autosac.configurations.bounds.chains import COMPUTE, NO_LAYER, PHASES
from autosac.configurations.bounds.recomputation import LayerForward, Made, Run, operators_frontier, products_frontier
from autosac.configurations.bounds.sharding import is_inner
from autosac.trace import Alloc, Collective, Free, Label, ModuleEnter, Op, Phase, Trace

_MODELS_OWN = "_c10d_functional."  # collectives of tensor, sequence and context parallelism
Items = Counter[tuple[int, float, str]]  # (bytes, milliseconds of the operator, its name)


def least_kept_of(kept: Sequence[Kept]) -> Kept:
    """What the layer that keeps least keeps."""
    return min(kept, key=lambda layer: layer.nbytes, default=Kept((), LayerForward((), ())))


def items_of(kept: Items) -> tuple[tuple[int, float], ...]:
    return tuple((size * n, ms * n) for (size, ms, _), n in kept.items())


class Kept(NamedTuple):
    """What a layer leaves to its backward: `fixed` bytes that no plan frees, and what it can run again."""

    fixed: tuple[int, ...]
    forward: LayerForward

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.fixed) + self.forward.needed_bytes

    def items(self) -> tuple[tuple[int, float], ...]:
        """(bytes, least milliseconds that recomputing them takes)."""
        return (*((size, math.inf) for size in self.fixed), *operators_frontier(self.forward))

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


def kept_of(
    trace: Trace,
    event_ms: Sequence[float],
    costs_ms: Mapping[int, float],
    layer_of: Sequence[int],
    products: Collection[int],
) -> tuple[dict[int, Kept], Items]:
    """Every tensor that the forward leaves to the backward, by layer; and of the
    others, at the operator between the layers' forward and backward at which they are most: what that one reads and writes
    is fixed. `costs_ms`: of the chain's members, by their events, of which some are products.
    """
    inputs = _layer_inputs(trace, layer_of)
    alive: dict[int, tuple[float, str]] = {}  # longest operator that wrote it: milliseconds and name
    forwards = _Forwards(costs_ms, products)
    shared: set[int] = set()  # made by a layer and read by others
    behind: Items = Counter()
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
        layer: Kept(tuple(fixed[layer]), forwards.of(layer, alive.keys() - elsewhere, elsewhere, sizes))
        for layer in layers
    }, behind


def working_bytes(trace: Trace, layer_of: Sequence[int], *, beside_parts: bool = False) -> dict[int, int]:
    """By layer: the most bytes that its backward needs at once, whatever is checkpointed. At each of its operators these are
    the tensors that it reads or writes, but for parameters, and gradients of activations that are there and read later.

    `beside_parts`: only of operators beside which the parameters of a part of their layer, which FSDP gathers by itself
    (experts), are there. They are whenever the part runs backward, and until its gradients are complete.
    """
    last_read: dict[int, int] = {}
    event: Any
    for i, event in enumerate(trace.events):
        if type(event) is Op and event.stream == COMPUTE and event.phase is Phase.BACKWARD:
            last_read.update(dict.fromkeys(event.inputs, i))
    found: dict[int, int] = {}
    alive: dict[int, int] = {}  # gradients of activations: bytes
    gathered: dict[int, int] = {}  # parameters of parts: layers
    for i, event in enumerate(trace.events):
        kind = type(event)
        if kind is Alloc and _is_of_a_part(trace, event.storage):
            gathered[event.storage] = _layer(trace, layer_of, event.storage)
        elif kind is Free:
            alive.pop(event.storage, None)
            gathered.pop(event.storage, None)
        elif kind is Op and event.stream == COMPUTE and event.phase is Phase.BACKWARD:
            touched = {s for s in (*event.inputs, *event.outputs) if s >= 0 and _is_working(trace, s)}
            alive |= {s: trace.storages[s].nbytes for s in touched if trace.storages[s].phase is Phase.BACKWARD}
            layer = layer_of[event.module] if event.module >= 0 else NO_LAYER
            if layer != NO_LAYER and (layer in gathered.values() or not beside_parts):
                there = touched | {s for s in alive if last_read.get(s, -1) > i and _layer(trace, layer_of, s) == layer}
                found[layer] = max(found.get(layer, 0), sum(trace.storages[s].nbytes for s in there))
    return found


def _is_working(trace: Trace, storage: int) -> bool:
    """Made by a layer's forward or backward on the model's own stream: no parameter, and none of FSDP's buffers."""
    row = trace.storages[storage]
    return row.label is Label.NONE and row.stream == COMPUTE and row.phase in PHASES


def _is_of_a_part(trace: Trace, storage: int) -> bool:
    """A gathered parameter of a part of a layer that FSDP gathers by itself."""
    row = trace.storages[storage]
    return row.label is Label.UNSHARDED_PARAMETER and row.module >= 0 and is_inner(trace.modules[row.module])


def _layer(trace: Trace, layer_of: Sequence[int], storage: int) -> int:
    module = trace.storages[storage].module
    return layer_of[module] if module >= 0 else NO_LAYER


def _at_once(
    trace: Trace, op: Op, alive: Mapping[int, tuple[float, str]], layer_of: Sequence[int], inputs: Mapping[int, int]
) -> Items:
    """What is there while an operator outside of the layers runs, without what layers keep."""
    found: Items = Counter()
    touched = {storage for storage in (*op.inputs, *op.outputs) if storage >= 0}
    for storage in touched:
        row = trace.storages[storage]
        if row.stream == COMPUTE and row.label is Label.NONE and storage not in inputs:
            found[row.nbytes, math.inf, ""] += 1
    for storage, (ms, name) in alive.items():
        if storage not in touched and storage not in inputs and layer_of[trace.storages[storage].module] == NO_LAYER:
            found[trace.storages[storage].nbytes, round(ms, 6), name] += 1
    return found


def _total(kept: Items) -> int:
    return sum(size * n for (size, _, _), n in kept.items())


def _layer_inputs(trace: Trace, layer_of: Sequence[int]) -> dict[int, int]:
    """The storages that layers (members of ``layers``) read first of those that were there before their forwards, and who."""
    layers = layer_modules(trace, layer_of)
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


def layer_modules(trace: Trace, layer_of: Sequence[int]) -> set[int]:
    """The modules that are members of ``layers``."""
    return {i for i, name in enumerate(trace.modules) if layer_of[i] != NO_LAYER and name.count(".") == 1}


def _is_activation(trace: Trace, storage: int) -> bool:
    """Made by the model's own forward, its own collectives included: neither gathered parameters nor FSDP's buffers."""
    row = trace.storages[storage]
    own = row.label is Label.NONE or (row.label is Label.COMMUNICATION and row.op.startswith(_MODELS_OWN))
    return own and row.phase is Phase.FORWARD and row.stream == COMPUTE

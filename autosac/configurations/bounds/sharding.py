"""How FSDP handles a layer's parameters and gradients, read from a captured step: what bounds may count on.

PyTorch's FSDP gathers a group's parameters into a message on a stream of its own, copies them into the parameters, and puts
gradients into a message that it reduces into shards on another stream. A block of the caching allocator belongs to the stream
that it was allocated on, and a device that never runs out gives none back: what the streams hold at most adds up in the
reserved memory, whenever that is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autosac.plans.layers import layer_number
from autosac.simulation import Simulation
from autosac.trace import Alloc, Collective, Free, Label, Op, Phase, Trace

COPIES = ("fsdp.", "aten.split_with_sizes_copy")
_TO_MESSAGE = "chunk_cat"
_COMPUTE = 0  # the stream that models run on
_MOST_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """`gathers_at_once`: gathered messages that are there together, on a stream of their own (0 to 2); `inner_at_once`: those
    of parts of layers alone (experts), where every layer has one. `gradients_apart`: reduced gradients are on a stream of
    their own. `scatter_waits`: as a layer's backward ends, the message of the group before it is still there, beside the
    layer's gathered parameters and gradients. `gather_ns`, `scatter_ns`: nanoseconds to copy a byte of a layer's message, to
    the parameters and from the gradients. `gathered_bytes`: of a layer's message. These are 0 where they are not known, and
    where parts of layers have messages of their own (experts).
    """

    gathers_at_once: int = 0
    inner_at_once: int = 0
    gradients_apart: bool = False
    scatter_waits: bool = False
    gather_ns: float = 0.0
    scatter_ns: float = 0.0
    gathered_bytes: float = 0.0


NOTHING_KNOWN = Sharding()


def sharding_of(simulation: Simulation, layers: Collection[int]) -> Sharding:
    """Of a step in which FSDP shards all layers. `layers`: the modules that are layers, by their position in the trace."""
    trace = simulation.trace
    gathers, scatters = _transfers(trace, "all_gather"), _transfers(trace, "reduce_scatter")
    forward = [event for event in gathers if event.module in layers and event.phase is Phase.FORWARD]
    backward = [event for event in scatters if event.module in layers]
    if not forward or not backward:
        return NOTHING_KNOWN
    inner = any(map(is_inner, trace.info.fsdp_units))
    event_ms = simulation.pricing.event_ms.tolist()
    gathered, scattered = _bytes_by_layer(forward), _bytes_by_layer(backward)
    return Sharding(
        gathers_at_once=_at_once(trace, gathers),
        inner_at_once=_inner_at_once(trace, gathers),
        gradients_apart=all(trace.storages[s].stream != _COMPUTE for event in scatters for s in event.outputs),
        scatter_waits=_scatter_waits(trace, layers, scatters),
        gather_ns=0.0 if inner else _least_ns(_copies_ms(trace, event_ms, Phase.FORWARD), gathered),
        scatter_ns=0.0 if inner else _least_ns(_copies_ms(trace, event_ms, Phase.BACKWARD), scattered),
        gathered_bytes=0.0 if inner else min(gathered.values()),
    )


def _bytes_by_layer(events: Sequence[Collective]) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for event in events:
        found[event.module] += event.nbytes
    return found


def _least_ns(ms: Mapping[int, float], nbytes: Mapping[int, int]) -> float:
    """Nanoseconds a byte, of the layer that takes least: a larger message is no slower for each byte."""
    return min(1e6 * ms.get(layer, 0.0) / size for layer, size in nbytes.items())


def _transfers(trace: Trace, kind: str) -> list[Collective]:
    """FSDP's own: it issues them on streams of their own."""
    events = (event for event in trace.events if type(event) is Collective)
    return [event for event in events if event.kind == kind and event.stream != _COMPUTE]


def _at_once(trace: Trace, gathers: Sequence[Collective]) -> int:
    """How many gathered messages are there together in the forward, on streams that are not the model's."""
    apart = {s for event in gathers for s in event.outputs if trace.storages[s].stream != _COMPUTE}
    alive, most = 0, 0
    for event in trace.events:
        if type(event) is Alloc and event.storage in apart and trace.storages[event.storage].phase is Phase.FORWARD:
            alive += 1
            most = max(most, alive)
        elif type(event) is Free and event.storage in apart:
            alive = max(0, alive - 1)
    return min(most, _MOST_AT_ONCE)


def is_inner(name: str) -> bool:
    """Of a part of a layer."""
    return name.startswith("layers.") and name.count(".") > 1


def _inner_at_once(trace: Trace, gathers: Sequence[Collective]) -> int:
    """How many messages of parts of layers are there together in the forward, on streams that are not the model's. A message
    is there until its part runs, which is after its layer has begun: two, where those of a layer are there before the layer
    in front of it begins, which then still has its own.
    """
    apart = {s for event in gathers for s in event.outputs if trace.storages[s].stream != _COMPUTE}
    there: dict[int, int] = {}  # messages, by the event that allocates them
    begins: dict[int, int] = {}  # layers, by the first operator of a part of them
    parts: list[tuple[int, int]] = []  # messages and the layers that have them
    for i, event in enumerate(trace.events):
        if type(event) is Alloc and event.storage in apart:
            there[event.storage] = i
        elif type(event) is Op and event.stream == _COMPUTE and event.phase is Phase.FORWARD and event.module >= 0:
            name = trace.modules[event.module]
            # FSDP's own work for a layer is that of no part of it
            layer = layer_number(name) if is_inner(name) else None
            if layer is None:
                continue
            if not trace.signatures[event.signature].name.startswith(COPIES):
                begins.setdefault(layer, i)
            else:
                parts += [(storage, layer) for storage in event.inputs if storage in there]
    ahead = [there[storage] < begins[layer - 1] for storage, layer in parts if layer - 1 in begins]
    return _MOST_AT_ONCE if ahead and all(ahead) else min(1, len(parts))


def _scatter_waits(trace: Trace, layers: Collection[int], scatters: Sequence[Collective]) -> bool:
    """Whether the message of the group before is there, with all that a layer gathered and its gradients, as its backward
    ends: until the first of the parameters is freed.
    """
    messages = {s for event in scatters for s in event.inputs}
    alive: set[int] = set()
    for event in trace.events:
        if type(event) is Alloc and event.storage in messages:
            alive.add(event.storage)
        elif type(event) is Free:
            alive.discard(event.storage)
            row = trace.storages[event.storage]
            if row.label is Label.UNSHARDED_PARAMETER and row.phase is Phase.BACKWARD and row.module in layers:
                return bool(alive)
    return False


def _copies_ms(trace: Trace, event_ms: Sequence[float], phase: Phase) -> dict[int, float]:
    """What copies take, by module: in the forward from messages to parameters, in the backward from gradients to messages."""
    found: dict[int, float] = defaultdict(float)
    for event, ms in zip(trace.events, event_ms, strict=True):
        if type(event) is Op and event.stream == _COMPUTE and event.phase is phase:
            name = trace.signatures[event.signature].name
            if name.startswith(COPIES) and (_TO_MESSAGE in name) == (phase is Phase.BACKWARD):
                found[event.module] += ms
    return found

"""The chain of a captured step: what its compute stream does one after the other, by layers.

Counted are operators of the compute stream, which run one after the other, and collectives that were issued from it and that
it waits for before its next operator (tensor and context parallelism). FSDP's own copies are left out: their shapes depend on
the shards. Neither host nor interference shortens a chain, so the sum is a lower bound of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autosac.configurations.bounds.sharding import COPIES
from autosac.plans.layers import layer_number
from autosac.trace import Collective, Op, Phase, Trace, WorkWait

COMPUTE = 0  # the stream that models run on
NO_LAYER = -1
PHASES = (Phase.FORWARD, Phase.BACKWARD)
_SHARDS_OWN = (*COPIES, "c10d.", "_c10d_functional.")


def layer_of_name(name: str) -> int:
    """The layer of a module or parameter; NO_LAYER if it belongs to none."""
    number = layer_number(name)
    return NO_LAYER if number is None else number


class ChainTimes(NamedTuple):
    """Milliseconds by phase: before the layers, of each layer, behind the layers."""

    first: dict[Phase, float]
    layers: dict[Phase, dict[int, float]]
    last: dict[Phase, float]


class Member(NamedTuple):
    """A member of the chain: an operator, or a transfer that the next one waits for. `event`: its position in the trace."""

    event: int
    phase: Phase
    module: int
    ms: float
    transfer: bool


def chain_of(trace: Trace, event_ms: Sequence[float]) -> list[Member]:
    """All members of the chain, in their order. See the module."""
    found: list[Member] = []
    issued: dict[int, Member] = {}  # collectives since the last operator, by their work
    event: Any
    for i, (event, ms) in enumerate(zip(trace.events, event_ms, strict=True)):
        kind = type(event)
        if kind is Op and event.stream == COMPUTE and ms:
            issued.clear()
            if event.phase in PHASES and not trace.signatures[event.signature].name.startswith(_SHARDS_OWN):
                found.append(Member(i, event.phase, event.module, ms, transfer=False))
        elif kind is Collective and event.stream == COMPUTE and event.phase in PHASES:
            if event.asynchronous:
                issued[event.work] = Member(i, event.phase, event.module, ms, transfer=True)
            else:
                found.append(Member(i, event.phase, event.module, ms, transfer=True))
        elif kind is WorkWait and event.stream == COMPUTE and event.work in issued:
            # Of several in flight at once only the longest counts: they may run side by side.
            longest = issued.pop(event.work)
            overlapping = max((other.ms for other in issued.values()), default=0.0)
            found.append(longest._replace(ms=max(0.0, longest.ms - overlapping)))
    return found


class Sums(NamedTuple):
    """Milliseconds, forward and backward: before the layers, of each layer, behind the layers."""

    first: float
    layers: dict[int, float]
    last: float


def sums(members: Sequence[Member], layer_of: Sequence[int], counts: Callable[[Member], bool]) -> Sums:
    """Of those members of the chain that count."""
    found = parts([member if counts(member) else member._replace(ms=0.0) for member in members], layer_of)
    layers: Counter[int] = Counter()
    for of_phase in found.layers.values():
        layers.update(of_phase)
    return Sums(sum(found.first.values()), dict(layers), sum(found.last.values()))


def parts(chain: Sequence[Member], layer_of: Sequence[int]) -> ChainTimes:
    """The chain's members by where they stand. What stands between layers and belongs to none counts nothing."""
    found = ChainTimes(dict.fromkeys(PHASES, 0.0), {phase: {} for phase in PHASES}, dict.fromkeys(PHASES, 0.0))
    for phase in PHASES:
        members = [
            (layer_of[member.module] if member.module >= 0 else NO_LAYER, member.ms)
            for member in chain
            if member.phase is phase
        ]
        inside = [i for i, (layer, _) in enumerate(members) if layer != NO_LAYER]
        begin, end = (inside[0], inside[-1]) if inside else (len(members), len(members))
        early, late = (found.first, found.last) if phase is Phase.FORWARD else (found.last, found.first)
        for i, (layer, ms) in enumerate(members):
            if layer != NO_LAYER:
                found.layers[phase][layer] = found.layers[phase].get(layer, 0.0) + ms
            elif i < begin:
                early[phase] += ms
            elif i > end:
                late[phase] += ms
    return found

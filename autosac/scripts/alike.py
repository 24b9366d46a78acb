"""Which ranks of a script do the same, but for who they are.

The work on the device is compared: operators with their shapes, collectives, the life of every storage, and which stream waits
for which. Which rank a message goes to, where in a buffer a rank's part is, and numbers to compute with do not count, nor does
the order of operators that each change one tensor in place: DDP zeroes unused gradients in the order of their addresses. What
only the host does is compared by itself: waits for the device (`loss.item()` of the rank that logs), and events that are
recorded for such waits. Memory does not depend on it, and it can only make a step longer. So where two ranks do the same on
the device, the one that does everything on its host that the other does, and maybe more, stands for both: the other one is
never behind it.

Ranks that do not the same may still train alike (`train_alike`): one of them has read more, or has evaluated before its step.
They share a plan, but each has memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from autosac.capture.record.log import in_order
from autosac.trace import Collective, Event, EventRecord, EventWait, HostWait, Label, Op, Phase, Signature, Trace

# Types of PyTorch's schemas; a number may stand for a tensor.
_OPERANDS = ("number", "Optional[number]", "List[number]", "float", "Tensor")
_TRAINED = (Label.PARAMETER, Label.BUFFER, Label.GRADIENT, Label.OPTIMIZER_STATE)
_PLACES = ("rank", "start", "end", "index", "storage_offset")  # arguments of operators; shapes say how much it is


@dataclass(frozen=True, slots=True)
class _Behaviour:
    """What is compared. `device`: equal where ranks do the same; `host`: what only the host does, each with its place."""

    device: tuple[Any, ...]
    host: Counter[Hashable]


def stands_for(one: Trace, other: Trace) -> bool:
    """Whether `one` does the same as `other`, and maybe more that only its host does."""
    kinds: dict[Signature, int] = {}
    mine, theirs = _behaviour(one, kinds), _behaviour(other, kinds)
    return mine.device == theirs.device and theirs.host <= mine.host


def train_alike(one: Trace, other: Trace) -> bool:
    """Whether two ranks' training is the same, whatever else they do: what the parameters, buffers, gradients and states of
    the optimizer depend on after the step, and what is communicated.

    What a rank only reads or prints does not count (a loss, a norm, an evaluation), nor does what it did before the step. Both
    may change how much memory it needs.
    """
    kinds: dict[Signature, int] = {}
    work = _work(one, kinds)
    return bool(work) and one.info.parameter_shapes == other.info.parameter_shapes and work == _work(other, kinds)


def has_shorter_parts(one: Trace, other: Trace) -> bool:
    """Whether `other` does the same as `one`, but that tensors outside of the forward and the backward are shorter in their
    first dimension, and not empty.

    A parameter is cut into equal parts, of which only the last may be shorter: then the ranks between are like the first.
    """
    mine, theirs = list(_shapes(one)), list(_shapes(other))
    if len(mine) != len(theirs) or mine == theirs:
        return False
    return all(
        a == b or (a[0] == b[0] and not a[0][1] and _are_shorter(a[1], b[1])) for a, b in zip(mine, theirs, strict=True)
    )


def _shapes(trace: Trace) -> Iterator[tuple[tuple[str, bool], tuple[tuple[int, ...], ...]]]:
    """Of what each operator reads, with its name, and whether it computes with the batch."""
    for event in trace.events:
        if type(event) is Op or type(event) is Collective:
            signature = trace.signatures[event.signature]
            if not signature.is_view:
                computes = event.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
                yield (signature.name, computes), tuple(meta.shape for meta in signature.inputs)


def _are_shorter(mine: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> bool:
    return len(mine) == len(theirs) and all(
        a == b or (len(a) == len(b) > 0 and 0 < b[0] < a[0] and a[1:] == b[1:])
        for a, b in zip(mine, theirs, strict=True)
    )


def operators(events: Sequence[Event], signatures: Sequence[Signature], kinds: dict[Signature, int]) -> Counter[int]:
    """How often there is each kind of operator, whatever numbers it computes with: an optimizer's change with each step."""
    found: Counter[int] = Counter()
    for signature, count in Counter(event.signature for event in events if type(event) is Op).items():
        found[kinds.setdefault(_placeless(signatures[signature]), len(kinds))] += count
    return found


def planned_ranks(traces: Sequence[Trace]) -> tuple[int, ...]:
    """Positions of the ranks that need a plan of their own, in order: for the others one of these stands.

    Those that send to single ranks keep their own, as how long they wait depends on where they are among the stages; and those
    whose modules have other names, as plans name modules.
    """
    kept: list[int] = []
    for position, trace in enumerate(traces):
        if any(_shares_plan(traces[other], trace) for other in kept):
            continue
        kept = [other for other in kept if not _shares_plan(trace, traces[other])]
        kept.append(position)
    return tuple(kept)


def _shares_plan(one: Trace, other: Trace) -> bool:
    if one.modules != other.modules or one.info.compiled != other.info.compiled:
        return False
    return not _sends(one) and stands_for(one, other)


def _sends(trace: Trace) -> bool:
    return any(type(event) is Collective and event.peer >= 0 for event in trace.events)


def _behaviour(trace: Trace, kinds: dict[Signature, int]) -> _Behaviour:
    """Of a rank. `kinds` numbers the operators of both traces, without what says where in a buffer a rank's part is."""
    kind = _kinds(trace, kinds)
    awaited = {event.event for event in trace.events if type(event) is EventWait}
    numbers: dict[int, int] = {}  # of events that streams wait for, in the order in which they are met

    def comparable(events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            if type(event) is Collective:
                yield event._replace(peer=0, signature=kind[event.signature])
            elif type(event) is Op:
                yield event._replace(signature=kind[event.signature])
            elif type(event) is EventRecord or type(event) is EventWait:
                if event.event in awaited:
                    yield event._replace(event=numbers.setdefault(event.event, len(numbers)))
            elif type(event) is not HostWait:
                yield event

    device = trace.storages, _groups(trace), _settled(comparable(trace.prologue)), _settled(comparable(trace.events))
    return _Behaviour(device, _of_host(trace.events, awaited))


def _settled(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, runs that may have any order in one that does not depend on the rank."""
    found: list[Event] = []
    for are_in_place, run in groupby(in_order(events), _is_in_place):
        together = list(run)
        found += sorted(together, key=_place_of) if are_in_place and len(together) > 1 else together
    return tuple(found)


def _is_in_place(event: Event) -> bool:
    """Whether it changes one storage, and reads nothing else."""
    return type(event) is Op and len(event.inputs) == 1 and event.inputs == event.outputs


def _place_of(event: Event) -> tuple[int, ...]:
    assert type(event) is Op
    return event.signature, event.stream, event.module, event.phase.value, event.source, *event.inputs


def _of_host(events: Sequence[Event], awaited: set[int]) -> Counter[Hashable]:
    """What only the host does, and after how many other events; of a wait for an event also what that one stands for."""
    found: Counter[Hashable] = Counter()
    recorded: dict[int, Hashable] = {}
    place = 0
    for event in events:
        if type(event) is EventRecord:
            recorded[event.event] = place, event.stream
        if type(event) is HostWait:
            found[place, event._replace(event=-1), recorded.get(event.event)] += 1
        elif type(event) is EventRecord and event.event not in awaited:
            found[place, event._replace(event=-1), None] += 1
        else:
            place += 1
    return found


def _work(trace: Trace, kinds: dict[Signature, int]) -> list[Any]:
    """What is compared of the training: operators and transfers, with their memory by its size and first use."""
    kind, groups = _kinds(trace, kinds), _groups(trace)
    storages: dict[int, tuple[int, int]] = {}
    works: dict[int, int] = {}

    def numbered(used: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (-1, 0) if s < 0 else storages.setdefault(s, (len(storages), trace.storages[s].nbytes)) for s in used
        )

    found: list[Any] = []
    for event in _needed(trace):
        module = trace.modules[event.module] if event.module >= 0 else None
        place = module, event.stream, kind[event.signature]
        memory = numbered(event.inputs), numbered(event.outputs)
        if type(event) is Op:
            found.append((place, memory))
            continue
        assert type(event) is Collective
        work = works.setdefault(event.work, len(works)) if event.work >= 0 else -1
        transfer = event.kind, event.nbytes, groups[event.group], event.asynchronous, work, event.batch < 0
        found.append((place, memory, transfer))
    return found


def _needed(trace: Trace) -> list[Op | Collective]:
    """The events that what is trained, or another rank, depends on, in their order: from the step's end to its begin."""
    needed = {i for i, storage in enumerate(trace.storages) if storage.label in _TRAINED}
    found: list[Op | Collective] = []
    for event in reversed(trace.events):
        if type(event) is not Op and type(event) is not Collective:
            continue
        signature = trace.signatures[event.signature]
        if signature.is_view and type(event) is Op:
            continue  # memory is told apart, not tensors
        written = {*event.outputs, *(event.inputs[i] for i in signature.mutates)}
        if type(event) is Collective or not needed.isdisjoint(written):
            needed.update(s for s in event.inputs if s >= 0)
            found.append(event)
    return found[::-1]


def _groups(trace: Trace) -> tuple[Hashable, ...]:
    """The process groups, by the distances of their ranks."""
    return tuple(
        tuple(rank - group.explicit[0] for rank in group.explicit) if group.explicit else group.dims
        for group in trace.groups
    )


def _kinds(trace: Trace, kinds: dict[Signature, int]) -> list[int]:
    """The number of each signature, whatever a rank's place or its numbers are."""
    return [kinds.setdefault(_placeless(signature), len(kinds)) for signature in trace.signatures]


def _placeless(signature: Signature) -> Signature:
    if not signature.arguments:
        return signature
    operands = _operands(signature.name)
    kept = tuple(a for a in signature.arguments if a[0] not in _PLACES and a[0] not in operands)
    return signature if len(kept) == len(signature.arguments) else signature._replace(arguments=kept)


@cache
def _operands(name: str) -> frozenset[str]:
    """The arguments of an operator that are numbers to compute with (where a rank's part of a vocabulary begins): its work
    is the same whatever they are. Those that say what it does (a dimension, a stride) are integers or flags to PyTorch.
    """
    import torch  # commands that compare nothing do without

    space, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    try:
        schema = torch._C._get_schema(f"{space}::{operator}", "" if overload == "default" else overload)
    except RuntimeError:  # an operator of the script's own
        return frozenset()
    return frozenset(argument.name for argument in schema.arguments if str(argument.type) in _OPERANDS)

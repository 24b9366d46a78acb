"""Which ranks of a script do the same: all of it, or all that their training depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autosac.capture.record.log import in_order
from autosac.trace import Collective, Event, Label, Op, Signature, Trace

_PLACES = ("rank", "start", "end", "storage_offset")  # arguments of operators; shapes say how much it is
_TRAINED = (Label.PARAMETER, Label.BUFFER, Label.GRADIENT, Label.OPTIMIZER_STATE)


def alike(one: Trace, other: Trace) -> bool:
    """Whether two ranks do the same, but for who they are."""
    kinds: dict[Hashable, int] = {}
    return _behaviour(one, kinds) == _behaviour(other, kinds)


def train_alike(one: Trace, other: Trace) -> bool:
    """Whether two ranks' training is the same, whatever else they do: what the parameters, buffers, gradients and states of
    the optimizer depend on after the step, and what is communicated.

    What a rank only reads or prints does not count (a loss, a norm, an evaluation), nor does what it did before the step. Both
    may change how much memory it needs.
    """
    kinds: dict[Hashable, int] = {}
    work = _work(one, kinds)
    return bool(work) and one.info.parameter_shapes == other.info.parameter_shapes and work == _work(other, kinds)


def _behaviour(trace: Trace, kinds: dict[Hashable, int]) -> tuple[Any, ...]:
    """What is compared of all. `kinds` numbers the operators of both traces."""
    kind = _kinds(trace, kinds)

    def comparable(event: Event) -> Event:
        if type(event) is Collective:
            return event._replace(peer=0, signature=kind[event.signature])
        return event._replace(signature=kind[event.signature]) if type(event) is Op else event

    return trace.storages, _groups(trace), in_order(trace.prologue), in_order(map(comparable, trace.events))


def _work(trace: Trace, kinds: dict[Hashable, int]) -> list[Any]:
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


def _kinds(trace: Trace, kinds: dict[Hashable, int]) -> list[int]:
    """The number of each signature, without what says where in a buffer a rank's part is."""
    return [kinds.setdefault(_placeless(signature), len(kinds)) for signature in trace.signatures]


def _placeless(signature: Signature) -> Signature:
    kept = tuple(argument for argument in signature.arguments if argument[0] not in _PLACES)
    return signature if len(kept) == len(signature.arguments) else signature._replace(arguments=kept)

"""Where ranks meet: collects the members of every transfer while the ranks are linked one after the other.

Collectives meet by (group, how many the rank has issued on it before), a send meets the recv of the same pair by their
numbers in the same way: Maya's waitmaps. Ranks that are not simulated are never waited for.

A send by itself (not of a batch) waits for its recv, as NCCL allows, or, if its message fits what the buffers of the pair have
left, does not (`_buffered`)::

    send k of a pair    takes its time alone, after the recv of the last earlier message that does not fit beside it
    recv k              begins when send k has begun, and takes as long
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autosac.errors import SimulationError
from autosac.runtime_sim.buffers import SLOTS, Buffers
from autosac.runtime_sim.overlap import OverlapModel
from autosac.runtime_sim.program import LANES, WHOLE_ADAPTER, WHOLE_PORT, Leg, LinkUse, Program, Transfer
from autosac.trace import IN_TURN, Collective, Group, Trace

Key = tuple[object, ...]


class _Member(NamedTuple):
    """What one rank brings to a transfer."""

    item: int
    ms: float
    kind: str
    use: LinkUse


class _Pending(NamedTuple):
    """A transfer that is being collected. `slots`: (item, position in its legs)."""

    expected: tuple[int, ...]
    label: str
    inter_node: bool
    members: dict[int, _Member]
    slots: list[tuple[int, int]]
    lone_slots: int  # what the message of a send that is no part of a batch takes of the buffers, else 0


class _Communicator(NamedTuple):
    """A process group: an identity that its ranks agree on, its simulated ranks, and whether it leaves the node."""

    key: Key
    simulated: tuple[int, ...]
    inter_node: bool


class Rendezvous:
    """The meetings of all simulated ranks (given by their positions in `program.ranks`).

    `buffers`: sends by themselves do not wait for their recvs while these hold the messages of the pair. None: all wait.
    """

    def __init__(
        self, program: Program, gpus_per_node: int, overlap: OverlapModel, buffers: Buffers | None = None
    ) -> None:
        self._program = program
        self._buffers = buffers
        self._position = {rank: i for i, rank in enumerate(program.ranks)}
        self._gpus_per_node = gpus_per_node
        self._overlap = overlap
        self._pending: dict[Key, _Pending] = {}
        self._issued: dict[tuple[int, Key], int] = {}
        self._communicators: dict[tuple[int, int], _Communicator] = {}
        self._local = itertools.count()

    def join(self, rank: int, trace: Trace, index: int, item: int, ms: float, use: LinkUse | None = None) -> None:
        """`rank` brings `item` to the transfer of the collective at `index` in its trace. `use`: of its links, if that is
        known.
        """
        event = trace.events[index]
        assert type(event) is Collective
        key, expected, inter_node, label = self._meeting(rank, trace, event)
        number = self._issued[rank, key] = self._issued.get((rank, key), -1) + 1
        key = (*key, number) if len(expected) > 1 else ("local", next(self._local))
        label = f"{event.kind} number {number} of {label}"
        lone_slots = self._slots(trace, event, inter_node) if len(expected) > 1 else 0
        pending = self._pending.setdefault(key, _Pending(expected, label, inter_node, {}, [], lone_slots))
        self._check(pending, rank, event.kind)
        legs = self._program.legs.setdefault(item, [])
        if use is None:
            use = WHOLE_ADAPTER if inter_node else WHOLE_PORT
        pending.members[rank] = _Member(item, ms, event.kind, use)
        pending.slots.append((item, len(legs)))
        legs.append(Leg(index, -1))

    def finish(self) -> None:
        """Turn what was collected into the program's transfers."""
        messages: dict[Key, list[_Pending]] = {}
        for key, pending in self._pending.items():
            if 0 < pending.lone_slots <= SLOTS and len(pending.members) == len(pending.expected):
                self._buffered(pending, messages.setdefault(key[:-1], []))
            else:
                self._add(self._transfer(pending), pending.slots)

    def _add(self, transfer: Transfer, slots: Sequence[tuple[int, int]]) -> None:
        for item, slot in slots:
            legs = self._program.legs[item]
            legs[slot] = legs[slot]._replace(transfer=len(self._program.transfers))
        self._program.transfers.append(transfer)

    def _slots(self, trace: Trace, event: Collective, inter_node: bool) -> int:
        """What a message that is no part of a batch takes of NCCL's buffers; 0 if it cannot be there."""
        if self._buffers is None or event.kind not in ("send", "recv") or event.batch >= 0:
            return 0
        ranks = 2
        if event.batch == IN_TURN:  # the communicator is the group's, not one of the pair
            group = trace.groups[event.group]
            ranks, inter_node = group.size, _spans_nodes(group, self._gpus_per_node)
        return self._buffers.slots(event.nbytes, ranks, inter_node=inter_node)

    def _buffered(self, pending: _Pending, before: list[_Pending]) -> None:
        """A send and its recv as two transfers. `before`: earlier messages of the pair, which this one joins."""
        whole = self._transfer(pending)
        send, recv = sorted(pending.members.values(), key=lambda member: member.kind == "recv")
        left = SLOTS - pending.lone_slots
        for other in reversed(before):
            left -= other.lone_slots
            if left < 0:
                received = next(m.item for m in other.members.values() if m.kind == "recv")
                self._program.dependencies[send.item] += (received,)
                break
        before.append(pending)
        slots = dict(pending.slots)
        sender, receiver = (next(r for r, m in pending.members.items() if m is member) for member in (send, recv))
        self._add(whole._replace(members=(send.item,), ranks=(sender,)), [(send.item, slots[send.item])])
        taken = whole._replace(members=(recv.item,), ranks=(receiver,), uses={}, after_start=send.item)
        self._add(taken, [(recv.item, slots[recv.item])])

    def _meeting(self, rank: int, trace: Trace, event: Collective) -> tuple[Key, tuple[int, ...], bool, str]:
        """Identity (but for its number), expected ranks, whether bytes leave the node, and name of a transfer."""
        group = trace.groups[event.group]
        communicator = self._communicator(rank, event.group, group)
        if event.peer < 0:
            return communicator.key, communicator.simulated, communicator.inter_node, f"group {group.name!r}"
        me, peer = self._program.ranks[rank], event.peer
        sender, receiver = (me, peer) if event.kind == "send" else (peer, me)
        there = self._position.get(peer, rank)
        return (
            (*communicator.key, sender, receiver),
            (rank,) if there == rank else (rank, there),
            me // self._gpus_per_node != peer // self._gpus_per_node,
            f"group {group.name!r}, rank {sender} to rank {receiver}",
        )

    def _communicator(self, rank: int, number: int, group: Group) -> _Communicator:
        if (rank, number) not in self._communicators:
            self._communicators[rank, number] = _Communicator(
                (group.name, *identity(group)),
                tuple(i for other, i in self._position.items() if contains(group, other)),
                _spans_nodes(group, self._gpus_per_node),
            )
        return self._communicators[rank, number]

    def _check(self, pending: _Pending, rank: int, kind: str) -> None:
        for other, member in pending.members.items():
            if kind != member.kind and {kind, member.kind} != {"send", "recv"}:
                ranks = self._program.ranks
                raise SimulationError(
                    f"{pending.label}: rank {ranks[rank]} issues {kind} where rank {ranks[other]} issues {member.kind}"
                )

    def _transfer(self, pending: _Pending) -> Transfer:
        members = pending.members.values()
        uses, limit = uses_of((rank, member.kind, member.use) for rank, member in pending.members.items())
        slowdowns = [self._overlap.communication_slowdown(m.kind, pending.inter_node) for m in members]
        return Transfer(
            members=tuple(member.item for member in members),
            ms=max(member.ms for member in members),
            uses=uses,
            limit=limit,
            ranks=tuple(pending.members),
            slowdown=max(slowdowns),
            inter_node=pending.inter_node,
            label=pending.label,
            missing=tuple(rank for rank in pending.expected if rank not in pending.members),
        )


def uses_of(members: Iterable[tuple[int, str, LinkUse]]) -> tuple[dict[int, float], float]:
    """What a transfer takes of each lane at a rate of 1, and the rate that it has alone. `members`: each one's rank (by
    position), what it does and its links. Who sends uses only the way out, who receives only the way in.
    """
    found = list(members)
    limit = min(use.rate for _, _, use in found)
    uses: dict[int, float] = {}
    for rank, kind, use in found:
        directions = [0] * (kind != "recv") + [1] * (kind != "send")
        for i, share in enumerate((use.port, use.adapter, use.uplink)):
            uses.update({rank * LANES + 2 * i + way: share / limit for way in directions if share > 0})
    return uses, limit


def identity(group: Group) -> Key:
    """Equal for groups of the same ranks, without a list of them where the group has a structure."""
    structure = _structure(group)
    if structure is None:
        ranks = sorted(set(group.ranks()))
        structure = _structure(Group.of(group.name, ranks))
        return (frozenset(ranks),) if structure is None else structure
    return structure


def contains(group: Group, rank: int) -> bool:
    """Whether a rank is a member, from the structure wherever there is one."""
    structure = _structure(group)
    if structure is None:
        return rank in group.ranks()
    lowest, dims = structure
    rest = rank - lowest
    for size, stride in reversed(dims):
        rest -= max(0, min(rest // stride, size - 1)) * stride
    return rest == 0


def _structure(group: Group) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """(lowest rank, dimensions by ascending stride), the same for all ways to write a group.

    None if a dimension does not step over all that the faster ones reach: a rank could then have several coordinates.
    """
    if group.explicit:
        return None
    lowest = group.offset + sum((size - 1) * stride for size, stride in group.dims if stride < 0)
    dims: list[tuple[int, int]] = []
    reach = 0
    for stride, size in sorted((abs(stride), size) for size, stride in group.dims if size > 1):
        if stride <= reach:
            return None
        reach += (size - 1) * stride
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride))
    return lowest, tuple(dims)


def _spans_nodes(group: Group, gpus_per_node: int) -> bool:
    """Whether the group has ranks on more than one node, from its structure alone."""
    first = last = group.offset
    for size, stride in group.dims:
        first, last = first + min(0, (size - 1) * stride), last + max(0, (size - 1) * stride)
    if group.explicit:
        first, last = min(group.explicit), max(group.explicit)
    return first // gpus_per_node != last // gpus_per_node

"""Which operators of a checkpointed module must be decided together, and which leave no choice.

A kept operator is not run again: its recomputation returns the tensors that the forward made, as they are by then. The rules
(`operator_groups`) follow from this; operators are positions in `Region.calls`:

1. Views launch nothing. They are always recomputed.
2. Calls that must be saved (copies to the host, routers) are always kept. So are random ones, unless each draws again what it
   drew (`redraws`: units of eager models note the generator's state for each), or the state is restored once for all of them
   (`store_random=False`). Then they are all kept or all recomputed: the first one that is not run again shifts what the next
   one draws.
3. A call that writes to a storage made by an earlier call of the module forms a group with that call and with every other
   writer. A kept group returns the final value. So if a call outside of the group that may run again reads the storage before
   the last write, or something writes to it after the module's forward, the group is always recomputed. What reads a group
   that is always kept, before its last write, is always kept, too (of the chosen experts' scores, which are divided by their
   sum in place, that sum).
4. A call that writes to a storage from outside (running statistics of a batch norm) must happen once: it is always kept. Calls
   that read the storage before that write would read another value when run again: they are always kept, too.
5. A module is refused, with the reason, where the rules contradict each other, or where an input is overwritten after the
   forward, so that recomputation would start from another value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autosac.trace import Call


class OperatorGroup(NamedTuple):
    """Operators decided as one; `forced`: True always kept, False always recomputed, None free."""

    members: tuple[int, ...]
    forced: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """All operators of a module by group, in the order of their first members.

    `inplace_parent`: for members of an in-place group, the operator that made the storage. `refusal` says why
    the module cannot be checkpointed, if so.
    """

    groups: tuple[OperatorGroup, ...]
    inplace_parent: tuple[int | None, ...]
    refusal: str | None


def operator_groups(
    calls: Sequence[Call],
    *,
    written_later: Collection[int] = (),
    store_random: bool = True,
    redraws: bool = False,
) -> Grouping:
    """Apply the rules. `written_later`: storages that something writes to between forward and backward. `redraws`: a random
    call that runs again draws what it drew, whichever others do.
    """
    creator = {storage: i for i, call in enumerate(calls) for storage in call.created}
    inner, outer = _writes(calls, creator)
    merged = _Partition(len(calls))
    for storage, writers in inner.items():
        for i in writers:
            merged.join(creator[storage], i)
    randoms = [i for i, call in enumerate(calls) if call.is_random and not redraws]
    if not store_random:
        for i in randoms[1:]:
            merged.join(randoms[0], i)
    readers = _early_readers(calls, creator, inner, merged)
    always = _with_readers(_always_kept(calls, outer), readers, merged)
    kept = always.union(randoms) if store_random else always
    parents: list[int | None] = [None] * len(calls)
    for storage, writers in inner.items():
        for i in (creator[storage], *writers):
            parents[i] = creator[storage]
    views = {merged.find(i) for i, call in enumerate(calls) if call.is_view and not call.created}
    keep = {merged.find(i) for i in kept}
    stale = {merged.find(creator[storage]) for storage in written_later if storage in creator}
    stale |= {merged.find(head) for head, i in readers if merged.find(i) not in keep}
    drop = stale | views
    groups = tuple(
        OperatorGroup(members, True if head in keep else False if head in drop else None)
        for head, members in merged.parts()
    )
    conflict = keep & stale
    if conflict and store_random and not always & _members(merged, conflict):
        return operator_groups(calls, written_later=written_later, store_random=False)
    again = [i for i, call in enumerate(calls) if not call.is_view and merged.find(i) not in keep]
    refusal = _conflict(calls, merged, conflict) or _overwritten(calls, again, set(written_later) - creator.keys())
    return Grouping(groups=groups, inplace_parent=tuple(parents), refusal=refusal)


class _Partition:
    """Disjoint sets of operators; a set's head is its first member."""

    def __init__(self, size: int) -> None:
        self._up = list(range(size))

    def find(self, i: int) -> int:
        while self._up[i] != i:
            i = self._up[i]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.find(a), self.find(b)))
        self._up[b] = a

    def parts(self) -> list[tuple[int, tuple[int, ...]]]:
        parts: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self._up)):
            parts[self.find(i)].append(i)
        return [(head, tuple(members)) for head, members in parts.items()]


def _writes(calls: Sequence[Call], creator: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Writers by storage: of those made by an earlier call of the module, and of those from outside."""
    inner: dict[int, list[int]] = defaultdict(list)
    outer: dict[int, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        for storage in call.writes:
            if creator.get(storage, i) < i:
                inner[storage].append(i)
            elif storage not in creator:
                outer[storage].append(i)
    return inner, outer


def _always_kept(calls: Sequence[Call], outer: dict[int, list[int]]) -> set[int]:
    """Rules 2 (without random calls) and 4."""
    kept = {i for i, call in enumerate(calls) if call.must_save}
    for storage, writers in outer.items():
        kept.update(writers)
        kept.update(i for i, call in enumerate(calls[: writers[-1]]) if storage in call.reads and not call.is_view)
    return kept


def _early_readers(
    calls: Sequence[Call], creator: dict[int, int], inner: dict[int, list[int]], merged: _Partition
) -> list[tuple[int, int]]:
    """In-place groups, by a member, and calls outside of them that read what they write before the last write."""
    return [
        (creator[storage], i)
        for storage, writers in inner.items()
        for i in range(creator[storage] + 1, writers[-1])
        if storage in calls[i].reads and not calls[i].is_view and merged.find(i) != merged.find(creator[storage])
    ]


def _with_readers(kept: set[int], readers: Sequence[tuple[int, int]], merged: _Partition) -> set[int]:
    """What is always kept, if what reads it before it is final is (rule 3)."""
    while True:
        heads = {merged.find(i) for i in kept}
        more = {i for group, i in readers if merged.find(group) in heads} - kept
        if not more:
            return kept
        kept = kept | more


def _members(merged: _Partition, heads: set[int]) -> set[int]:
    return {i for head, members in merged.parts() if head in heads for i in members}


def _conflict(calls: Sequence[Call], merged: _Partition, heads: set[int]) -> str | None:
    for head, members in merged.parts():
        if head in heads:
            names = ", ".join(f"{calls[i].op}[{calls[i].occurrence}]" for i in members)
            return f"{names} must be kept, but the result is overwritten later"
    return None


def _overwritten(calls: Sequence[Call], again: Sequence[int], later: Collection[int]) -> str | None:
    """Rule 5: a call that may run again reads a storage from outside that has changed by then."""
    for call in (calls[i] for i in again):
        if any(storage in later for storage in call.reads):
            return f"an input of {call.op}[{call.occurrence}] is overwritten in place after the module's forward"
    return None

"""Which operators a legal plan decides alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Call(Protocol):
    """What has to be known of an operator: the storages that it read, wrote and returned."""

    reads: set[int]
    writes: set[int]
    made: set[int]


def groups_of(calls: Sequence[Call]) -> list[list[int]]:
    """Positions that a legal plan decides alike: operators on memory until its last change."""
    parent = list(range(len(calls)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    def join(members: list[int]) -> None:
        for member in members[1:]:
            parent[root(member)] = root(members[0])

    known: set[int] = set()
    for i, call in enumerate(calls):
        for storage in call.made - call.reads - known:
            writes = [j for j in range(i + 1, len(calls)) if storage in calls[j].writes]
            if writes:
                join([j for j in range(i, writes[-1] + 1) if storage in calls[j].made | calls[j].reads])
        known |= call.made | call.reads
    groups: dict[int, list[int]] = {}
    for i in range(len(calls)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())

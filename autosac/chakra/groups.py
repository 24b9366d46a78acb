"""The process groups of all ranks of a job, from those of the ranks that were simulated.

Ranks of one pipeline stage do the same in groups of the same shape. TorchTitan numbers ranks in row-major order of its mesh,
so a rank's coordinate along a dimension of `size` and `stride` is ``rank // stride % size``, and its group is that of the
simulated rank, moved so that it contains the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autosac.errors import UsageError
from autosac.trace import Group


def group_of(group: Group, rank: int) -> Group:
    """The group that is to `rank` what `group` is to its own members. UsageError if that is not known."""
    moved = group
    if not group.explicit and all(stride > 0 for _, stride in group.dims):
        own = sum(rank // stride % size * stride for size, stride in group.dims)
        moved = group._replace(offset=rank - own)
    if rank not in moved.ranks():
        raise UsageError(
            f"rank {rank} is not in group {group.name!r} of ranks {', '.join(map(str, group.ranks()[:8]))}: its own group "
            "is not known; give --rank to write the trace of one rank"
        )
    return moved


@dataclass
class GroupNumbers:
    """Numbers of the groups of all ranks, from 1 on; groups of the same ranks and name are the same."""

    numbers: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def number(self, group: Group) -> int:
        """The group's number."""
        return self.numbers.setdefault((group.name, group.ranks()), len(self.numbers) + 1)

    def document(self) -> dict[str, list[int]]:
        """Ranks by number, as ASTRA-sim's configuration of communicators."""
        return {str(number): list(ranks) for (_, ranks), number in self.numbers.items()}

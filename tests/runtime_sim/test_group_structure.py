"""Groups told by their structure: who is a member, and which are the same, against their lists of ranks."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from autosac.runtime_sim.rendezvous import contains, identity
from autosac.trace import Group

DIMS = st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9).filter(bool)), max_size=3)


@given(DIMS, st.integers(0, 5))
@settings(deadline=None, max_examples=300)
@example([(3, 2), (2, 3)], 0)  # not nested: 4 has no coordinates, 3 has
@example([(8, 2048), (2, 1)], 5)
def test_members(dims: list[tuple[int, int]], offset: int) -> None:
    """A group contains exactly the ranks that it lists."""
    group = Group("g", offset, tuple(dims))
    ranks = set(group.ranks())
    assert {rank for rank in range(-60, 70) if contains(group, rank)} == ranks & set(range(-60, 70))


@given(DIMS, DIMS)
@settings(deadline=None, max_examples=300)
@example([(2, 2), (2, 1)], [(4, 1)])
@example([(2, 1), (2, 1)], [(3, 1)])
def test_identity(dims: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Groups are the same if and only if their ranks are, however they are written."""
    groups = [Group("g", 40, tuple(dims)), Group("g", 40, tuple(other)), Group("g", 40, tuple(reversed(dims)))]
    groups.append(Group("g", 0, (), tuple(groups[0].ranks())))
    for group in groups[1:]:
        assert (identity(groups[0]) == identity(group)) == (set(groups[0].ranks()) == set(group.ranks()))


def test_large_groups_are_not_listed() -> None:
    """A group of 2**40 ranks is met without being listed."""
    group = Group("g", 3, ((2**20, 2**30), (2**20, 8)))
    assert contains(group, 3 + 5 * 2**30 + 7 * 8) and not contains(group, 4)
    assert identity(group) == (3, ((2**20, 8), (2**20, 2**30)))

"""Mixes of policies, against every assignment of a policy to every unit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.errors import InfeasibleError
from autosac.solvers.mix import Cost, EqualUnits, best_mix


def test_two_policies_share_a_group() -> None:
    """Four units of 2 or 5 bytes within 14: two of each."""
    choice = best_mix([EqualUnits(4, (Cost(2, 9.0), Cost(5, 1.0)))], 14)
    assert choice == (14, 20.0, (((0, 2), (1, 2)),))


def test_a_second_policy_has_to_be_worth_its_price() -> None:
    """One byte more for one unit saves 1 ms: not worth a policy that costs 2 ms."""
    group = EqualUnits(3, (Cost(2, 5.0), Cost(3, 4.0)))
    assert best_mix([group], 7).mixes == (((0, 2), (1, 1)),)
    assert best_mix([group], 7, policy_ms=2.0).mixes == (((0, 3),),)


def test_of_equals_the_first_is_taken() -> None:
    """With 1 ms for each policy, two units at 5 ms and one each at 9 and 0 ms take 4 bytes and 11 ms: one policy is enough."""
    policies = (Cost(2, 5.0), Cost(0, 9.0), Cost(4, 0.0))
    assert best_mix([EqualUnits(2, policies)], 4, policy_ms=1.0) == (4, 10.0, (((0, 2),),))


def test_what_cannot_be() -> None:
    """The error says what the least takes."""
    with pytest.raises(InfeasibleError, match="takes 10 bytes, the limit is 9"):
        best_mix([EqualUnits(5, (Cost(2, 1.0), Cost(3, 0.0)))], 9)


COSTS = st.lists(st.builds(Cost, st.integers(0, 20), st.integers(0, 50).map(float)), min_size=1, max_size=3)


@given(
    st.lists(st.builds(EqualUnits, st.integers(1, 3), COSTS.map(tuple)), min_size=1, max_size=2), st.integers(0, 100)
)
def test_no_assignment_with_two_policies_a_group_is_faster(groups: list[EqualUnits], limit: int) -> None:
    """As fast as the fastest of all assignments in which no group has more than two policies; infeasible where none is."""
    per_group = [
        [
            assigned
            for assigned in itertools.combinations_with_replacement(range(len(group.policies)), group.units)
            if len(set(assigned)) <= 2
        ]
        for group in groups
    ]
    fastest = min(
        (
            sum(group.policies[p].ms for group, assigned in zip(groups, chosen, strict=True) for p in assigned)
            for chosen in itertools.product(*per_group)
            if sum(g.policies[p].nbytes for g, assigned in zip(groups, chosen, strict=True) for p in assigned) <= limit
        ),
        default=None,
    )
    if fastest is None:
        with pytest.raises(InfeasibleError):
            best_mix(groups, limit)
        return
    found = best_mix(groups, limit)
    assert found.ms == fastest and found.nbytes <= limit
    assert [sum(units for _, units in mix) for mix in found.mixes] == [group.units for group in groups]

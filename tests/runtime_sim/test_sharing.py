"""Links that transfers share: water-filling by hand, its conditions on random networks, transfers that meet in the engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.runtime_sim import LinkUse
from autosac.runtime_sim.sharing import max_min_rates
from autosac.trace import Group


def test_two_flows_over_one_link_share_it() -> None:
    """Each gets half of the link."""
    assert max_min_rates([1.0, 1.0], [{0: 1.0}, {0: 1.0}]) == [0.5, 0.5]


def test_water_filling_of_a_line() -> None:
    """Links of 1 and 2: the long flow and two short ones share the first (1/3 each); what the second has left is the fourth's.

    Units: the second link carries 2, so that one unit of rate takes half of it.
    """
    uses = [{0: 1.0, 1: 0.5}, {0: 1.0}, {0: 1.0}, {1: 0.5}]
    assert max_min_rates([9.0] * 4, uses) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 5 / 3])


def test_a_flow_below_its_share_leaves_the_rest() -> None:
    """A flow that cannot do more than 0.2 leaves 0.4 to each of two others."""
    assert max_min_rates([0.2, 1.0, 1.0], [{0: 1.0}] * 3) == pytest.approx([0.2, 0.4, 0.4])


def test_a_flow_without_links_has_its_limit() -> None:
    """Nothing holds it back."""
    assert max_min_rates([3.0], [{}]) == [3.0]


networks = st.lists(
    st.tuples(
        st.floats(0.01, 10.0),
        st.dictionaries(st.integers(0, 4), st.floats(0.05, 4.0), max_size=4),
    ),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=300)
@given(networks)
def test_rates_are_max_min_fair(network: list[tuple[float, dict[int, float]]]) -> None:
    """No link carries more than it can, and whoever is below its limit has a full link on which nobody is faster."""
    limits, uses = [limit for limit, _ in network], [use for _, use in network]
    rates = max_min_rates(limits, uses)
    load = {link: sum(x * use.get(link, 0.0) for x, use in zip(rates, uses, strict=True)) for link in range(5)}
    assert max(load.values()) <= 1 + 1e-9
    for rate, limit, use in zip(rates, limits, uses, strict=True):
        assert 0 < rate <= limit * (1 + 1e-12)
        if rate < limit * (1 - 1e-9):
            assert any(
                load[link] >= 1 - 1e-9
                and all(other <= rate * (1 + 1e-9) for other, its in zip(rates, uses, strict=True) if link in its)
                for link in use
            )


def test_collectives_that_fit_together_do_not_slow_each_other(job, run) -> None:
    """Two gathers of 4 ms, which take 0.3 and 0.7 of the adapter, run side by side in 4 ms; at 0.5 and 1.0 of 50 GB/s the
    small one (25 GB/s) keeps its half, and the large one takes 6 ms: half of it in 4, the rest alone in 2.
    """
    groups = (Group.of("a", range(0, 16, 8)), Group.of("b", range(0, 32, 16)))

    def ends(small: LinkUse, large: LinkUse) -> list[float]:
        step = job(groups=groups).collective(4, stream=1, group=0).collective(4, stream=2, group=1)
        timeline = run(step, link_use={0: small, 1: large})
        return timeline.ranks[0].end_ms.tolist()[:2]

    assert ends(LinkUse(adapter=0.3, rate=15.0), LinkUse(adapter=0.7, rate=35.0)) == [4, 4]
    assert ends(LinkUse(adapter=0.5, rate=25.0), LinkUse(adapter=1.0, rate=50.0)) == pytest.approx([4, 6])

"""The hull of measured policies, by hand."""

from __future__ import annotations

from autosac.planning.compiled_policies import CompiledPolicy
from autosac.solvers.mix import Cost
from benchmarks.compiled_adversary import hull, on, table

MIB = 2**20


def cost(mib: int, ms: float) -> Cost:
    return Cost(mib * MIB, ms)


def test_the_hull_leaves_out_what_mixes_beat() -> None:
    """At 10 MiB 6 ms are above the chord from (0, 10) to (20, 0), and 30 MiB take longer than 20."""
    corners = hull([cost(20, 0.0), cost(10, 6.0), cost(0, 10.0), cost(30, 1.0)])
    assert corners == [cost(0, 10.0), cost(20, 0.0)]
    assert [on(corners, place * MIB) for place in (0, 10, 20, 40)] == [10.0, 5.0, 0.0, 0.0]


def test_the_table_says_what_others_gain() -> None:
    """A policy by hand, 3 ms below the chord at 10 MiB, in four layers of a 100 ms step; above the chord nothing is gained."""
    names = [CompiledPolicy(name=name, template=None) for name in ("full", "own", "by hand")]
    proposed = {names[0]: cost(0, 10.0), names[1]: cost(20, 0.0)}
    lines = table(proposed, {names[2]: cost(10, 2.0)}, 100.0, 4).splitlines()
    assert lines[1:-1] == ["      0  10.000  full", "     10   2.000 *by hand", "     20   0.000  own"]
    assert lines[-1].startswith("1 sets by hand (*): at most 12.00 ms of 100.0 ms (12.00%) below mixes of the 2")
    assert "at most 0.00 ms" in table(proposed, {names[2]: cost(10, 7.0)}, 100.0, 4)

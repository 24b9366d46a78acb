"""Integer programs that end CBC are solved by SciPy's HiGHS."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pulp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.errors import SimulationError
from autosac.solvers.backend import is_solved, make_backend
from autosac.solvers.highs import solve_by_highs


def knapsack(values: list[int], sizes: list[int], capacity: int) -> pulp.LpProblem:
    """Leave out as little value as possible."""
    model = pulp.LpProblem("knapsack", pulp.LpMinimize)
    out = [pulp.LpVariable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(len(values))]
    model += pulp.lpSum(v * x for v, x in zip(values, out, strict=True))
    model += pulp.lpSum(s - s * x for s, x in zip(sizes, out, strict=True)) <= capacity
    return model


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(-1, 30))
def test_knapsacks(items: list[tuple[int, int]], capacity: int) -> None:
    """The optimum is that of all subsets; a negative capacity has no solution."""
    model = knapsack([v for v, _ in items], [s for _, s in items], capacity)
    solve_by_highs(model)
    best = min(
        (
            sum(v for (v, _), out in zip(items, chosen, strict=True) if out)
            for chosen in product((0, 1), repeat=len(items))
            if sum(s for (_, s), out in zip(items, chosen, strict=True) if not out) <= capacity
        ),
        default=None,
    )
    if best is None:
        assert model.status == pulp.LpStatusInfeasible
    else:
        assert model.sol_status == pulp.LpSolutionOptimal
        assert pulp.value(model.objective) == pytest.approx(best)


def dying(tmp_path: Path, **options: bool) -> pulp.COIN_CMD:
    """A CBC that dies."""
    solver = tmp_path / "solver"
    solver.write_text("#!/bin/sh\nkill -SEGV $$\n")
    solver.chmod(0o755)
    return pulp.COIN_CMD(path=str(solver), msg=False, **options)


def test_a_solver_that_dies(tmp_path: Path) -> None:
    """Of values 3, 5 and 4 and sizes 2, 3 and 2, capacity 4 leaves out 5: another solver finds that."""
    model = knapsack([3, 5, 4], [2, 3, 2], 4)
    assert is_solved(model, dying(tmp_path))
    assert pulp.value(model.objective) == pytest.approx(5)


class Stopping(pulp.LpSolver):  # type: ignore[misc]
    """A solver that stops with half of each item, and calls that a solution, as CBC may at its limit."""

    def actualSolve(self, lp: pulp.LpProblem, **_: object) -> int:  # PuLP's name
        """See the class."""
        lp.assignVarsVals({v.name: 0.5 for v in lp.variables()})
        lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return 1


@pytest.mark.parametrize(("mip", "found"), [(True, False), (False, True)])
def test_fractions_are_no_solution(mip: bool, found: bool) -> None:
    """Of an integer program; of its relaxation they are one."""
    assert is_solved(knapsack([3], [2], 1), Stopping(mip=mip)) is found


def test_linear_programs_have_no_other_solver(tmp_path: Path) -> None:
    """Their duals are asked for, too."""
    with pytest.raises(SimulationError, match="the MILP solver failed"):
        is_solved(knapsack([3], [2], 1), dying(tmp_path, mip=False))


def test_a_model_that_ends_cbc() -> None:
    """Two modules at two peaks: CBC 2.10.3 dies. Both have to be checkpointed, and the second then exceeds its peak."""
    model = pulp.LpProblem("peaks", pulp.LpMinimize)
    copies = (2, 1)
    y = [pulp.LpVariable(f"y{i}", 0, n, pulp.LpInteger) for i, n in enumerate(copies)]
    c = [pulp.LpVariable(f"c{i}", None, 0) for i in range(2)]
    r = [pulp.LpVariable(f"r{i}", 0, n) for i, n in enumerate(copies)]
    t = [pulp.LpVariable(f"t{i}", 0) for i in range(2)]
    h15, h17 = pulp.LpVariable("h15"), pulp.LpVariable("h17")
    model += 39701.5641081 * t[0] + 39701.5641081 * t[1]
    for i in range(2):
        model += r[i] <= y[i]
        model += c[i] == -3187.41957547 * r[i]
        model += t[i] >= 0.00773341533704 * r[i]
        model += t[i] >= 0.00905853434159 * r[i] - 0.000662559502275 * y[i]
    model += h15 == c[0] + c[1]
    model += h15 <= -8303.2935909
    model += h17 == h15 - c[1]
    model += h17 + 17531.3912991 * y[1] <= 6426.2656326
    assert not is_solved(model, make_backend())

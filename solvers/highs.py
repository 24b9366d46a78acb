"""Mixed-integer programs by SciPy's HiGHS, for those that end CBC: it dies on some small ones with a segmentation fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulp

_OPTIMAL, _AT_A_LIMIT, _INFEASIBLE = 0, 1, 2  # states of `scipy.optimize.milp`


def solve_by_highs(model: pulp.LpProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0) -> None:
    """Minimise a PuLP model; its variables and its state are set as by PuLP's own back ends. There are no duals."""
    import numpy as np
    import pulp
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    variables = model.variables()
    column = {variable: c for c, variable in enumerate(variables)}
    cost = np.zeros(len(variables))
    for variable, factor in model.objective.items():
        cost[column[variable]] = factor
    rows = list(model.constraints.values())
    entries = [(factor, r, column[v]) for r, row in enumerate(rows) for v, factor in row.items()]
    factors, places = [e[0] for e in entries], ([e[1] for e in entries], [e[2] for e in entries])
    found = milp(
        cost,
        constraints=LinearConstraint(
            csr_array((factors, places), shape=(len(rows), len(variables))),
            [-math.inf if row.sense == pulp.LpConstraintLE else -row.constant for row in rows],
            [math.inf if row.sense == pulp.LpConstraintGE else -row.constant for row in rows],
        ),
        bounds=Bounds(
            [-math.inf if v.lowBound is None else v.lowBound for v in variables],
            [math.inf if v.upBound is None else v.upBound for v in variables],
        ),
        integrality=[int(v.cat == pulp.LpInteger) for v in variables],
        options={"mip_rel_gap": relative_gap, **({} if time_limit_s is None else {"time_limit": time_limit_s})},
    )
    if found.x is not None:
        model.assignVarsVals({v.name: float(x) for v, x in zip(variables, found.x, strict=True)})
        optimal = found.status == _OPTIMAL
        state = pulp.LpSolutionOptimal if optimal else pulp.LpSolutionIntegerFeasible
        model.assignStatus(pulp.LpStatusOptimal, state)
    elif found.status == _INFEASIBLE:
        model.assignStatus(pulp.LpStatusInfeasible)
    else:
        model.assignStatus(pulp.LpStatusNotSolved if found.status == _AT_A_LIMIT else pulp.LpStatusUndefined)

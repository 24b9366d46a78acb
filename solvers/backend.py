"""The MILP back ends: CBC, which PuLP brings along, and HiGHS where `highspy` is installed.

PuLP is imported on first use, so that importing the solvers stays cheap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autosac.errors import SimulationError, UsageError
from autosac.files.temporary import temporary_folder
from autosac.interrupts import signals_later
from autosac.solvers.highs import solve_by_highs

if TYPE_CHECKING:
    import pulp

BACKENDS = {"cbc": "PULP_CBC_CMD", "highs": "HiGHS"}
_INTEGRAL = 1e-4  # solvers take a value for an integer that is nearer than 1e-6


def check_backend(name: str) -> None:
    """UsageError if there is no such back end, or it is not installed (as far as that shows without loading it)."""
    if name not in BACKENDS:
        raise UsageError(f"unknown MILP solver {name!r}: choose one of {', '.join(BACKENDS)}")
    if name == "highs" and importlib.util.find_spec("highspy") is None:
        raise _missing(name)


def _missing(name: str) -> UsageError:
    hint = " (pip install highspy)" if name == "highs" else ""
    return UsageError(f"the MILP solver {name!r} is not installed{hint}")


def make_backend(
    name: str = "cbc",
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    absolute_gap: float = 0.0,
    relaxed: bool = False,
    counts_processor_time: bool = False,
) -> pulp.LpSolver:
    """A silent PuLP solver that may stop at either gap. `relaxed` drops integrality (and yields duals).
    `counts_processor_time`: CBC's limit is one of its own processor time, so that other programs do not shorten its work.

    UsageError if the name is unknown, the back end is not installed, or a limit makes no sense.
    """
    import pulp

    check_backend(name)
    if time_limit_s is not None and not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise UsageError(f"the solver's time limit must be a positive number of seconds, not {time_limit_s}")
    if not 0 <= relative_gap < 1:
        raise UsageError(f"the solver's relative gap must be in [0, 1), not {relative_gap}")
    kind = getattr(pulp, BACKENDS[name])
    options: dict[str, object] = {"msg": False, "mip": not relaxed, "timeLimit": time_limit_s}
    if not relaxed:
        options |= {"gapRel": relative_gap or None, "gapAbs": absolute_gap or None}
    if name == "cbc":
        options["timeMode"] = "cpu" if counts_processor_time else "elapsed"
        # Its preprocessing of integers and its heuristics can lose the optimum: see both test_cbc_finds_the_optimum. With a
        # gap heuristics find good plans that branching does not come to.
        options["options"] = ["preprocess off", *([] if relative_gap else ["heuristics off"])]
    try:
        backend = kind(**options)
        available = backend.available()
    except (ImportError, pulp.PulpSolverError):
        available = False
    if not available:
        raise _missing(name)
    return backend


@contextlib.contextmanager
def leaving_nothing(backend: pulp.LpSolver) -> Iterator[None]:
    """While it is used, a back end has a folder of its own; an interruption leaves neither files nor a running solver.

    PuLP gives CBC files in the folder for temporary files and removes them after a success; an exception that reaches it
    while it waits for CBC leaves the files and the process.
    """
    from pulp.apis import coin_api

    started: list[subprocess.Popen[Any]] = []

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with signals_later():
                super().__init__(*args, **kwargs)
                started.append(self)

    with temporary_folder() as folder:
        backend.tmpDir = str(folder)
        coin_api.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Recorded})
        try:
            yield
        finally:
            coin_api.subprocess = subprocess
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def is_solved(model: pulp.LpProblem, backend: pulp.LpSolver) -> bool:
    """Whether a back end finds a solution, which the model then holds. SimulationError if the solver itself failed.

    An integer program that ends CBC is solved by HiGHS.
    """
    import pulp

    try:
        with leaving_nothing(backend):
            model.solve(backend)
    except pulp.PulpSolverError as e:
        if not backend.mip:
            raise SimulationError(f"the MILP solver failed: {e}") from e
        solve_by_highs(model, time_limit_s=backend.timeLimit, relative_gap=backend.optionsDict.get("gapRel") or 0.0)
    found = model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    return found and (not backend.mip or _is_integral(model))


def _is_integral(model: pulp.LpProblem) -> bool:
    """Whether the integers of a solution are integers. CBC may stop at its limit with fractions and call them a solution."""
    import pulp

    integers = (v.value() or 0.0 for v in model.variables() if v.cat == pulp.LpInteger)
    return all(abs(value - round(value)) <= _INTEGRAL for value in integers)

"""The figures of AUTO-SAC's evaluation as plain values, which `report` draws as a page and as pictures.

5.5 peak memory by policy against the budget, 5.6 recomputation overhead, 5.7 time per solver, 5.8 decisions and recomputation
by budget, 5.9 the trade-off curve of one module.
"""

from __future__ import annotations

from typing import NamedTuple

from autosac.bench.case_study import CLAIMED_DISCARD, CLAIMED_RECOMPUTE, CaseResult
from autosac.bench.results import Results

GIB = 2**30
COLOURS = {
    "none": "#8c8c8c",
    "full": "#d62728",
    "selective-op": "#ff7f0e",
    "greedy": "#9ecae1",
    "knapsack": "#4292c6",
    "ilp": "#08519c",
    "joint": "#2ca02c",
    "global MILP": "#8c8c8c",
}
_MORE_COLOURS = ("#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#c49c94")


class Series(NamedTuple):
    """Values of one name; None where there is none."""

    name: str
    values: tuple[float | None, ...]
    colour: str


class Figure(NamedTuple):
    """Bars in groups (`categories`), or with `x` a line. `lines`: (value, text) across; `logarithmic`: the value axis."""

    key: str
    title: str
    value_title: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    lines: tuple[tuple[float, str], ...] = ()
    logarithmic: bool = False
    x: tuple[float, ...] = ()
    x_title: str = ""
    vertical: tuple[tuple[float, str], ...] = ()


def figures(results: Results, case: CaseResult | None) -> list[Figure]:
    """All figures for which there is something to show."""
    found = [_peaks(results), _overheads(results)]
    if results.solvers:
        found.append(_times(results))
    if case is not None:
        found += [_decisions(case), _recomputation(case), _curve(case)]
    return found


def colour_of(name: str, position: int) -> str:
    """A policy's colour."""
    return COLOURS.get(name, _MORE_COLOURS[position % len(_MORE_COLOURS)])


def _by_policy(results: Results, attribute: str, scale: float) -> tuple[tuple[str, ...], tuple[Series, ...]]:
    groups = results.groups()
    series = []
    for i, policy in enumerate(results.policies()):
        values: list[float | None] = []
        for _, rows in groups:
            row = next((row for row in rows if row.policy == policy), None)
            value = getattr(row, attribute) if row is not None else None
            values.append(None if value is None else value * scale)
        series.append(Series(policy, tuple(values), colour_of(policy, i)))
    return tuple(name for name, _ in groups), tuple(series)


def _peaks(results: Results) -> Figure:
    kind = results.rows[0].budget_kind
    categories, series = _by_policy(results, "peak_bytes", 1 / GIB)
    budgets = sorted({row.budget_bytes for row in results.rows})
    return Figure(
        key="peak",
        title="Peak memory by policy, against the budget",
        value_title=f"peak {kind} memory (GiB)",
        categories=categories,
        series=series,
        lines=tuple((budget / GIB, f"budget {budget / GIB:.4g} GiB") for budget in budgets),
    )


def _overheads(results: Results) -> Figure:
    categories, series = _by_policy(results, "overhead", 100.0)
    return Figure(
        key="recompute",
        title="Recomputation overhead",
        value_title="recomputation, % of the step without checkpointing",
        categories=categories,
        series=series,
    )


def _times(results: Results) -> Figure:
    names = list(dict.fromkeys(t.solver for _, timings in results.solvers for t in timings))
    series = tuple(
        Series(
            name,
            tuple(next((t.seconds * 1e3 for t in timings if t.solver == name), None) for _, timings in results.solvers),
            colour_of(name, i),
        )
        for i, name in enumerate(names)
    )
    return Figure(
        key="solver_time",
        title="Optimisation time per solver",
        value_title="time (ms)",
        categories=tuple(name for name, _ in results.solvers),
        series=series,
        logarithmic=True,
    )


def _decisions(case: CaseResult) -> Figure:
    modules = list(dict.fromkeys(m.module for budget in case.budgets for m in budget.modules))
    modules.sort(key=lambda name: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")])
    shades = ("#08306b", "#2171b5", "#6baed6", "#c6dbef")
    series = tuple(
        Series(
            budget.budget,
            tuple({m.module: 100 * m.discard_fraction for m in budget.modules}.get(name) for name in modules),
            shades[i % len(shades)],
        )
        for i, budget in enumerate(case.budgets)
    )
    return Figure(
        key="decisions",
        title=f"{case.model} {case.configuration}: what is discarded, by budget",
        value_title="discarded, % of the module's memory",
        categories=tuple(modules),
        series=series,
    )


def _recomputation(case: CaseResult) -> Figure:
    values = tuple(None if budget.error else budget.recompute_ms for budget in case.budgets)
    return Figure(
        key="recompute_by_budget",
        title=f"{case.model} {case.configuration}: recomputation by budget",
        value_title="recomputation (ms)",
        categories=tuple(budget.budget for budget in case.budgets),
        series=(Series("recomputation", values, COLOURS["ilp"]),),
    )


def _curve(case: CaseResult) -> Figure:
    return Figure(
        key="tradeoff",
        title=f"{case.module} of {case.model} {case.configuration}: compute against memory",
        value_title="recomputed, % of the module's forward",
        categories=(),
        series=(Series(case.module, tuple(100 * y for _, y in case.curve), COLOURS["ilp"]),),
        lines=((100 * CLAIMED_RECOMPUTE, f"{CLAIMED_RECOMPUTE:.0%}"),),
        x=tuple(100 * x for x, _ in case.curve),
        x_title="discarded, % of the module's memory",
        vertical=(
            (100 * CLAIMED_DISCARD, f"{CLAIMED_DISCARD:.0%} discarded: {case.at_claimed_discard:.1%} recomputed"),
        ),
    )

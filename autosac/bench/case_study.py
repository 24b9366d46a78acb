"""One configuration in depth, as AUTO-SAC 5.6.5 and 5.6.6: plans for several budgets, the statistics of one module.

`study` gives what Figure 5.8 shows (per budget: which modules are checkpointed, how much of each is discarded, what its
recomputation takes), Table 5.6 (the module's operators) and Figure 5.9 (its trade-off curve), and the recomputation at which
60 % of the module's memory is gone: the paper says less than 5 % of its forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autosac.bench.planners import find_plan
from autosac.bench.policies import Policy
from autosac.bench.subjects import Subject
from autosac.bench.suite import Suite
from autosac.errors import InfeasibleError, UsageError
from autosac.estimator.sac_stats import SACModTradeoffStats
from autosac.planning.unit_policies import UnitPolicies

CLAIMED_DISCARD, CLAIMED_RECOMPUTE = 0.6, 0.05


class ModuleChoice(NamedTuple):
    """A checkpointed module at one budget."""

    module: str
    discard_fraction: float
    recompute_ms: float


class BudgetChoice(NamedTuple):
    """The plan of one budget; `error` where there is none."""

    budget: str
    recompute_ms: float
    peak_bytes: int
    modules: tuple[ModuleChoice, ...]
    error: str = ""


class OperatorRow(NamedTuple):
    """A row of Table 5.6."""

    number: int
    operator: str
    runtime_ms: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """See the module's docstring. `curve`: (discarded fraction of the module's memory, recomputed fraction of its forward).

    `forward_ms` is the module's forward, `step_ms` the step without checkpointing, `alike` how many modules have this curve.
    """

    model: str
    configuration: str
    module: str
    budgets: tuple[BudgetChoice, ...]
    operators: tuple[OperatorRow, ...]
    curve: tuple[tuple[float, float], ...]
    forward_ms: float
    step_ms: float
    alike: int = 1

    @property
    def at_claimed_discard(self) -> float:
        """The recomputed fraction at which at least 60 % of the memory is gone."""
        return recomputed_at(self.curve, CLAIMED_DISCARD)

    def claim(self) -> str:
        """Figure 5.9's claim, checked."""
        share = self.at_claimed_discard
        verdict = "holds" if share < CLAIMED_RECOMPUTE else "does not hold"
        of_step = share * self.forward_ms / self.step_ms
        return (
            f"discarding {CLAIMED_DISCARD:.0%} of {self.module} costs under {CLAIMED_RECOMPUTE:.0%} of its forward: "
            f"{verdict} ({share:.1%}, which is {of_step:.1%} of the step; {of_step * self.alike:.1%} if all "
            f"{self.alike} modules like it do so)"
        )


def recomputed_at(curve: tuple[tuple[float, float], ...], discard: float) -> float:
    """The recomputed fraction of the first point of the staircase that discards at least `discard`."""
    return next((y for x, y in curve if x >= discard), 1.0)


def fractions_of(tradeoff: SACModTradeoffStats) -> tuple[tuple[float, float], ...]:
    """Fractions of all memory and of all time of the module, from nothing on, in MSPS order."""
    memory, time_ms = tradeoff.memory_bytes or 1, tradeoff.runtime_ms or 1.0
    points = [(p.discarded_bytes / memory, p.recompute_ms / time_ms) for p in tradeoff.points]
    return ((0.0, 0.0), *points) if points[0] != (0.0, 0.0) else tuple(points)


def study(suite: Suite, subject: Subject) -> CaseResult:
    """The suite's case study. UsageError if its module may not be checkpointed."""
    case = suite.case_study
    assert case is not None
    policies = UnitPolicies(subject.observed())
    unit = next((unit for unit in policies.units if unit.name == case.module), None)
    if unit is None:
        known = ", ".join(unit.name for unit in policies.units[:6])
        raise UsageError(f"the case study's module {case.module!r} cannot be checkpointed: choose from {known}, ...")
    budgets = []
    for text, budget_bytes in zip(case.budgets, suite.case_budgets_bytes(), strict=True):
        try:
            found = find_plan(subject, Policy(case.solver), suite.goal(budget_bytes, case.solver))
        except InfeasibleError as e:
            budgets.append(BudgetChoice(text, 0.0, 0, (), str(e)))
            continue
        simulation = found.best.simulation
        modules = tuple(ModuleChoice(u.fqn, u.discard_fraction, u.recompute_ms) for u in found.best.plan.units)
        budgets.append(BudgetChoice(text, simulation.recompute_ms, simulation.peak_bytes(suite.budget_kind), modules))
    operators = tuple(
        OperatorRow(i, operator.name.removeprefix("aten."), operator.runtime_ms, operator.memory_bytes)
        for i, operator in enumerate(unit.sac.stats.operators)
    )
    return CaseResult(
        model=case.model,
        configuration=case.configuration,
        module=case.module,
        budgets=tuple(budgets),
        operators=operators,
        curve=fractions_of(unit.sac.tradeoff),
        forward_ms=unit.sac.tradeoff.runtime_ms,
        step_ms=subject.observed().step_ms,
        alike=sum(other.sac.problem == unit.sac.problem for other in policies.units),
    )

"""Running a suite: every policy of every configuration is simulated, those of AutoSAC are found first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosac.bench.case_study import CaseResult, study
from autosac.bench.measure import Measurement, measure
from autosac.bench.planners import Found, find_plan
from autosac.bench.policies import Policy
from autosac.bench.results import PolicyRow, Results
from autosac.bench.solver_times import SolverTiming, time_solvers
from autosac.bench.subjects import Subject, subject_of
from autosac.bench.suite import Configuration, Model, Suite
from autosac.choices import SOLVERS
from autosac.errors import AutosacError, CaptureError, UsageError
from autosac.memory_sim import simulate_memory
from autosac.planning.stage_plans import prediction_of_stages
from autosac.plans import Plan, Prediction
from autosac.progress import Parts
from autosac.simulation import Simulation

Progress = Callable[[str], None]


def run_suite(
    suite: Suite,
    folder: Path,
    progress: Progress = lambda _: None,
    measurement: Measurement | None = None,
    found: Callable[[PolicyRow], None] = lambda _: None,
) -> tuple[Results, CaseResult | None]:
    """All rows, and the case study if the suite has one; `found` gets each row when it is there. Plans are written to
    `folder`/plans.

    A policy that cannot be done (no plan meets the budget, the step cannot be captured) is a row with an error. UsageError
    for what is wrong with the suite.
    """
    plans = folder / "plans"
    plans.mkdir(parents=True, exist_ok=True)
    rows: list[PolicyRow] = []
    solvers: list[tuple[str, tuple[SolverTiming, ...]]] = []
    notes: list[str] = []
    case: CaseResult | None = None
    configurations = sum(len(model.configurations) for model in suite.models)
    progress = parts = Parts(progress, "row", configurations * len(suite.budgets_bytes()) * len(suite.policies))
    parts.begin(1)
    for model in suite.models:
        for configuration in model.configurations:
            name = f"{model.name} {configuration.name}"
            target = measurement.target if measurement is not None else "gpu"
            with subject_of(suite, model, configuration, target=target, progress=_prefixed(progress, name)) as subject:
                run = _Run(suite, model, configuration, subject, plans, target, _prefixed(progress, name))
                for row, plan in run.rows():
                    if measurement is not None and not row.error:
                        progress(f"{name}: measuring {row.policy}")
                        row = replace(row, measured=measure(suite, model, configuration, plan, measurement))
                    rows.append(row)
                    found(row)
                    parts.begin(min(len(rows) + 1, parts.total))
                solvers += run.solvers
                notes += stage_notes(name, subject.stages)
                if _is_case(suite, model, configuration):
                    progress(f"{name}: the case study")
                    case = study(suite, subject)
    results = Results(suite=suite.name, gpu=suite.gpu, rows=tuple(rows), solvers=tuple(solvers), notes=tuple(notes))
    return results, case


def stage_notes(name: str, stages: int) -> list[str]:
    """What has to be said of a configuration with pipeline stages."""
    if stages == 1:
        return []
    return [
        f"{name}: steps are those of all {stages} pipeline stages together, peaks and recomputation the most of any stage"
    ]


def _is_case(suite: Suite, model: Model, configuration: Configuration) -> bool:
    case = suite.case_study
    return case is not None and (case.model, case.configuration) == (model.name, configuration.name)


def _prefixed(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


class _Run:
    """One configuration."""

    def __init__(
        self,
        suite: Suite,
        model: Model,
        configuration: Configuration,
        subject: Subject,
        plans: Path,
        target: str,
        progress: Progress,
    ) -> None:
        self.suite = suite
        self.model = model
        self.configuration = configuration
        self.subject = subject
        self.plans = plans
        self.target = target
        self.progress = progress
        self.solvers: list[tuple[str, tuple[SolverTiming, ...]]] = []

    def rows(self) -> Iterator[tuple[PolicyRow, Plan | None]]:
        """A row per budget and policy, with the plan that a real run would follow."""
        full_ms = self._full_recompute_ms()
        for budget_bytes in self.suite.budgets_bytes():
            timed = False
            for policy in self.suite.policies:
                self.progress(policy.name)
                row = PolicyRow(
                    model=self.model.name,
                    configuration=self.configuration.name,
                    policy=policy.name,
                    budget_bytes=budget_bytes,
                    budget_kind=self.suite.budget_kind,
                    full_recompute_ms=full_ms,
                    compiled=self._is_compiled(policy),
                )
                try:
                    if not policy.planned:
                        yield self._fixed(row, policy)
                        continue
                    row, plan, found = self._planned(row, policy)
                    yield row, plan
                    if not timed and found.best.solution is not None:
                        self._time_solvers(budget_bytes, found)
                        timed = True
                except UsageError:
                    raise
                except AutosacError as e:
                    yield replace(row, error=str(e)), None

    def _full_recompute_ms(self) -> float | None:
        """What full checkpointing recomputes; None where the job cannot run so."""
        policy = Policy("full")
        try:
            return self._prediction(policy, self.subject.simulate(policy)).recompute_ms
        except CaptureError:
            return None

    def _is_compiled(self, policy: Policy) -> bool:
        return self.subject.compiled or policy.memory_budget is not None

    def _fixed(self, row: PolicyRow, policy: Policy) -> tuple[PolicyRow, Plan | None]:
        began = time.perf_counter()
        simulation = self.subject.simulate(policy)
        figures = self._figures(policy, simulation, self._prediction(policy, simulation))
        row = replace(row, **figures, verify_s=time.perf_counter() - began)
        return row, self.subject.plan_under(policy)

    def _planned(self, row: PolicyRow, policy: Policy) -> tuple[PolicyRow, Plan, Found]:
        solver = policy.name if policy.name in SOLVERS else "pareto"
        goal = self.suite.goal(row.budget_bytes, solver)
        found = find_plan(self.subject, policy, goal, self.progress)
        made_for = replace(found.best.plan.made_for, budget_bytes=goal.budget_bytes)
        predicted = self._prediction(policy, found.best.simulation)
        figures = self._figures(policy, found.best.simulation, predicted)
        plan = replace(found.best.plan, made_for=made_for, predictions={"autosac": predicted})
        path = self.plans / _file_name(row)
        plan.save(path)
        row = replace(
            row,
            **figures,
            gap=found.gap,
            policy_s=found.effort.policy_s,
            verify_s=found.effort.verify_s,
            plans=found.effort.captures,
            plan_file=f"plans/{path.name}",
        )
        return row, plan, found

    def _figures(self, policy: Policy, simulation: Simulation, prediction: Prediction) -> dict[str, Any]:
        """The row's figures; what runs on a CPU has no caching allocator and no libraries' workspaces."""
        figures = asdict(prediction)
        figures["reference_ms"] = self.subject.reference(policy).step_ms
        figures["fits_gpu"] = figures.pop("fits")
        if self.target == "cpu":
            figures["peak_active_bytes"] = simulate_memory(simulation.trace, round_to_bytes=1).peak_bytes
            figures["peak_reserved_bytes"] = figures["fits_gpu"] = None
        return figures

    def _prediction(self, policy: Policy, simulation: Simulation) -> Prediction:
        prediction = simulation.prediction()
        if simulation.pipeline is not None:
            prediction = prediction_of_stages(simulation.pipeline.stages, simulation.step_ms)
        if self._is_compiled(policy):
            prediction = prediction.compiled(self.subject.reference(policy).step_ms)
        return prediction

    def _time_solvers(self, budget_bytes: int, found: Found) -> None:
        assert found.best.solution is not None
        self.progress("timing the solvers")
        goal = self.suite.goal(budget_bytes)
        timings = time_solvers(self.subject.observed(), goal, found.best.solution.peak_bytes)
        name = f"{self.model.name} {self.configuration.name}"
        if len(self.suite.budgets) > 1:
            name += f", {budget_bytes / 2**30:.4g} GiB"
        self.solvers.append((name, tuple(timings)))


def _file_name(row: PolicyRow) -> str:
    text = f"{row.model}-{row.configuration}-{row.budget_bytes / 2**30:.4g}GiB-{row.policy}"
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in text) + ".json"

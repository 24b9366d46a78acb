"""The closed loop: from a captured step to a plan that has been simulated under itself.

1. Simulate the step without checkpointing. If it fits the budget there is nothing to do.
2. Statistics of every unit's operators (`unit_policies`), the global problem (`build_problem`), both held by a `Planner`.
3. Global MILP: which units, and how many bytes each may keep; then a local policy for each (`unit_policies`).
4. Simulate the step under that plan, on a trace derived from few captures (`autosac.derivation`). The model that the MILP
   solves bounds *active* memory from the un-checkpointed step; what the budget bounds is the simulated peak of the planned
   step, reserved by default. So the MILP's own budget is moved by what the two differ, until the simulated peak uses the
   budget and does not exceed it (`search`): a bracket of the largest inner budget that fitted and the smallest that
   did not.
5. Of all plans that fit, the one with the shortest simulated step is captured: the plan that is given has been verified by
   running the job under it. If that capture is not as it was derived, all plans are captured from then on (`find_verified`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from autosac.derivation import CaptureSource as Derivable
from autosac.derivation import Derivation
from autosac.errors import InfeasibleError, UsageError
from autosac.planning.candidates import Candidate, early_note, is_faster
from autosac.planning.compiled_costs import as_executed
from autosac.planning.compiled_policies import compiled_prices, groups_of
from autosac.planning.compiled_search import CompiledMixes
from autosac.planning.offloading import Offloading
from autosac.planning.planner import Goal, Planner, full_plan, plan_of
from autosac.planning.search import Search
from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Plan, Prediction
from autosac.progress import Parts
from autosac.quantities import format_ms
from autosac.simulation import Simulation
from autosac.trace import TracedOperators

__all__ = [
    "ALSO_FITS",
    "FITS_WITHOUT",
    "Goal",
    "Loop",
    "Planned",
    "Planner",
    "PlanningCaptures",
    "ascending",
    "derivation_for",
    "failing",
    "faster",
    "find_verified",
    "full_plan",
    "make_plan",
    "make_plans",
    "pareto_budgets",
    "predictions_of",
]


ALSO_FITS = " also fits and is faster"
FITS_WITHOUT = "the step fits the budget without any checkpointing"
_NO_PLAN = "; it is a plan only for a job that is configured so: it runs again what other plans always keep"
_NOT_OFFLOADED = (
    "offloading to host memory was not tried: the plan is the job's own checkpointing, as the host is the limit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A verified plan, its simulation, and what is worth telling."""

    plan: Plan
    simulation: Simulation
    notes: tuple[str, ...] = ()


class PlanningCaptures(Protocol):
    """The captures that planning needs."""

    def observed(self) -> Simulation:
        """The step without checkpointing, the regions of all candidates observed."""

    def baselines(self) -> Mapping[str, Simulation]:
        """The step under the policies that the plan is shown beside, by name; "none" is among them."""

    def failures(self) -> Mapping[str, str]:
        """Why the step cannot be run under a policy that is no baseline for that reason."""

    def stopping_early(self) -> Simulation | None:
        """The step under the job's own full checkpointing, whose recomputations end with the last result that is needed; None
        where they do so anyway, or cannot.
        """

    def traced(self) -> Mapping[str, TracedOperators]:
        """What is known, without a capture more, of what the compiler traces in units of a plan (`TraceInfo.traced`)."""

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """Begin to capture the step under a plan that may be asked for, where that can go on beside the planning. With `ahead`
        only where a processor has nothing else to capture, and only until another plan is begun.
        """

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """Begin to capture the step of the model's first so many layers under a plan, or that of all (None, and where they
        cannot be left out); the answer waits for it. CaptureError, at once or from there.
        """

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""

    def begin_template(self, plan: Plan) -> None:
        """Begin to capture a template, as `begin` does for other plans."""

    def template(self, plan: Plan) -> Simulation:
        """The step under a plan from which steps under other plans are derived. It may be checked less than that of `under`:
        a plan that results from it is captured before it is reported.
        """


def make_plan(captures: PlanningCaptures, goal: Goal, progress: Callable[[str], None] = lambda _: None) -> Planned:
    """The verified plan for a goal. InfeasibleError if there is none; it names the smallest budget found to work."""
    (planned,) = make_plans(captures, goal, (goal.budget_bytes,), progress)
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned


class Loop:
    """The closed loop of one captured step, for several budgets: what is built once for all of them."""

    def __init__(self, captures: PlanningCaptures, goal: Goal, progress: Callable[[str], None]) -> None:
        self.captures, self.goal, self.progress = captures, goal, progress
        self.base, self.baselines = captures.observed(), captures.baselines()

    @cached_property
    def planner(self) -> Planner:
        """Solves."""
        self.progress("simulating the step without checkpointing")
        return planner_for(self.base, self.baselines["none"], self.goal)

    @cached_property
    def derivation(self) -> Derivation:
        """Simulates the step under plans."""
        derivation = derivation_for(self.captures, self.planner)
        derivation.prepare(self.planner.smallest())  # which most plans need, and the solvers take a while
        return derivation

    @cached_property
    def search(self) -> Search:
        """Looks for plans."""
        derivation = self.derivation
        mixes = _mixes(self.captures, self.planner, self.baselines, self.progress)
        partly = self.base.trace.info.compiled and mixes is None
        traced = self.captures.traced() if partly else {}
        return Search(
            derivation, self.planner, self.progress, mixes, self.baselines["none"] if partly else None, traced
        )

    @cached_property
    def offloading(self) -> Offloading | None:
        """Lets plans offload, if the goal allows it."""
        return Offloading(self.planner, self.derivation, self.progress) if self.goal.offload else None

    def without(self, goal: Goal) -> Candidate | None:
        """The step without checkpointing, if it fits."""
        none = self.baselines["none"]
        if none.peak_bytes(goal.budget_kind) > goal.budget_bytes:
            return None
        return Candidate(plan=plan_of(self.base, goal, ()), simulation=none)

    def stopping_early(self, own: Candidate) -> Candidate | None:
        """The job's own checkpointing, stopping early; None where it does so anyway, or cannot."""
        simulation = self.captures.stopping_early()
        if simulation is None:
            return None
        plan = replace(own.plan, settings=replace(own.plan.settings, early_stop=True))
        return replace(own, plan=plan, simulation=simulation)

    def stated(self, candidate: Candidate) -> Candidate:
        """With what the units of a compiled step save and take in its simulation, whatever was expected of their policies."""
        return replace(candidate, plan=as_executed(candidate.plan, candidate.simulation, self.baselines["none"]))

    def find(self, goal: Goal, meanwhile: Callable[[], object]) -> tuple[Candidate, tuple[str, ...]]:
        """The plan for a goal, and what is worth telling of it; see `find_verified`."""
        best = self.without(goal)
        if best is not None:
            return best, (FITS_WITHOUT,)
        best = find_verified(self.search, self.derivation, goal, self.baselines, self.progress, meanwhile)
        said: tuple[str, ...] = ()
        if best.plan.settings.job_checkpointing:
            best, said = self._own(goal, best)
        elif self.offloading is not None:
            best, said = self.offloading.improved(goal, best)
        best = self.stated(best)
        return best, (*self.search.notes(goal, best), *said, *self.derivation.notes())

    def _own(self, goal: Goal, own: Candidate) -> tuple[Candidate, tuple[str, ...]]:
        """The job's own checkpointing, stopping early if that is shorter, and what is worth telling of it."""
        said = (_NOT_OFFLOADED,) if goal.offload else ()
        early = self.stopping_early(own)
        if early is None or not early.fits(goal):
            return own, said
        saved_ms = own.simulation.step_ms - early.simulation.step_ms
        return (early, (early_note(saved_ms), *said)) if saved_ms > 0 else (own, said)


def make_plans(
    captures: PlanningCaptures,
    goal: Goal,
    budgets_bytes: Sequence[int],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Planned | InfeasibleError, ...]:
    """Verified plans for several budgets of one kind, in the order given; an error in place of a plan that cannot be.

    The step is captured and its problem built once. The smallest budget is planned for first, and what was verified for it
    counts for all that are larger: more memory never means a slower plan. UsageError if a budget is given twice.
    """
    order = ascending(budgets_bytes)
    progress = parts = Parts(progress, "budget", len(order))
    loop = Loop(captures, goal, progress)
    baselines = loop.baselines
    predict, shown = partial(_prediction, baselines["none"]), partial(predictions_of, baselines)
    found: dict[int, tuple[Candidate, tuple[str, ...]] | InfeasibleError] = {}
    for budget_bytes in parts.each(order):
        try:
            found[budget_bytes] = loop.find(replace(goal, budget_bytes=budget_bytes), shown)
        except InfeasibleError as e:
            found[budget_bytes] = e
    predictions = shown()  # the last are waited for here
    failures = failing(captures)

    def planned(budget_bytes: int) -> Planned | InfeasibleError:
        answer = found[budget_bytes]
        if isinstance(answer, InfeasibleError):
            return answer
        best, notes = answer
        own = predict(best.simulation)
        fitting = [n for n in baselines if baselines[n].peak_bytes(goal.budget_kind) <= budget_bytes]
        quicker = faster(own, {name: predict(baselines[name]) for name in fitting}, best.simulation.trace.info.compiled)
        plan = replace(
            best.plan,
            made_for=replace(best.plan.made_for, budget_bytes=budget_bytes),
            predictions={"autosac": own, **predictions},
        )
        said = (*notes, *quicker, *failures, *best.simulation.trace.info.notes)
        return Planned(plan=plan, simulation=best.simulation, notes=said)

    return tuple(map(planned, budgets_bytes))


def ascending(budgets_bytes: Sequence[int]) -> list[int]:
    """The budgets in the order in which they are planned for. UsageError if one is given twice."""
    if len(set(budgets_bytes)) < len(budgets_bytes):
        raise UsageError("a budget is given twice")
    return sorted(budgets_bytes)


def predictions_of(baselines: Mapping[str, Simulation]) -> dict[str, Prediction]:
    """What is shown of the policies that a plan is shown beside."""
    return {name: _prediction(baselines["none"], simulation) for name, simulation in baselines.items()}


def failing(captures: PlanningCaptures) -> tuple[str, ...]:
    """A note for each policy that the job cannot run under."""
    return tuple(f"the job itself fails under {name}: {why}" for name, why in captures.failures().items())


def faster(own: Prediction, fitting: Mapping[str, Prediction], compiled: bool) -> tuple[str, ...]:
    """A note for each baseline within the budget whose step is shorter than the plan's."""
    return tuple(
        f"the job's own {name}{ALSO_FITS} by {format_ms(own.step_ms - other.step_ms)}"
        + ("" if compiled else ": under a plan the host records every operator, and this step does not hide that time")
        + (_NO_PLAN if name == "full" and not compiled else "")
        for name, other in fitting.items()
        if is_faster(other.step_ms, own.step_ms)
    )


def planner_for(base: Simulation, none: Simulation, goal: Goal) -> Planner:
    """The planner of an observed step, whose prices are those of the job's own step without checkpointing, compiled or not."""
    if not base.trace.info.compiled:
        return Planner(base, goal)
    return Planner(base, goal, UnitPolicies(base, curve=goal.curve, event_ms=compiled_prices(base, none)))


def _mixes(
    captures: PlanningCaptures, planner: Planner, baselines: Mapping[str, Simulation], progress: Callable[[str], None]
) -> CompiledMixes | None:
    """Who mixes policies, where layers are compiled as a whole."""
    if not planner.base.trace.info.compiled:
        return None
    groups = groups_of(planner.policies, baselines["none"].trace)
    if not groups:
        return None
    traced = captures.traced()
    return CompiledMixes(groups, baselines, planner.base, captures.begin, captures.sample, progress, traced)


def derivation_for(captures: Derivable, planner: Planner) -> Derivation:
    """The steps under a planner's plans."""
    return Derivation(captures, {unit.name: unit.recompute_all() for unit in planner.policies.units})


def find_verified(
    search: Search,
    derivation: Derivation,
    goal: Goal,
    baselines: Mapping[str, Simulation],
    progress: Callable[[str], None],
    meanwhile: Callable[[], object] = lambda: None,
    *,
    own: bool = True,
) -> Candidate:
    """The fastest plan that fits, as captured if the goal asks for that; `meanwhile` is called while that capture goes on.
    With `own` it may be the job's own checkpointing. InfeasibleError, of which the smallest budget is of a captured step too.
    """
    limit_bytes = goal.budget_bytes if goal.budget_kind == "reserved" else math.inf
    while True:
        failure: InfeasibleError | None = None
        try:
            found = search.run(goal, partial(derivation.expect, ahead=True) if goal.confirm else lambda _: None)
            if found is not None and goal.confirm:
                derivation.expect(found.plan)
            search.compete(goal, baselines)  # waits for the baselines, which hardly ever change the answer
            meanwhile()
            best = search.best(goal, baselines, own=own)
            if not goal.confirm or best.plan.settings.job_checkpointing:  # a baseline has been captured
                return best
        except InfeasibleError as e:
            if not goal.confirm:
                raise
            failure = e
            best = min(search.verified, key=lambda c: c.simulation.peak_bytes(goal.budget_kind))
        progress("capturing the step under the plan")
        agrees = derivation.confirm(best.plan, best.simulation, limit_bytes)
        best = search.settle(best, derivation.under(best.plan))
        if agrees and failure is not None:
            raise failure
        if agrees:
            return best
        search.forget(derivation.is_derived)


def pareto_budgets(captures: PlanningCaptures, kind: str, count: int) -> tuple[int, ...]:
    """`count` budgets from the least that any plan needs to what no checkpointing needs, evenly spaced, ascending."""
    if count < 2:
        raise UsageError("a Pareto curve needs at least two budgets")
    baselines = captures.baselines()
    high = baselines["none"].peak_bytes(kind)
    low = min(simulation.peak_bytes(kind) for simulation in baselines.values())
    return tuple(low + (high - low) * i // (count - 1) for i in range(count))


def _prediction(none: Simulation, simulation: Simulation) -> Prediction:
    """A step's prediction, compiled or not."""
    prediction = simulation.prediction()
    return prediction.compiled(none.step_ms) if simulation.trace.info.compiled else prediction

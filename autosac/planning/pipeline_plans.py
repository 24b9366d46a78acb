"""The plan of a pipelined job: for each stage the plan with which the step of all stages together is shortest.

1. Each stage is planned by itself, the one that needs most first: what it has no plan for, no other need try. That gives
   candidates, plans that were simulated and fit: for a stage that is busy all the time, its own best is the pipeline's.
2. Of the candidates of all stages, the combination with the shortest step of all stages is taken (`joint_choice`).
3. The step of all stages says what each unit's recomputation costs: nothing where it hides in a bubble, or behind a slower
   stage (`joint_prices`). Stages with several parts of the model (interleaved schedules) are solved again at these prices,
   which gives more candidates; 2 and 3 again, as long as the step is not near its lower bound and there are new candidates.
4. The plan of each stage is captured, as in `closed_loop`. What is not as it was derived is captured from then on, and chosen
   again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autosac.errors import InfeasibleError
from autosac.planning.candidates import Candidate, early_note, is_faster, own_note
from autosac.planning.closed_loop import (
    FITS_WITHOUT,
    Goal,
    Loop,
    Planned,
    PlanningCaptures,
    ascending,
    failing,
    faster,
    find_verified,
)
from autosac.planning.joint_choice import JointSteps, agreeing, choose, is_dominated
from autosac.planning.joint_prices import JointPrices
from autosac.planning.stage_plans import join_plans, joint_predictions
from autosac.progress import Parts
from autosac.quantities import format_ms

# Times that the stages are solved again at the prices of the step of all of them.
_ROUNDS = 4
# A step that is above its lower bound by less than this share is good enough.
_CLOSE = 1e-3
# The job's own checkpointing that may be a plan.
_OWN = "full"
_NONE = "none"


def make_pipeline_plans(
    captures: Sequence[PlanningCaptures],
    goal: Goal,
    budgets_bytes: Sequence[int],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Planned | InfeasibleError, ...]:
    """As `closed_loop.make_plans`, of all stages of a pipeline, given by their captures."""
    order = ascending(budgets_bytes)
    progress = parts = Parts(progress, "budget", len(order))
    stages = []
    for stage in captures:
        stages.append(Loop(stage, goal, progress))
        stages[-1].base.peak_bytes(goal.budget_kind)  # while the next ones are captured
    steps = JointSteps()
    found: dict[int, Planned | InfeasibleError] = {}
    for budget_bytes in parts.each(order):
        try:
            found[budget_bytes] = _Pipeline(stages, replace(goal, budget_bytes=budget_bytes), steps, progress).planned()
        except InfeasibleError as e:
            found[budget_bytes] = e
    return tuple(found[budget_bytes] for budget_bytes in budgets_bytes)


@dataclass(kw_only=True)
class _Stage:
    """What is known of a stage for one budget. `hosted`: what is told of offloading."""

    loop: Loop
    pool: list[Candidate]
    hosted: tuple[str, ...] = ()


class _Pipeline:
    """The plan of all stages for one budget."""

    def __init__(self, loops: Sequence[Loop], goal: Goal, steps: JointSteps, progress: Callable[[str], None]) -> None:
        self._goal, self._steps, self._progress = goal, steps, progress
        self._stages = [_Stage(loop=loop, pool=[]) for loop in loops]
        self._least_ms: float | None = None

    def planned(self) -> Planned:
        """The verified plan, or the job's own checkpointing if that is one and faster. InfeasibleError if there is none."""
        try:
            return self._planned_by_stages()
        except InfeasibleError:
            own = self._own()
            if own is None:
                raise
            return self._joined(own, "no plan for single modules fits")

    def _planned_by_stages(self) -> Planned:
        def needs(position: int) -> int:
            return self._stages[position].loop.base.peak_bytes(self._goal.budget_kind)

        for position in sorted(range(len(self._stages)), key=needs, reverse=True):
            try:
                self._alone(self._stages[position])
            except InfeasibleError as e:
                raise InfeasibleError(f"pipeline stage {position}: {e}", peak_in=e.peak_in) from e
        chosen = self._improved(self._choose())
        while True:
            self._expect(chosen)
            if self._compete(chosen):
                chosen = self._choose()
            failed = self._unconfirmed(chosen) if self._goal.confirm else []
            if not failed:
                return self._faster(chosen)
            for stage in failed:  # again, on captures
                stage.pool = []
                self._alone(stage)
            chosen = self._choose()

    # ---- candidates -------------------------------------------------------------------------------------------------

    def _alone(self, stage: _Stage) -> None:
        """The candidates of a stage that is planned by itself."""
        loop, goal = stage.loop, self._goal
        best = loop.without(goal)
        if best is not None:
            stage.pool = [best]
            return
        best = loop.search.run(goal)
        if best is None:  # what a baseline does may do; else the error says the smallest budget, as captured
            best = find_verified(loop.search, loop.derivation, goal, loop.baselines, self._progress, own=False)
        if goal.confirm:
            loop.derivation.expect(best.plan, ahead=True)
        if loop.offloading is not None:
            hosted, stage.hosted = loop.offloading.improved(goal, best)
            stage.pool = [hosted] if hosted is not best else []
        self._collect(stage)

    def _collect(self, stage: _Stage) -> None:
        """Add to a stage's candidates all that have been verified and fit."""
        known = set(map(id, stage.pool))
        stage.pool += [c for c in stage.loop.search.verified if c.fits(self._goal) and id(c) not in known]

    def _choose(self) -> tuple[Candidate, ...]:
        self._agree()
        self._progress("simulating the step of all stages")
        found = [choose(pools, self._steps.step_ms) for pools in agreeing([stage.pool for stage in self._stages])]
        if not found:
            raise InfeasibleError(
                "no memory budget of the compiler's partitioner was found that all pipeline stages can follow"
            )
        return min(found, key=self._step_ms)

    def _agree(self) -> None:
        """Let all stages follow the largest memory budget for all that is compiled that fits in every one: a job has one."""
        pools = [{c.plan.settings.memory_budget for c in stage.pool} - {1.0} for stage in self._stages]
        least = min((max(budgets) for budgets in pools if budgets), default=None)
        for stage in self._stages:
            if least is not None and all(c.plan.settings.memory_budget != least for c in stage.pool):
                candidate = stage.loop.search.verify_budget(self._goal, least)
                stage.pool += [candidate] if candidate.fits(self._goal) else []

    def _step_ms(self, chosen: Sequence[Candidate]) -> float:
        return self._steps.step_ms([candidate.simulation for candidate in chosen])

    # ---- the step of all stages -------------------------------------------------------------------------------------

    def _is_priced(self) -> bool:
        """Whether prices of the joint step can be measured, and anything depends on them."""
        loops = [stage.loop for stage in self._stages]
        eager = not any(loop.base.trace.info.compiled for loop in loops)
        return self._goal.objective == "step" and eager and any(self._planned_stages())

    def _planned_stages(self) -> list[bool]:
        """Which stages need checkpointing."""
        return [any(candidate.plan.units for candidate in stage.pool) for stage in self._stages]

    def _improved(self, chosen: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The best combination after the stages have been solved at the prices of the step of all of them."""
        if not self._is_priced() or any(candidate.plan.offloads for candidate in chosen):
            return chosen
        loops = [stage.loop for stage in self._stages]
        planners = [
            loop.planner if is_planned else None for loop, is_planned in zip(loops, self._planned_stages(), strict=True)
        ]
        prices = JointPrices(self._steps.pipeline([loop.base for loop in loops]), planners)
        for _ in range(_ROUNDS):
            self._progress("measuring what the step of all stages pays for recomputation")
            plans = [candidate.plan for candidate in chosen]
            prices.add(plans, self._step_ms(chosen))
            self._least_ms = max(self._least_ms or 0.0, prices.least_ms(plans))
            if self._step_ms(chosen) <= (1 + _CLOSE) * self._least_ms or not self._solved_again(prices):
                break
            chosen = self._choose()
        return chosen

    def _solved_again(self, prices: JointPrices) -> bool:
        """Solve the stages whose units have several prices; whether that has given new candidates."""
        before = sum(len(stage.pool) for stage in self._stages)
        for position, stage in enumerate(self._stages):
            costs = prices.costs(position)
            if costs is not None:
                stage.loop.search.fit(self._goal, costs)
                self._collect(stage)
        return sum(len(stage.pool) for stage in self._stages) > before

    # ---- captures ---------------------------------------------------------------------------------------------------

    def _expect(self, chosen: Sequence[Candidate]) -> None:
        """Begin to capture the steps under the chosen plans."""
        for stage, candidate in zip(self._stages, chosen, strict=True):
            if self._goal.confirm and candidate.plan.units and not candidate.plan.offloads:
                stage.loop.derivation.expect(candidate.plan)

    def _compete(self, chosen: Sequence[Candidate]) -> bool:
        """Let the baselines compete, as plans, that fit and may make the step of all stages shorter; whether there are any.
        Waits for those of stages that recompute anything, and does meanwhile what is to be done with those that are there.
        """
        before = sum(len(stage.pool) for stage in self._stages)
        ranks = [candidate.simulation.trace.info.rank for candidate in chosen]
        self._step_of_all(_NONE)
        for stage, candidate in zip(self._stages, chosen, strict=True):
            if not candidate.plan.units:
                continue
            for name, baseline in stage.loop.baselines.items():
                baseline.work_ahead()
                if baseline.peak_bytes(self._goal.budget_kind) <= self._goal.budget_bytes and not is_dominated(
                    baseline, [c.simulation for c in stage.pool], ranks
                ):
                    stage.loop.search.verify_as(self._goal, name, baseline)
            self._collect(stage)
        return sum(len(stage.pool) for stage in self._stages) > before

    def _unconfirmed(self, chosen: Sequence[Candidate]) -> list[_Stage]:
        """Capture the step under the chosen plans: the stages in which one is not as it was derived."""
        goal = self._goal
        limit_bytes = goal.budget_bytes if goal.budget_kind == "reserved" else math.inf
        self._progress("capturing the step under the plan")
        failed = []
        for stage, candidate in zip(self._stages, chosen, strict=True):
            if not candidate.plan.units:
                continue  # it has been captured, and its search would begin with a capture
            derivation, search = stage.loop.derivation, stage.loop.search
            if not derivation.is_derived(candidate.simulation):
                continue
            if not derivation.confirm(candidate.plan, candidate.simulation, limit_bytes):
                search.settle(candidate, derivation.under(candidate.plan))
                search.forget(derivation.is_derived)
                failed.append(stage)
        return failed

    # ---- the job's own checkpointing --------------------------------------------------------------------------------

    def _faster(self, chosen: Sequence[Candidate]) -> Planned:
        """The plan of all stages, or the job's own checkpointing if the step is shorter under that."""
        # First, while baselines are still captured.
        step_ms = self._step_ms([self._captured(*pair) for pair in zip(self._stages, chosen, strict=True)])
        own_ms = self._own_ms()
        own = self._own() if is_faster(own_ms, step_ms) else None
        if own is None:
            return self._joined(chosen)
        longer_ms = step_ms - self._step_ms(own)
        return self._joined(own, f"the fastest plan for single modules takes {format_ms(longer_ms)} longer")

    def _own_ms(self) -> float:
        """The step under the job's own checkpointing, if that fits in all stages; else infinite."""
        if not all(_OWN in stage.loop.baselines for stage in self._stages) or not self._fits(_OWN):
            return math.inf
        return self._step_of_all(_OWN)

    def _step_of_all(self, name: str) -> float:
        """The step of all stages under a baseline."""
        return self._steps.step_ms([stage.loop.baselines[name] for stage in self._stages], is_beside=True)

    def _own(self) -> tuple[Candidate, ...] | None:
        """The job's own checkpointing in all stages, if it fits and may be a plan."""
        if not math.isfinite(self._own_ms()):
            return None
        simulations = [stage.loop.baselines[_OWN] for stage in self._stages]
        plans = [s.loop.planner.own(_OWN, baseline) for s, baseline in zip(self._stages, simulations, strict=True)]
        pairs = zip(plans, simulations, strict=True)
        found = [Candidate(plan=plan, simulation=step, mirrors=_OWN) for plan, step in pairs if plan is not None]
        return self._early(found) if len(found) == len(plans) else None

    def _early(self, own: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The job's own checkpointing in all stages, stopping early where that makes their step shorter."""
        stages = zip(self._stages, own, strict=True)
        found = [early for stage, c in stages if (early := stage.loop.stopping_early(c)) is not None]
        fits = len(found) == len(own) and all(early.fits(self._goal) for early in found)
        return tuple(found) if fits and self._step_ms(found) < self._step_ms(own) else tuple(own)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _captured(self, stage: _Stage, candidate: Candidate) -> Candidate:
        """With the simulation of the capture."""
        if not self._goal.confirm or not candidate.plan.units or candidate.plan.offloads:
            return candidate
        return replace(candidate, simulation=stage.loop.derivation.under(candidate.plan))

    def _joined(self, chosen: Sequence[Candidate], why_own: str = "") -> Planned:
        """The plan of all stages, with what is worth telling of it. `why_own`: why it is the job's own checkpointing."""
        captured = [self._captured(stage, c) for stage, c in zip(self._stages, chosen, strict=True)]
        baselines = [stage.loop.baselines for stage in self._stages]
        joint_predictions(baselines, self._steps)  # after that it is known which of them fail
        planned = [self._planned_stage(stage, c) for stage, c in zip(self._stages, captured, strict=True)]
        joined = join_plans(planned, baselines, self._steps)
        assert isinstance(joined, Planned)
        if why_own:
            saved_ms = self._step_of_all(_OWN) - joined.plan.predictions["autosac"].step_ms
            early = (early_note(saved_ms),) if saved_ms > 0 else ()
            return replace(joined, notes=(*joined.notes, own_note(chosen[0].mirrors, why_own), *early))
        fitting = {
            name: prediction
            for name, prediction in joined.plan.predictions.items()
            if name != "autosac" and self._fits(name)
        }
        compiled = captured[0].simulation.trace.info.compiled
        quicker = faster(joined.plan.predictions["autosac"], fitting, compiled)
        return replace(joined, notes=(*joined.notes, *self._bound(joined.simulation.step_ms), *quicker))

    def _fits(self, name: str) -> bool:
        """Whether the baseline is within the budget in every stage."""
        goal = self._goal
        return all(s.loop.baselines[name].peak_bytes(goal.budget_kind) <= goal.budget_bytes for s in self._stages)

    def _bound(self, step_ms: float) -> tuple[str, ...]:
        if self._least_ms is None:
            return ()
        planned = zip(self._stages, self._planned_stages(), strict=True)
        searches = [stage.loop.search for stage, is_planned in planned if is_planned]
        if any(search.is_refuted or search.is_uneven for search in searches):
            return ()
        above = max(0.0, step_ms / self._least_ms - 1)
        return (
            f"the step of all stages is at most {above:.1%} above the least possible at these peaks (linear bound)",
        )

    def _planned_stage(self, stage: _Stage, candidate: Candidate) -> Planned:
        """A stage's own part of the plan."""
        loop = stage.loop
        settings = candidate.plan.settings
        notes: tuple[str, ...] = () if settings.job_checkpointing else (FITS_WITHOUT,)
        if candidate.plan.units or settings.memory_budget != 1:
            notes = (*loop.search.notes(self._goal, candidate, is_stage=True), *stage.hosted, *loop.derivation.notes())
        notes = (*notes, *failing(loop.captures), *candidate.simulation.trace.info.notes)
        plan = loop.stated(candidate).plan
        made_for = replace(plan.made_for, budget_bytes=self._goal.budget_bytes)
        return Planned(plan=replace(plan, made_for=made_for), simulation=candidate.simulation, notes=notes)

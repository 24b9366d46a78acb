"""The captures that planning needs, of a script: it runs once for each of them, without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autosac.errors import InfeasibleError, UsageError
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.planning.closed_loop import Goal, Planned, make_plan
from autosac.planning.optimizer_slices import plan_also_in_slices
from autosac.planning.stage_plans import join_plans
from autosac.planning.step_captures import StepCaptures
from autosac.plans import Plan
from autosac.quantities import format_bytes
from autosac.scripts.alike import train_alike
from autosac.scripts.request import ScriptRequest
from autosac.scripts.template import Template
from autosac.simulation import Pipeline, Simulation, Target, simulation_of

_AS_LONG = 1.001


def plan_ranks(captures: Sequence[ScriptCaptures], goal: Goal, progress: Callable[[str], None]) -> Planned:
    """The verified plan of one rank, or of several distinct ones. InfeasibleError if one has none.

    Ranks with different modules (pipeline stages of one model) are planned one by one. Where modules of several ranks have the
    same names, these ranks follow the same decisions: the plan of one of them, with which all fit. Ranks that train alike
    (`train_alike`) run only under that plan.
    """
    progress("running the script again without checkpointing")
    first, *others = captures
    if not others:
        return _of_one(first, goal, progress)
    if all(train_alike(first.found.trace, rank.found.trace) for rank in others):
        return _plan_shared(captures, None, goal, progress)
    shapes = [rank.observed().trace.info.parameter_shapes for rank in captures]
    parameters = _of_all(shapes)
    if len(parameters) < sum(map(len, shapes)):
        return _plan_shared(captures, tuple(parameters.items()), goal, progress)
    planned = _of_each(captures, goal, progress)
    joined = join_plans(planned, [rank.baselines() for rank in captures])
    assert isinstance(joined, Planned)
    return replace(joined, plan=_for_stages(joined.plan, len(captures)))


def _of_one(captures: ScriptCaptures, goal: Goal, progress: Callable[[str], None]) -> Planned:
    try:
        return plan_also_in_slices(captures, goal, progress)
    except InfeasibleError as e:
        raise type(e)("; ".join([str(e), *captures.observed().trace.info.notes])) from e


def _of_each(captures: Sequence[ScriptCaptures], goal: Goal, progress: Callable[[str], None]) -> list[Planned]:
    """A plan for each rank. The error is that of all ranks that have none: the largest budget that it names is enough."""
    planned, failed = [], {}
    for rank in captures:
        try:
            planned.append(plan_also_in_slices(rank, goal, progress))
        except InfeasibleError as e:
            failed[rank.rank] = e
    if failed:
        errors = list(failed.values())
        why = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise type(errors[0])(why, peak_in=errors[0].peak_in) from errors[0]
    return _in_slices_alike(planned, captures, goal, progress)


def _in_slices_alike(
    planned: Sequence[Planned], captures: Sequence[ScriptCaptures], goal: Goal, progress: Callable[[str], None]
) -> list[Planned]:
    """The plans with slices in all ranks, if they have them in any: a script has one plan."""
    sliced = [own.plan.settings.optimizer_slice_bytes > 0 for own in planned]
    if not any(sliced):
        return list(planned)
    pairs = zip(planned, captures, sliced, strict=True)
    return [own if has else make_plan(rank.sliced(), goal, progress) for own, rank, has in pairs]


def _for_stages(plan: Plan, stages: int) -> Plan:
    return replace(plan, made_for=replace(plan.made_for, pipeline_stages=stages))


def _of_all(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The parameters of all ranks. UsageError where those of one name have several shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for of_rank in shapes:
        for name, shape in of_rank.items():
            if found.setdefault(name, shape) != shape:
                raise UsageError(
                    f"the distinct ranks have parameters {name} of different shapes, {list(found[name])} and {list(shape)}: "
                    "one plan cannot tell them apart; give modules of different ranks different names"
                )
    return found


def _plan_shared(
    captures: Sequence[ScriptCaptures],
    parameters: tuple[tuple[str, tuple[int, ...]], ...] | None,
    goal: Goal,
    progress: Callable[[str], None],
) -> Planned:
    """One plan for ranks with modules of the same names: of the rank that needs most, or else of another one.

    `parameters`: those of all ranks; None if the ranks train alike.
    """
    failed = ""
    for planner in sorted(captures, key=lambda rank: (-rank.found.peak_bytes(goal.budget_kind), rank.events)):
        own = plan_also_in_slices(planner, goal, progress)
        plan = own.plan
        if parameters is not None:
            made_for = replace(plan.made_for, parameters=parameters, pipeline_stages=len(captures))
            plan = replace(plan, made_for=made_for)
        progress("verifying the plan on all distinct ranks")
        simulations = [own.simulation if rank is planner else rank.following(plan) for rank in captures]
        peaks = [simulation.peak_bytes(goal.budget_kind) for simulation in simulations]
        if max(peaks) <= goal.budget_bytes:
            joined = _joined(own, plan, simulations, [rank.baselines() for rank in captures] if parameters else [])
            note = "modules of the distinct ranks have the same names: all follow the same decisions"
            if parameters is None:
                joined = _of_alike(joined, own, [rank.found for rank in captures])
                numbers = ", ".join(str(rank.rank) for rank in captures)
                note = f"ranks {numbers} train alike: this is the plan of rank {planner.rank}, verified on the others"
            return replace(joined, notes=(*own.notes, note))
        worst = simulations[peaks.index(max(peaks))].trace.info.rank
        failed = failed or f"the plan of rank {planner.rank} needs {format_bytes(max(peaks))} on rank {worst}"
    raise InfeasibleError(f"no plan of one rank suits all distinct ranks: {failed}")


def _joined(
    own: Planned, plan: Plan, simulations: Sequence[Simulation], baselines: Sequence[Mapping[str, Simulation]]
) -> Planned:
    """The plan of one of these ranks, with what all of them take under it together."""
    bare = replace(plan, units=(), reasons=())
    plans = (plan, *(bare for _ in simulations[1:]))
    of_ranks = [replace(own, plan=p, simulation=s) for p, s in zip(plans, simulations, strict=True)]
    joined = join_plans(of_ranks, baselines or [{}])
    assert isinstance(joined, Planned)
    return joined


def _of_alike(joined: Planned, own: Planned, found: Sequence[Simulation]) -> Planned:
    """With the ranks' steps as they are. What only one of them has run under is shown if it is the one that takes longest."""
    together = max(
        Pipeline(stages=tuple(found)).joined(), key=lambda rank: rank.peak_bytes(own.plan.made_for.budget_kind)
    )
    alone = own.plan.predictions
    longer = together.step_ms > _AS_LONG * alone["none"].step_ms
    shown = {} if longer else alone
    predictions = {**shown, **joined.plan.predictions, "none": together.prediction()}
    return replace(joined, plan=replace(joined.plan, predictions=predictions))


class ScriptCaptures(StepCaptures):
    """Of one rank of a script, whose step as it is has been `found`. The GPU never runs out of memory meanwhile."""

    def __init__(self, request: ScriptRequest, target: Target, template: Template, found: Simulation) -> None:
        """`request`: so many steps that the script comes to the one that was found. Checks nothing: the template does, which
        runs the script.
        """
        super().__init__()
        self.found = found if found.pipeline is None else found.pipeline.stages[found.stage]
        self._template = template
        self._request = replace(request, quiet=True, unlimited=True)
        self._target = target
        self.rank = request.rank

    @property
    def events(self) -> int:
        """How much a run of it has to do."""
        return len(self.found.trace.prologue) + len(self.found.trace.events)

    def sliced(self) -> ScriptCaptures:
        """See `StepCaptures.sliced`."""
        request = replace(self._request, optimizer_slice_bytes=OPTIMIZER_SLICE_BYTES)
        return ScriptCaptures(request, self._target, self._template, self.found)

    def following(self, plan: Plan) -> Simulation:
        """The step under another rank's plan."""
        return self.under(plan) if plan.units or plan.settings.optimizer_slice_bytes else self.found

    def _capture(self, plan: Plan | None = None, **changes: Any) -> Simulation:
        trace = self._template.run(replace(self._request, **changes)).trace
        return simulation_of(trace, self._target, plan)

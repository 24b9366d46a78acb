"""The captures that planning needs, of a script: it runs once for each of them, without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autosac.planning.closed_loop import Goal, Planned, make_plan
from autosac.planning.stage_plans import join_plans
from autosac.planning.step_captures import StepCaptures
from autosac.plans import Plan
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.simulation import Simulation, Target, simulation_of


def plan_ranks(captures: Sequence[ScriptCaptures], goal: Goal, progress: Callable[[str], None]) -> Planned:
    """The verified plan of one rank, or of several distinct ones, each planned by itself. InfeasibleError if one has none."""
    planned = [make_plan(rank, goal, progress) for rank in captures]
    if len(planned) == 1:
        return planned[0]
    joined = join_plans(planned, [rank.baselines() for rank in captures])
    assert isinstance(joined, Planned)
    stages = len(captures)
    return replace(joined, plan=replace(joined.plan, made_for=replace(joined.plan.made_for, pipeline_stages=stages)))


class ScriptCaptures(StepCaptures):
    """Of one rank of a script. The GPU never runs out of memory meanwhile."""

    def __init__(self, request: ScriptRequest, target: Target) -> None:
        """Checks nothing: `run_script` does."""
        super().__init__()
        self._request = replace(request, quiet=True, unlimited=True, steps=1)
        self._target = target

    def _capture(self, plan: Plan | None = None, **changes: Any) -> Simulation:
        trace = run_script(replace(self._request, **changes)).trace
        return simulation_of(trace, self._target, plan)

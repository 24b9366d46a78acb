"""The captures that planning needs, of a script: it runs once for each of them, without a word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosac.planning.step_captures import StepCaptures
from autosac.plans import Plan
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.simulation import Simulation, Target, simulation_of


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

"""The captures that planning needs, of a step that can be captured again and again: an eager one, or a script's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from autosac.files.temporary import temporary_folder
from autosac.planning.planner import full_plan
from autosac.plans import Plan
from autosac.simulation import Simulation


class StepCaptures(ABC):
    """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def __init__(self) -> None:
        self._observed: Simulation | None = None
        self._baselines: dict[str, Simulation] = {}

    @abstractmethod
    def _capture(self, plan: Plan | None = None, **changes: Any) -> Simulation:
        """Capture the step; with ``observe=True`` its regions, with ``plan_file=PATH`` under `plan`."""

    def plain(self) -> Simulation:
        """The step as it is."""
        return self._capture()

    def observed(self) -> Simulation:
        """The step with its regions observed, and without compilation."""
        if self._observed is None:
            self._observed = self._capture(observe=True)
        return self._observed

    def baselines(self) -> Mapping[str, Simulation]:
        """The step without checkpointing, and with everything recomputed that may be."""
        if not self._baselines:
            none = self.plain() if self.observed().trace.info.compiled else self.observed()
            self._baselines = {"none": none, "full": self.under(full_plan(self.observed()))}
        return self._baselines

    def failures(self) -> Mapping[str, str]:
        """None: both baselines are of the model's own making."""
        return {}

    def begin(self, plan: Plan) -> None:  # noqa: B027 # nothing to do is a complete answer
        """Nothing: one step is captured at a time."""

    def begin_template(self, plan: Plan) -> None:
        """Nothing, as for other plans."""
        self.begin(plan)

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """All layers: those of a step cannot be left out."""
        return lambda: self.under(plan)

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        with temporary_folder() as folder:
            path = folder / "plan.json"
            plan.save(path)
            return self._capture(plan=plan, plan_file=str(path))

    def template(self, plan: Plan) -> Simulation:
        """The step under a plan from which others are derived: captured like any other."""
        return self.under(plan)

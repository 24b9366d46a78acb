"""The captures that planning needs, of a step that can be captured again and again: an eager one, or a script's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from autosac.errors import CaptureError
from autosac.files.temporary import temporary_folder
from autosac.planning.planner import full_plan, undecided
from autosac.plans import Plan
from autosac.simulation import Simulation
from autosac.trace import TracedOperators


class StepCaptures(ABC):
    """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def __init__(self) -> None:
        self._observed: Simulation | None = None
        self._baselines: dict[str, Simulation] = {}
        self._failures: dict[str, str] = {}

    @abstractmethod
    def sliced(self) -> StepCaptures:
        """Captures of the same step whose optimizers work in slices (`autosac.planning.optimizer_slices`)."""

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
            compiled = self.observed().trace.info.compiled
            none, full = self.plain() if compiled else self.observed(), full_plan(self.observed())
            self._baselines = {"none": none}
            if compiled:
                full = undecided(full)
            try:
                self._baselines["full"] = self.under(full)
            except CaptureError as e:
                if not compiled:
                    raise
                self._failures["full"] = str(e)  # what cannot be compiled under checkpointing may have memory budgets
        return self._baselines

    def failures(self) -> Mapping[str, str]:
        """Of a compiled step, why it cannot be checkpointed."""
        return self._failures

    def stopping_early(self) -> Simulation | None:
        """None: the step has no checkpointing of its own that might be the plan."""
        return None

    def traced(self) -> Mapping[str, TracedOperators]:
        """That in the units of the plan that recomputes everything."""
        full = self.baselines().get("full")
        return {} if full is None else full.trace.info.traced

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:  # noqa: B027 # nothing to do is a complete answer
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

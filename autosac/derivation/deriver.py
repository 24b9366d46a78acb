"""Traces under plans, from the captures at hand."""

from __future__ import annotations

from autosac.derivation.keep import Keeper
from autosac.derivation.mix import Mixer
from autosac.derivation.steps import CapturedSteps, NotDerivableError
from autosac.plans import Plan, Settings
from autosac.trace import Trace, TraceInfo


def settings_of(info: TraceInfo) -> Settings:
    """The settings of plans for a step, as it was captured."""
    return Settings(
        preserve_rng_state=info.preserve_rng_state,
        early_stop=info.early_stop,
        loss_chunks=info.loss_chunks,
        optimizer_slice_bytes=info.optimizer_slice_bytes,
    )


class Deriver:
    """Derives the trace under any plan whose units some template recomputes.

    `observed` is the capture without checkpointing, its regions observed; a *template* a capture in which modules
    recompute everything (`add`).
    """

    def __init__(self, observed: Trace) -> None:
        self._observed = CapturedSteps(observed)
        if self._observed.recomputations:
            raise NotDerivableError("the job recomputes without a plan")
        self._mixer = Mixer(self._observed)
        self._positions = {name: i for i, name in enumerate(observed.modules)}
        self._templates: list[CapturedSteps] = []
        self._units: list[frozenset[int]] = []
        self._keepers: dict[frozenset[int], Keeper] = {}
        self._settings = settings_of(observed.info)

    def add(self, template: Trace) -> None:
        """A capture under plain checkpointing, with the job's settings. NotDerivableError if it cannot be used."""
        steps = CapturedSteps(template)
        units = frozenset(block.module for block in steps.recomputations)
        self._keepers[units] = Keeper(self._observed, steps)
        self._templates.append(steps)
        self._units.append(units)

    def covers(self, name: str) -> bool:
        """Some template recomputes the module of this name."""
        return any(self._positions.get(name) in units for units in self._units)

    def under(self, plan: Plan) -> Trace:
        """The trace that a capture under the plan would give, up to the numbers of storages, events and collectives.

        NotDerivableError where the rules do not cover it.
        """
        if plan.settings != self._settings:
            raise NotDerivableError("the plan checkpoints in another way than the templates")
        decisions = {self._positions[unit.fqn]: unit.decisions for unit in plan.units if unit.fqn in self._positions}
        if not decisions:
            raise NotDerivableError("nothing is checkpointed")
        return self._keeper(frozenset(decisions)).keeping(decisions)

    def _keeper(self, units: frozenset[int]) -> Keeper:
        """The capture in which these units recompute everything, ready to be edited."""
        keeper = self._keepers.get(units)
        if keeper is None:
            sources = {}
            for unit in units:
                found = next((k for k, known in enumerate(self._units) if unit in known), None)
                if found is None:
                    raise NotDerivableError("no template recomputes one of the plan's units")
                sources[unit] = found
            template = self._mixer.mixed(self._templates, sources)
            keeper = self._keepers[units] = Keeper(self._observed, CapturedSteps(template))
        return keeper

"""Plans for a step as it is against plans for the same step with something else than modules changed: its loss, its optimizer.

The alternative is planned where it may gain anything; for each budget the plan with the shorter step stands, and says what
the other one would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autosac.errors import InfeasibleError
from autosac.planning.closed_loop import ALSO_FITS, Planned, faster
from autosac.plans import Prediction
from autosac.quantities import format_ms

Planning = Callable[[], Sequence[Planned | InfeasibleError]]
Baselines = Callable[[], Mapping[str, Prediction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What else is done in a step. `name`: "with the loss in 8 chunks"; `how`: a sentence for a plan that does so; `lowers`:
    the peak that it lowers (`InfeasibleError.peak_in`).
    """

    name: str
    how: str
    lowers: str

    def competing(
        self, plain: Sequence[Planned | InfeasibleError], plan: Planning, baselines: Baselines
    ) -> tuple[Planned | InfeasibleError, ...]:
        """For each budget the better of the plan for the step as it is and of that with the change, which `plan` makes.
        `baselines`: the job's own ways of checkpointing, without the change, which plans with it are shown beside.
        """
        return tuple(self._better(own, other, baselines) for own, other in zip(plain, plan(), strict=True))

    def _better(
        self, own: Planned | InfeasibleError, other: Planned | InfeasibleError, baselines: Baselines
    ) -> Planned | InfeasibleError:
        if isinstance(own, InfeasibleError) and isinstance(other, InfeasibleError):
            return self._neither(own, other)
        if isinstance(other, InfeasibleError):
            return noted(own, f"{self.name} no plan fits")
        if isinstance(own, InfeasibleError):
            return noted(_beside(other, baselines()), f"{self.how}; without that no plan would fit")
        gain_ms = own.plan.predictions["autosac"].step_ms - other.plan.predictions["autosac"].step_ms
        if gain_ms <= 0:
            return noted(own, f"{self.name} the step would take {format_ms(-gain_ms)} longer")
        found = _beside(other, {name: p for name, p in own.plan.predictions.items() if name != "autosac"})
        return noted(found, f"{self.how}: the step is {format_ms(gain_ms)} shorter than without")

    def _neither(self, own: InfeasibleError, other: InfeasibleError) -> InfeasibleError:
        """What to say where no plan fits: of the step that needs less, which is that with the change if memory peaks there."""
        if own.peak_in == self.lowers:
            return InfeasibleError(f"{self.name} {other}", peak_in=other.peak_in)
        return InfeasibleError(f"{own}; nor does any {self.name}", peak_in=own.peak_in)


def may_gain(result: Planned | InfeasibleError) -> bool:
    """Whether there is anything to gain: no plan, or one that recomputes."""
    return isinstance(result, InfeasibleError) or result.plan.predictions["autosac"].recompute_ms > 0


def noted(result: Planned | InfeasibleError, note: str) -> Planned | InfeasibleError:
    """The result with one note more; an error as it is."""
    return result if isinstance(result, InfeasibleError) else replace(result, notes=(*result.notes, note))


def _beside(planned: Planned, baselines: Mapping[str, Prediction]) -> Planned:
    """The plan beside the job's own ways of checkpointing: those without the change, which it was not planned beside."""
    made_for, own = planned.plan.made_for, planned.plan.predictions["autosac"]
    fitting = {n: p for n, p in baselines.items() if p.peak_bytes(made_for.budget_kind) <= made_for.budget_bytes}
    if planned.plan.certainty is not None:  # of them it is not known whether they fit with that probability
        fitting = {}
    quicker = faster(own, fitting, planned.simulation.trace.info.compiled)
    notes = tuple(note for note in planned.notes if ALSO_FITS not in note)
    plan = replace(planned.plan, predictions={"autosac": own, **baselines})
    return replace(planned, plan=plan, notes=(*notes, *quicker))

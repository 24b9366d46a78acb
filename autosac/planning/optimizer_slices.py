"""Whether an optimizer works in slices (`autosac.integrations.optimizer_slices`).

Where a step's memory peaks in the optimizer, no policy of a module lowers it. If what the optimizer's functions for lists
return there is much, and less of it in slices, plans for the same step with slices compete. They cost launches, and no number
changes: nobody has to allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

from autosac.errors import CaptureError, InfeasibleError
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.memory_sim.tensor_sizes import dense_bytes
from autosac.planning.alternatives import Alternative, Baselines, may_gain
from autosac.planning.closed_loop import Goal, Planned, PlanningCaptures, make_plans, predictions_of
from autosac.plans import Prediction
from autosac.quantities import format_bytes
from autosac.trace import Phase, Trace

_OPTIMIZER = "optimizer"
_FOR_LISTS = "aten._foreach_"
_SLICED = Alternative(
    name=f"with the optimizer in slices of {format_bytes(OPTIMIZER_SLICE_BYTES)}",
    how=f"the optimizer works on {format_bytes(OPTIMIZER_SLICE_BYTES)} of the parameters at a time, which changes no number",
    lowers=_OPTIMIZER,
)


class Captures(PlanningCaptures, Protocol):
    """The captures that planning needs of a step."""

    def sliced(self) -> Self:
        """Captures of the same step whose optimizers work in slices, if they can."""


C = TypeVar("C", bound=Captures)


def temporary_bytes(trace: Trace) -> int:
    """The most that a function for lists of parameters returns at once, in the optimizer."""
    sizes = (
        sum(map(dense_bytes, trace.signatures[op.signature].outputs))
        for _, op in trace.operators()
        if op.phase is Phase.OPTIMIZER and trace.signatures[op.signature].name.startswith(_FOR_LISTS)
    )
    return max(sizes, default=0)


def in_slices(
    plain: Sequence[Planned | InfeasibleError],
    captures: Sequence[C],
    plan: Callable[[Sequence[C]], Sequence[Planned | InfeasibleError]],
    baselines: Baselines,
) -> tuple[Planned | InfeasibleError, ...]:
    """For each budget the better of the plan for the step as it is and of that with the optimizer in slices, which `plan`
    makes if that may gain anything. `captures`: of all stages; `baselines`: the job's own ways of checkpointing, as it is.
    """
    if not any(map(_may_gain, plain)):
        return tuple(plain)
    whole_bytes = temporary_bytes(captures[0].observed().trace)
    if whole_bytes <= 2 * OPTIMIZER_SLICE_BYTES:
        return tuple(plain)
    sliced = [stage.sliced() for stage in captures]
    try:
        left_bytes = temporary_bytes(sliced[0].observed().trace)
    except CaptureError:  # the step as it is has been captured
        return tuple(plain)
    if left_bytes >= whole_bytes:
        return tuple(plain)
    found = _SLICED.competing(plain, lambda: plan(sliced), baselines)
    return tuple(new if _may_gain(own) else own for own, new in zip(plain, found, strict=True))


def plan_also_in_slices(captures: Captures, goal: Goal, progress: Callable[[str], None]) -> Planned:
    """As `make_plan`, with the optimizer in slices if that is better."""

    def results(of: Sequence[Captures]) -> tuple[Planned | InfeasibleError, ...]:
        return make_plans(of[0], goal, (goal.budget_bytes,), progress)

    def baselines() -> dict[str, Prediction]:
        return predictions_of(captures.baselines())

    (planned,) = in_slices(results([captures]), [captures], results, baselines)
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned


def _may_gain(result: Planned | InfeasibleError) -> bool:
    if isinstance(result, InfeasibleError):
        return result.peak_in == _OPTIMIZER
    return may_gain(result) and result.simulation.memory.peak().outside == _OPTIMIZER

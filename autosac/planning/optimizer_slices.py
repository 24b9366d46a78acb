"""Whether an optimizer works in slices (`autosac.integrations.optimizer_slices`).

Where a step's memory peaks in the optimizer, no policy of a module lowers it. If what the optimizer's functions for lists
return there is much, plans for the same step with slices compete. They cost launches, and no number changes: nobody has to
allow it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosac.errors import InfeasibleError
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.memory_sim.tensor_sizes import dense_bytes
from autosac.planning.alternatives import Alternative, Baselines, Planning, may_gain
from autosac.planning.closed_loop import Planned
from autosac.quantities import format_bytes
from autosac.trace import Phase, Trace

_OPTIMIZER = "optimizer"
_FOR_LISTS = "aten._foreach_"
_SLICED = Alternative(
    name=f"with the optimizer in slices of {format_bytes(OPTIMIZER_SLICE_BYTES)}",
    how=f"the optimizer works on {format_bytes(OPTIMIZER_SLICE_BYTES)} of the parameters at a time, which changes no number",
    lowers=_OPTIMIZER,
)


def has_temporaries(trace: Trace) -> bool:
    """Whether a function for lists of parameters returns more than two slices, at once, in the optimizer."""
    sizes = (
        sum(map(dense_bytes, trace.signatures[op.signature].outputs))
        for _, op in trace.operators()
        if op.phase is Phase.OPTIMIZER and trace.signatures[op.signature].name.startswith(_FOR_LISTS)
    )
    return max(sizes, default=0) > 2 * OPTIMIZER_SLICE_BYTES


def in_slices(
    plain: Sequence[Planned | InfeasibleError], trace: Trace, plan: Planning, baselines: Baselines
) -> tuple[Planned | InfeasibleError, ...]:
    """For each budget the better of the plan for the step as it is and of that with the optimizer in slices, which `plan`
    makes if that may gain anything. `trace`: the step; `baselines`: the job's own ways of checkpointing, as it is.
    """
    if not any(map(_may_gain, plain)) or trace.info.optimizer_slice_bytes or not has_temporaries(trace):
        return tuple(plain)
    return _SLICED.competing(plain, plan, baselines)


def _may_gain(result: Planned | InfeasibleError) -> bool:
    if isinstance(result, InfeasibleError):
        return result.peak_in == _OPTIMIZER
    return may_gain(result) and result.simulation.memory.peak().outside == _OPTIMIZER

"""What a plan says of how good it is, and of what memory is worth."""

from __future__ import annotations

import math

from autosac.planning.candidates import Candidate

_NO_BOUND = "there is no bound on how far it is from the best plan"


def bound_notes(best: Candidate, gap: float | None, is_refuted: bool, is_uneven: bool = False) -> list[str]:
    """`gap`: by how much the plan is above the joint problem's bound at its peak, if that is told of. `is_refuted`: plans need
    less memory than that problem allows any. `is_uneven`: it knows of some modules what their executions take in the mean.
    """
    found = []
    what = "recomputation" if best.costs is None else "the step"
    if best.simulation.trace.info.compiled:
        found.append(f"{_NO_BOUND} of a compiled model")
    elif best.plan.offloads:
        found.append(f"{_NO_BOUND} that offloads")
    elif is_refuted:
        found.append(f"{_NO_BOUND}: plans need less memory than thought possible")
    elif is_uneven:
        found.append(f"{_NO_BOUND}: modules run on tensors of different sizes")
    elif gap == math.inf:  # where the optimizer's memory is the peak, say
        found.append("this peak of active memory needs no recomputation; it lowers what the allocator reserves")
    elif gap is not None:
        found.append(f"{what} is at most {gap:.1%} above the least possible at this peak (linear bound)")
    price_ms = 0.0 if best.solution is None else best.solution.budgets.shadow_ms_per_gib
    is_small = price_ms > best.simulation.recompute_ms and best.costs is None  # nobody can save more than all
    if is_small:
        found.append(f"1 MiB more would save about {price_ms / 1024:.3f} ms of {what}")
    elif price_ms > 0:
        found.append(f"1 GiB more would save about {price_ms:.1f} ms of {what}")
    return found

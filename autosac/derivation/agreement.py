"""Whether a step under checkpointing is another step's but for what checkpointing accounts for."""

from __future__ import annotations

from autosac.derivation.gathers import Aligned
from autosac.derivation.steps import CapturedSteps, NotDerivableError, Skeleton, Tables
from autosac.trace import Trace


def is_alike_outside(observed: Trace, other: Trace) -> bool:
    """Whether all rows of the step without checkpointing are in the other one, the same and in the same order, and it has no
    others than recomputations, ends of storages and autograd's bookkeeping.
    """
    try:
        steps = CapturedSteps(observed), CapturedSteps(other)
        tables = Tables([observed, other])
        Aligned(*(Skeleton(one, tables, position) for position, one in enumerate(steps)))
    except NotDerivableError:
        return False
    return True

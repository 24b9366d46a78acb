"""Whether a step under checkpointing is another step's but for what checkpointing accounts for."""

from __future__ import annotations

from autosac.derivation.gathers import Aligned
from autosac.derivation.steps import CapturedSteps, NotDerivableError, Skeleton, Tables
from autosac.trace import Trace


class UncheckpointedStep:
    """A step without checkpointing, which is looked for in several steps under checkpointing."""

    def __init__(self, observed: Trace) -> None:
        self._steps = CapturedSteps(observed)
        self._skeleton: Skeleton | None = None

    def is_in(self, other: Trace) -> bool:
        """Whether all rows of the step without checkpointing are in the other one, the same and in the same order, and it has
        no others than recomputations, ends of storages and autograd's bookkeeping.
        """
        try:
            tables = Tables([self._steps.trace, other])  # number the rows of the first one as it does
            self._skeleton = self._skeleton or Skeleton(self._steps, tables, 0)
            Aligned(self._skeleton, Skeleton(CapturedSteps(other), tables, 1))
        except NotDerivableError:
            return False
        return True

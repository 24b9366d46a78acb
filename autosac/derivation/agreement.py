"""Whether a step under checkpointing is another step's but for what checkpointing accounts for."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence

from autosac.derivation.gathers import Aligned
from autosac.derivation.steps import CapturedSteps, NotDerivableError, Skeleton, Tables
from autosac.trace import Alloc, Phase, Trace


class UncheckpointedStep:
    """A step without checkpointing, which is looked for in several steps under checkpointing."""

    def __init__(self, observed: Trace) -> None:
        self._steps = CapturedSteps(observed)
        self._skeleton: Skeleton | None = None

    def is_in(self, other: Trace) -> bool:
        """Whether all rows of the step without checkpointing are in the other one, the same and in the same order, it has no
        others than recomputations, ends of storages and autograd's bookkeeping, and all that the forward does not hold for the
        backward ends at the same places.
        """
        try:
            tables = Tables([self._steps.trace, other])  # number the rows of the first one as it does
            self._skeleton = self._skeleton or Skeleton(self._steps, tables, 0)
            skeleton = Skeleton(CapturedSteps(other), tables, 1)
            pairs = Aligned(self._skeleton, skeleton).pairs
        except NotDerivableError:
            return False
        return self._ends_in(skeleton, pairs)

    def _ends_in(self, other: Skeleton, pairs: Mapping[int, int]) -> bool:
        """Whether what begins in the recorded step ends there at the same places, between the same pairs of rows.

        Not what the forward holds for the backward, and not what ends in a recomputation, as FSDP's buffers may.
        """
        steps, others = self._steps, other.steps
        mine, theirs = sorted(pairs), sorted(pairs.values())
        for i, held in self._allocations(mine):
            end, its_end = steps.ends.get(steps.rows[i].storage), others.ends.get(others.rows[pairs[i]].storage)
            inside = its_end is not None and other.inside[its_end] >= 0
            if not held and not inside and _place(mine, end) != _place(theirs, its_end):
                return False
        return True

    def _allocations(self, rows: Sequence[int]) -> list[tuple[int, bool]]:
        """The recorded step's allocations, and whether the forward holds them for the backward."""
        steps = self._steps
        storages = steps.trace.storages
        allocations = [i for i in rows if i >= steps.split and type(steps.rows[i]) is Alloc]
        phases = [storages[steps.rows[i].storage].phase for i in allocations]

        def is_held(i: int, phase: Phase) -> bool:
            end = steps.ends.get(steps.rows[i].storage)
            return phase is Phase.FORWARD and (end is None or phases[bisect(allocations, end) - 1] is not Phase.FORWARD)

        return [(i, is_held(i, phase)) for i, phase in zip(allocations, phases, strict=True)]


def _place(rows: Sequence[int], end: int | None) -> int | None:
    """Before which of these rows a storage ends; None if it does not."""
    return None if end is None else bisect(rows, end)

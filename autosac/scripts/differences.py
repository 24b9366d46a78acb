"""Steps of a script that differ from the one that is reported: a curriculum, layers that thaw, an evaluation between steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autosac.quantities import format_bytes

_MUCH = 1.05  # ragged batches, and losses that live a little longer, are no news
_FEW = 0.02  # of a step's calls: they are not worth pricing it again


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step took. `step_ms` is None if it was not priced: then it does what the reported one does."""

    number: int
    peak_bytes: int
    step_ms: float | None


class StepDifferences:
    """Compares the steps after the reported one with it."""

    def __init__(self) -> None:
        self._reported: StepSize | None = None
        self._calls: Counter[int] = Counter()
        self._calls_before: Counter[int] = Counter()
        self._later: list[StepSize] = []

    def report(self, size: StepSize, calls: Counter[int], before: Counter[int]) -> None:
        """The step that is reported has ended. `calls` counts its operators by kind, `before` those up to its update."""
        self._reported, self._calls, self._calls_before = size, calls, before
        self._later = []

    def are_many(self, calls: Counter[int], *, ended: bool = True) -> bool:
        """Whether a later step calls so much else that its time is another one. One that has not `ended` has made its update:
        what the reported step called after that may still come.
        """
        if self._reported is None:
            return False
        expected = self._calls if ended else self._calls_before
        others = (calls - self._calls).total() + (expected - calls).total()
        return others > _FEW * self._calls.total()

    def add(self, size: StepSize) -> None:
        """A later step has ended."""
        if self._reported is not None:
            self._later.append(size)

    def notes(self) -> list[str]:
        """What the user should know."""
        found: list[str] = []
        reported = self._reported
        if reported is None or not self._later:
            return found
        largest = max(self._later, key=lambda size: size.peak_bytes)
        longest = max(self._later, key=lambda size: size.step_ms or 0.0)
        if largest.peak_bytes > _MUCH * reported.peak_bytes:
            found.append(
                f"steps differ: step {largest.number} needs {format_bytes(largest.peak_bytes)} of active memory, the "
                f"reported step {format_bytes(reported.peak_bytes)}"
            )
        if longest.step_ms is None or reported.step_ms is None:
            return found
        differ = f"steps differ: step {longest.number} takes {longest.step_ms:,.1f} ms, the reported step "
        differ += f"{reported.step_ms:,.1f} ms"
        if longest.step_ms > _MUCH * reported.step_ms:
            found.append(f"{differ}; if they alternate, --optimizer-steps N takes N as one")
        elif self._are_all_shorter(reported.step_ms):
            found.append(f"{differ} (which may evaluate, save a checkpoint, or have a larger batch)")
        return found

    def _are_all_shorter(self, reported_ms: float) -> bool:
        """Whether no later step takes as long as the reported one."""
        return all(size.step_ms is not None and _MUCH * size.step_ms < reported_ms for size in self._later)

"""Steps of a script that differ from the one that is reported: a curriculum, layers that thaw, an evaluation between steps."""

from __future__ import annotations

from dataclasses import dataclass

_MUCH = 1.05  # ragged batches, and losses that live a little longer, are no news
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step took."""

    number: int
    operators: int
    peak_bytes: int


class StepDifferences:
    """Compares the steps after the reported one with it."""

    def __init__(self) -> None:
        self._reported: StepSize | None = None
        self._longest: StepSize | None = None
        self._largest: StepSize | None = None

    def report(self, size: StepSize) -> None:
        """The step that is reported has ended."""
        self._reported = self._longest = self._largest = size

    def add(self, size: StepSize) -> None:
        """A later step has ended."""
        if self._longest is not None and size.operators > self._longest.operators:
            self._longest = size
        if self._largest is not None and size.peak_bytes > self._largest.peak_bytes:
            self._largest = size

    def notes(self) -> list[str]:
        """What the user should know."""
        reported, longest, largest = self._reported, self._longest, self._largest
        found: list[str] = []
        if reported is None or longest is None or largest is None:
            return found
        if largest.peak_bytes > _MUCH * reported.peak_bytes:
            found.append(
                f"steps differ: step {largest.number} needs {largest.peak_bytes / _GIB:.2f} GiB of active memory, the "
                f"reported step {reported.peak_bytes / _GIB:.2f} GiB"
            )
        if longest.operators > _MUCH * reported.operators:
            found.append(
                f"steps differ: step {longest.number} runs {longest.operators} operators, the reported step "
                f"{reported.operators}; for the script each takes as long as the reported step"
            )
        return found

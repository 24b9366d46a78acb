"""Steps of a script that differ from the one that is reported: a curriculum, layers that thaw, an evaluation between steps."""

from __future__ import annotations

from dataclasses import dataclass

from autosac.quantities import format_bytes

_MUCH = 1.05  # ragged batches, and losses that live a little longer, are no news


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step took."""

    number: int
    operators: int
    peak_bytes: int


class StepDifferences:
    """Compares the steps after the reported one with it."""

    def __init__(self) -> None:
        self._sizes: list[StepSize] = []  # the reported step's first

    def report(self, size: StepSize) -> None:
        """The step that is reported has ended."""
        self._sizes = [size]

    def add(self, size: StepSize) -> None:
        """A later step has ended."""
        if self._sizes:
            self._sizes.append(size)

    def notes(self) -> list[str]:
        """What the user should know."""
        found: list[str] = []
        if not self._sizes:
            return found
        reported = self._sizes[0]
        largest = max(self._sizes, key=lambda size: size.peak_bytes)
        longest = max(self._sizes, key=lambda size: size.operators)
        if largest.peak_bytes > _MUCH * reported.peak_bytes:
            found.append(
                f"steps differ: step {largest.number} needs {format_bytes(largest.peak_bytes)} of active memory, the "
                f"reported step {format_bytes(reported.peak_bytes)}"
            )
        if longest.operators > _MUCH * reported.operators:
            found.append(
                f"steps differ: step {longest.number} runs {longest.operators} operators, the reported step "
                f"{reported.operators}; for the script each takes as long as the reported step"
            )
        return found

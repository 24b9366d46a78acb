"""What cannot be made to fit rules out what needs more memory.

If a layout cannot be made to fit, neither can one that differs from it only in ways that take memory (`is_larger`), if both
accumulate gradients or neither does: a larger microbatch keeps at least as much of every tensor (a pipeline holds
min(microbatches, stages) of them, which never becomes fewer sequences); more replicas of fewer shards leave each GPU more of
the states and of the reduced gradients, and gather as much; parameters that stay gathered take what those do that are freed.

All of that is of a rank with the same layers. Balanced stages follow from the microbatch and the memory: one layout may have a
rank with more layers than another, which needs more memory for that reason alone. So their stages are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autosac.configurations.space.layout import Layout

_KEPT = {"always": 0, "default": 1, "never": 2}  # the more, the more parameters stay gathered


class TooLarge:
    """The layouts that cannot be made to fit. `stage_layers`: how many layers each pipeline stage of a layout has."""

    def __init__(self, stage_layers: Callable[[Layout], tuple[int, ...]]) -> None:
        self._stage_layers = stage_layers
        self._layouts: list[Layout] = []

    def note(self, layout: Layout) -> None:
        """It cannot be made to fit."""
        self._layouts.append(layout)

    def rules_out(self, layout: Layout) -> bool:
        """Whether a layout needs the memory of one of them at least."""
        return any(
            is_larger(layout, other) and self._stage_layers(layout) == self._stage_layers(other)
            for other in self._layouts
        )


def is_larger(layout: Layout, other: Layout) -> bool:
    """Whether a layout needs the memory of another one at least if its stages have the same layers. See the module."""

    def without(one: Layout) -> Layout:
        return replace(one, microbatch=0, replicate=0, shard=0, reshard="")

    return (
        layout.microbatch >= other.microbatch
        and layout.replicate % other.replicate == 0
        and (layout.shard * layout.context > 1 or layout.shard == other.shard)
        and _KEPT[layout.reshard] >= _KEPT[other.reshard]
        and (layout.microbatches > 1) == (other.microbatches > 1)
        and without(layout) == without(other)
    )

"""In which order layouts are taken."""

from __future__ import annotations

import math

from autosac.configurations.space.layout import Layout

_PUT_OFF = 0.02


def preferred(layout: Layout) -> tuple[int, ...]:
    """The key by which layouts are sorted: of equally good ones the first is taken, which divides least."""
    return layout.tensor * layout.context, layout.pipeline, layout.expert, layout.replicate, -layout.microbatch


def put_off(layout: Layout, bound: float) -> float:
    """The bound, longer by 2 % for each doubling of what has to be captured and simulated of a layout: one rank of each stage,
    with all microbatches. So the best is known early, and deep pipelines whose bounds are above it are never worked out.
    """
    return bound * (1 + _PUT_OFF * math.log2(layout.pipeline * (layout.microbatches if layout.pipeline > 1 else 1)))

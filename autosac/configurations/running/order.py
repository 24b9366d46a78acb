"""In which order layouts are taken."""

from __future__ import annotations

import math

from autosac.configurations.space.layout import Layout

REACHED = 0.75
"""Of the memory that a large model's step needs under full checkpointing, by memory bounds."""
_PUT_OFF = 0.02
_LIKELY = 1.5


def preferred(layout: Layout) -> tuple[int, ...]:
    """The key by which layouts are sorted: of equally good ones the first is taken, which divides least, and then that with
    the fewest settings that a job does not have by itself.
    """
    unusual = (
        layout.compile,
        layout.async_tensor,
        layout.float8,
        layout.optimizer != "fused",
        layout.cpu_offload,
        layout.activation_offload,
        layout.chunk_loss,
    )
    divided = layout.tensor * layout.context, layout.pipeline, layout.expert, layout.replicate, -layout.microbatch
    return *divided, sum(unusual)


def put_off(layout: Layout, bound: float, likely: float) -> float:
    """By what layouts are taken, the least first: what their steps may well be, if that is known to be longer than the bound
    (at most by a half: it is a guess), and longer by 2 % for each doubling of what has to be captured and simulated of a
    layout: one rank of each stage, with all microbatches. So a good one is known early, and deep pipelines whose bounds are
    above it are never worked out.
    """
    work = layout.pipeline * (layout.microbatches if layout.pipeline > 1 else 1)
    return max(bound, min(likely, _LIKELY * bound)) * (1 + _PUT_OFF * math.log2(work))

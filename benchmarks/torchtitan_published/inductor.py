"""What Inductor fused when the published runs were made, where this torch fuses more."""

from __future__ import annotations

from torch._inductor import config

_REORDERING = ("loop_ordering_after_fusion", "loop_reindexing_after_fusion", "mix_order_reduction")


def reorder_loops(reorders: bool) -> None:
    """Whether loops are put into another order to fuse more, in this process: by default since 2025-09-22 (pytorch's pull
    request 162030). What builds on that is younger.
    """
    for settings in (config, config.triton):
        for name in _REORDERING:
            if hasattr(settings, name):
                setattr(settings, name, reorders)

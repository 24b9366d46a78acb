"""How many captures can run at once."""

from __future__ import annotations

import os


def available_processors() -> int:
    """The processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(affinity(0)) if affinity else os.cpu_count() or 1

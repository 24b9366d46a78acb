"""Plans for tests that do not care what they were made for. Test modules import this as ``plans``."""

from __future__ import annotations

import torch

from autosac.plans import MadeFor, Prediction

MADE_FOR = MadeFor(
    job_fingerprint="",
    model="",
    torch_version=torch.__version__,
    torchtitan_version="",
    gpu="",
    world_size=1,
    budget_bytes=1,
    budget_kind="active",
)
"""No job in particular."""
LLAMA_8B = MadeFor(
    job_fingerprint="f00",
    model="llama3 8B",
    torch_version="2.13.0",
    torchtitan_version="0.2.2",
    gpu="h100-sxm-80gb",
    world_size=8,
    budget_bytes=40 * 2**30,
    budget_kind="reserved",
)
"""One whose names are shown."""


def prediction(
    step_ms: float, gib: float, *, more_reserved_gib: int | None = 0, fits: bool = True, recompute_ms: float = 1.0
) -> Prediction:
    """A step of this time and peak; with None it is not said what is reserved."""
    peak_bytes = int(gib * 2**30)
    return Prediction(
        step_ms=step_ms,
        peak_active_bytes=peak_bytes,
        peak_reserved_bytes=None if more_reserved_gib is None else peak_bytes + more_reserved_gib * 2**30,
        fits=fits,
        recompute_ms=recompute_ms,
    )

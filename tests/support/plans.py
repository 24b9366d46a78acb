"""Plans for tests that do not care what they were made for. Test modules import this as ``plans``."""

from __future__ import annotations

import torch

from autosac.plans import MadeFor

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

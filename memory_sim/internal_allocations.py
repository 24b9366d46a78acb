"""Temporaries that CUDA implementations of operators allocate and free within the call."""

from __future__ import annotations

from autosac.trace import Signature


def internal_allocations(signature: Signature, sm_count: int) -> tuple[int, ...]:
    """Sizes in bytes of the blocks that are alive together inside the operator; () if it allocates none."""
    return ()

"""What a plan says of memory that is reserved and that nobody uses."""

from __future__ import annotations

from autosac.memory_sim import Cause, IdleMemory
from autosac.quantities import format_bytes

# Less than this share of what is reserved is not worth a line.
_IDLE_SHARE = 0.02


def idle_notes(idle: IdleMemory) -> list[str]:
    """By cause, what the allocator holds without use at the reserved peak; nothing if that is little."""
    if idle.idle_bytes < _IDLE_SHARE * idle.reserved_bytes:
        return []
    total: dict[Cause, int] = {}
    for part in idle.parts:
        total[part.cause] = total.get(part.cause, 0) + part.nbytes
    causes = ", ".join(f"{format_bytes(nbytes)} {cause.value}" for cause, nbytes in total.items() if nbytes >= 2**20)
    return [f"{format_bytes(idle.idle_bytes)} of the reserved memory is free but cannot be used: {causes}"]

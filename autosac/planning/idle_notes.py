"""What a plan says of memory that is reserved and that nobody uses."""

from __future__ import annotations

from autosac.memory_sim import Cause, IdleMemory
from autosac.quantities import format_bytes

# Less than this share of what is reserved is not worth a line.
_IDLE_SHARE = 0.02


def idle_notes(idle: IdleMemory) -> list[str]:
    """By cause, what the allocator holds without use at the reserved peak; nothing if that is little.

    Where most of it is used later, what counts is by how much the reserved peak is above the active one.
    """
    never_active_bytes = idle.reserved_bytes - idle.active_peak_bytes
    if min(idle.idle_bytes, never_active_bytes) < _IDLE_SHARE * idle.reserved_bytes:
        return []
    total: dict[Cause, int] = {}
    for part in idle.parts:
        total[part.cause] = total.get(part.cause, 0) + part.nbytes
    causes = ", ".join(f"{format_bytes(nbytes)} {cause.value}" for cause, nbytes in total.items() if nbytes >= 2**20)
    if idle.idle_bytes > 2 * never_active_bytes:
        return [
            f"{format_bytes(never_active_bytes)} more is reserved than is ever active: when the last of it was reserved, free "
            f"memory could not be used, {causes}"
        ]
    return [f"{format_bytes(idle.idle_bytes)} of the reserved memory is free but cannot be used: {causes}"]

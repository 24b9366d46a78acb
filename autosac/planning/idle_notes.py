"""What a plan says of memory that is reserved and that nobody uses."""

from __future__ import annotations

from autosac.memory_sim import Cause, IdleMemory
from autosac.quantities import format_bytes
from autosac.simulation import Simulation

# Less than this share of what is reserved is not worth a line.
_IDLE_SHARE = 0.02


def reserved_notes(simulation: Simulation) -> list[str]:
    """What it holds without use, and how much less it would reserve with expandable segments, where they are not on."""
    found = idle_notes(simulation.idle)
    target = simulation.target.with_expandable_segments
    if not found or target is None:
        return found
    reserved_bytes = simulation.on(target).peak_reserved_bytes
    if reserved_bytes > (1 - _IDLE_SHARE) * simulation.peak_reserved_bytes:
        return found
    how = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return [*found, f"with {how} the same plan would reserve {format_bytes(reserved_bytes)}; set that and plan again"]


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

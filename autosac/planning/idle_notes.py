"""What a plan, or the refusal of a budget, says of memory that is reserved and that nobody uses."""

from __future__ import annotations

from autosac.memory_sim import Cause, IdleMemory
from autosac.planning.planner import Goal
from autosac.quantities import format_bytes, format_enough_bytes
from autosac.simulation import TITAN_ALLOCATOR, Simulation

# Less than this share of what is reserved is not worth a line.
_IDLE_SHARE = 0.02
_HOW = f"PYTORCH_CUDA_ALLOC_CONF={TITAN_ALLOCATOR}"


def reserved_notes(simulation: Simulation) -> list[str]:
    """What it holds without use, and how much less it would reserve with expandable segments, where they are not on."""
    found = idle_notes(simulation.idle)
    reserved_bytes = _with_expandable_segments(simulation) if found else None
    if reserved_bytes is None or reserved_bytes > (1 - _IDLE_SHARE) * simulation.peak_reserved_bytes:
        return found
    return [*found, f"with {_HOW} the same plan would reserve {format_bytes(reserved_bytes)}; set that and plan again"]


def fitting_hint(smallest: Simulation, goal: Goal) -> tuple[str, ...]:
    """That the smallest plan, which is too large, meets a budget of reserved memory with expandable segments, if it does."""
    reserved_bytes = _with_expandable_segments(smallest) if goal.budget_kind == "reserved" else None
    if reserved_bytes is None or reserved_bytes > goal.budget_bytes:
        return ()
    return (f"with {_HOW} it would fit: {format_enough_bytes(reserved_bytes)} would be reserved",)


def _with_expandable_segments(simulation: Simulation) -> int | None:
    """What would be reserved; None where they are on, or PyTorch has none."""
    target = simulation.target.with_expandable_segments
    return None if target is None else simulation.on(target).peak_reserved_bytes


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

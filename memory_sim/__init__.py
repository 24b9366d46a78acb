"""Memory over a training step: allocated bytes, the caching allocator's reserved bytes, OOM."""

from autosac.memory_sim.allocator_config import AllocatorConfig
from autosac.memory_sim.attribution import LiveStorage, ModuleShare, PeakReport
from autosac.memory_sim.categories import Category
from autosac.memory_sim.idle import Cause, IdleMemory, IdlePart, idle_memory
from autosac.memory_sim.modules import ModuleSpan
from autosac.memory_sim.replay import AllocatorReport, Outcome, Verdict, replay_allocator
from autosac.memory_sim.timeline import MemoryTimeline, simulate_memory
from autosac.memory_sim.workspaces import WorkspaceModel

__all__ = [
    "AllocatorConfig",
    "AllocatorReport",
    "Category",
    "Cause",
    "IdleMemory",
    "IdlePart",
    "LiveStorage",
    "MemoryTimeline",
    "ModuleShare",
    "ModuleSpan",
    "Outcome",
    "PeakReport",
    "Verdict",
    "WorkspaceModel",
    "idle_memory",
    "replay_allocator",
    "simulate_memory",
]

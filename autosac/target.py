"""The GPU that a capture stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGPU:
    """What a program can ask of its GPU, and what decides which kernels CUDA would dispatch."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * 2**30
    compute_capability: tuple[int, int] = (9, 0)
    sm_count: int = 132
    l2_bytes: int = 50 * 2**20

    def properties(self) -> dict[str, Any]:
        """By the names of `torch.cuda.get_device_properties`."""
        major, minor = self.compute_capability
        return {
            "name": self.name,
            "total_memory": self.memory_bytes,
            "major": major,
            "minor": minor,
            "multi_processor_count": self.sm_count,
            "L2_cache_size": self.l2_bytes,
        }

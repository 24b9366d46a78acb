"""The GPU that a capture stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class _Limits(NamedTuple):
    """What one multiprocessor holds: threads, and bytes of shared memory, of which one block takes `block_bytes` at most."""

    threads: int
    shared_bytes: int
    block_bytes: int


_KIB = 2**10
WARP = 32
"""Threads that run in step."""
# By compute capability, as in the CUDA C++ programming guide and AMD's CDNA papers; the last one that is not above a GPU's.
_LIMITS = {
    (7, 0): _Limits(2048, 96 * _KIB, 96 * _KIB),
    (7, 5): _Limits(1024, 64 * _KIB, 64 * _KIB),
    (8, 0): _Limits(2048, 164 * _KIB, 163 * _KIB),
    (8, 6): _Limits(1536, 100 * _KIB, 99 * _KIB),
    (9, 0): _Limits(2048, 228 * _KIB, 227 * _KIB),
    (9, 4): _Limits(2048, 64 * _KIB, 64 * _KIB),
    (9, 5): _Limits(2048, 160 * _KIB, 160 * _KIB),
    (10, 0): _Limits(2048, 228 * _KIB, 227 * _KIB),
    (12, 0): _Limits(1536, 100 * _KIB, 99 * _KIB),
}


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
        limits = _LIMITS[max((known for known in _LIMITS if known <= self.compute_capability), default=min(_LIMITS))]
        return {
            "name": self.name,
            "total_memory": self.memory_bytes,
            "major": major,
            "minor": minor,
            "multi_processor_count": self.sm_count,
            "L2_cache_size": self.l2_bytes,
            "max_threads_per_multi_processor": limits.threads,
            "shared_memory_per_multiprocessor": limits.shared_bytes,
            "shared_memory_per_block_optin": limits.block_bytes,
            # The same for every GPU since Volta.
            "warp_size": WARP,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_block": 1024,
            "shared_memory_per_block": 48 * _KIB,
            "gcnArchName": "",
        }

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; older ones convert."""
        return self.compute_capability >= (8, 0)

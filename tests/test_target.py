"""The GPU that captures stand for."""

from __future__ import annotations

import pytest

from autosac.simulation import Target
from autosac.target import TargetGPU


def test_the_default_is_the_h100_of_the_profiles() -> None:
    """What a program can ask of it, by PyTorch's names, is what NVIDIA states for an H100 SXM and its profile has."""
    assert TargetGPU().properties() == {
        "name": "NVIDIA H100 80GB HBM3",
        "total_memory": 85899345920,
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 52428800,
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 228 * 1024,
        "shared_memory_per_block_optin": 227 * 1024,
        "warp_size": 32,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_block": 1024,
        "shared_memory_per_block": 48 * 1024,
        "gcnArchName": "",
    }
    own = Target.of("h100-sxm-80gb", 1).gpu
    assert (own.compute_capability, own.sm_count, own.l2_bytes) == ((9, 0), 132, 52428800)


@pytest.mark.parametrize(
    ("gpu", "threads", "shared_kib", "block_kib"),
    [
        ("v100-sxm2-16gb", 2048, 96, 96),
        ("t4", 1024, 64, 64),
        ("a100-sxm-80gb", 2048, 164, 163),
        ("rtx-3090", 1536, 100, 99),
        ("rtx-4090", 1536, 100, 99),
        ("b200-sxm-180gb", 2048, 228, 227),
        ("rtx-5090", 1536, 100, 99),
    ],
)
def test_what_a_multiprocessor_holds(gpu: str, threads: int, shared_kib: int, block_kib: int) -> None:
    """By compute capability, as the CUDA programming guide states it; 8.9 has no line of its own and is as 8.6."""
    properties = Target.of(gpu, 1).gpu.properties()
    assert properties["max_threads_per_multi_processor"] == threads
    assert properties["shared_memory_per_multiprocessor"] == shared_kib * 1024
    assert properties["shared_memory_per_block_optin"] == block_kib * 1024

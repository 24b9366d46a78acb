"""The GPU that captures stand for."""

from __future__ import annotations

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
    }
    own = Target.of("h100-sxm-80gb", 1).gpu
    assert (own.compute_capability, own.sm_count, own.l2_bytes) == ((9, 0), 132, 52428800)

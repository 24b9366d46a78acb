"""Recognising the machine's GPU from what CUDA reports of it."""

from __future__ import annotations

import pytest

from autosac.errors import UsageError
from autosac.estimator.gpu import match_gpu
from autosac.estimator.hardware import known_hardware, load_hardware

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "capability", "sm_count", "gib", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.15, "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", (8, 0), 108, 79.15, "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 39.39, "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", (9, 0), 114, 79.1, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", (9, 0), 132, 93.1, "h100-nvl-94gb"),
        ("NVIDIA H100", (9, 0), 132, 95.0, "h100-sxm-96gb-meta"),
        ("NVIDIA H200", (9, 0), 132, 139.8, "h200-sxm-141gb"),
    ],
)
def test_devices_as_cuda_names_them(
    name: str, capability: tuple[int, int], sm_count: int, gib: float, profile: str
) -> None:
    """Names, multiprocessors and memory as PyTorch reports them for real devices."""
    assert match_gpu(name, capability, sm_count, int(gib * GIB)) == profile


def test_every_profile_recognises_itself() -> None:
    """A device with a profile's name and properties is that profile."""
    for profile in map(load_hardware, known_hardware()):
        found = match_gpu(profile.name, profile.compute_capability, profile.sm_count, profile.usable_bytes)
        assert found == profile.name


def test_an_unknown_device_is_refused() -> None:
    """A P100, or an A100 slice with half of its memory, is no profile; the message says what the machine has."""
    with pytest.raises(UsageError, match=r"Tesla P100-PCIE-16GB \(56 multiprocessors, 15\.9 GiB\): name one"):
        match_gpu("Tesla P100-PCIE-16GB", (6, 0), 56, int(15.9 * GIB))
    with pytest.raises(UsageError, match="known are a100-pcie-40gb"):
        match_gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42, int(39.4 * GIB))

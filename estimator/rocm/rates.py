"""Rates that the kernels of AMD's GPUs have in common."""

from __future__ import annotations

from autosac.estimator.hardware import Hardware
from autosac.estimator.work import STREAMED


def bytes_per_us(hardware: Hardware) -> float:
    """What streams from and to memory: the profile's share of the peak."""
    return dict(hardware.efficiency).get("memory", STREAMED) * hardware.mem_bandwidth_gbps * 1e3

"""The machine that is calibrated: what can be asked of it, and what identifies it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from autosac.errors import UsageError

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Machine:
    """A CPU with so many threads, or the current CUDA device. Nothing touches the device before it is asked for."""

    device: str
    threads: int

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device {self.device!r}: expected cuda or cpu")
        if self.threads < 1:
            raise UsageError(f"threads must be at least 1, not {self.threads}")

    @property
    def torch_device(self) -> torch.device:
        """The device as PyTorch calls it."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    @cached_property
    def name(self) -> str:
        """The device's name as its maker gives it."""
        if self.device == "cuda":
            return str(torch.cuda.get_device_name())
        return _cpu_fact("model name") or platform.processor() or platform.machine() or "CPU"

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        if self.device == "cuda":
            return int(torch.cuda.get_device_properties(self.torch_device).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        """What of it may be used now."""
        if self.device == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
        try:
            lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
            available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) * 1024
        except (OSError, StopIteration):
            return self.total_bytes // 2

    @property
    def clock_mhz(self) -> float:
        """The processors' clock; 1000 where the system does not tell."""
        if self.device == "cuda":
            return float(getattr(torch.cuda.get_device_properties(self.torch_device), "clock_rate", 1_000_000)) / 1000
        return float(_cpu_fact("cpu MHz") or 1000.0)

    @property
    def cache_bytes(self) -> int:
        """The last cache before memory."""
        if self.device == "cuda":
            return int(torch.cuda.get_device_properties(self.torch_device).L2_cache_size)
        sizes = [_cache_bytes(path) for path in sorted(_CACHES.glob("index*/size"))]
        return max(sizes, default=_DEFAULT_CACHE_BYTES) or _DEFAULT_CACHE_BYTES

    @property
    def identity(self) -> dict[str, Any]:
        """What a journal must agree with."""
        return {"device": self.device, "name": self.name, "threads": self.threads, "torch": torch.__version__}

    @property
    def about(self) -> dict[str, Any]:
        """What a profile says of where it comes from."""
        cuda = {"cuda": torch.version.cuda} if self.device == "cuda" else {}
        return self.identity | {"python": platform.python_version(), "system": platform.system()} | cuda


def _cpu_fact(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _cache_bytes(path: Path) -> int:
    text = path.read_text(encoding="utf-8").strip()
    units = {"K": 2**10, "M": 2**20}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else 0

"""Which of the known GPU profiles is the GPU of this machine.

A profile is a candidate if compute capability and number of multiprocessors are equal and the memory agrees
within 3 % (drivers and ECC settings differ by less). Of several (an A100 with SXM or PCIe interface), the one
that shares most words of its name with the device's is taken, then the nearest in memory.
"""

from __future__ import annotations

from autosac.errors import UsageError
from autosac.estimator.hardware import known_hardware, load_hardware

_TOLERANCE = 0.03


def detect_gpu() -> str:
    """The profile of the current CUDA device.

    UsageError if there is no device or none of the profiles is of it.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("this machine has no GPU: name the one to plan for")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return match_gpu(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
    )


def match_gpu(name: str, capability: tuple[int, int], sm_count: int, total_bytes: int) -> str:
    """The profile of a device with these properties, as CUDA reports them.

    UsageError if none of them is of it.
    """
    words = name.lower().replace("-", " ")
    candidates = []
    for profile in map(load_hardware, known_hardware()):
        difference = abs(profile.usable_bytes - total_bytes)
        if (
            profile.compute_capability == capability
            and profile.sm_count == sm_count
            and difference <= _TOLERANCE * total_bytes
        ):
            shared = sum(word in words for word in profile.name.split("-"))
            candidates.append((-shared, difference, profile.name))
    if not candidates:
        raise UsageError(
            f"no GPU profile matches {name} ({sm_count} multiprocessors, "
            f"{total_bytes / 2**30:.1f} GiB): name one, or a profile file; known are {', '.join(known_hardware())}"
        )
    return min(candidates)[2]

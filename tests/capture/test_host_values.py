"""Work of a captured job that stays on the host: its values are real, and those of the job by itself."""

from __future__ import annotations

from typing import Any

import torch

from autosac.capture.device.mode import SimulatedDeviceMode


class Nothing:
    """No work is done on the device."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_kernels_that_make_conjugates() -> None:
    """A pseudo-inverse of complex numbers: a dispatch mode leaves out what resolves conjugates inside of its kernel."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.complex64)
    wanted = torch.linalg.pinv(x)
    with SimulatedDeviceMode("cuda", Nothing()):
        found = torch.linalg.pinv(x)
    assert torch.equal(found, wanted)

"""What programs ask of `torch.cuda` besides training, asked without a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosac.capture.cuda.functions import CUDA_VERSION, compiled_version, cuda_version
from autosac.capture.cuda.surface import monitors, runtime, tuning


def test_monitors_show_the_memory_that_is_used() -> None:
    """Of 100 bytes 30 are free, then 20; the GPU is busy, with a device named or not."""
    free = [30]
    cuda: Any = SimpleNamespace()
    monitors(cuda, lambda: free[0], 100)
    assert cuda.device_memory_used() == 70
    free[0] = 20
    assert cuda.device_memory_used(0) == 80
    assert cuda.utilization() == cuda.utilization(0) == cuda.memory_usage() == 100


@pytest.mark.parametrize("name", ["temperature", "power_draw", "clock_rate"])
def test_what_nobody_knows_is_refused(name: str) -> None:
    """With its name in words."""
    cuda: Any = SimpleNamespace()
    monitors(cuda, lambda: 0, 1)
    with pytest.raises(NotImplementedError, match=f"has no {name.replace('_', ' ')}"):
        getattr(cuda, name)(0)


def test_the_runtime_succeeds() -> None:
    """Calls return success, memory is what there is, and errors have their texts."""
    cuda: Any = runtime(lambda: 3, 7)
    assert cuda.cudaMemGetInfo() == cuda.cudaMemGetInfo(0) == (3, 7)
    assert cuda.cudaProfilerStart() == cuda.cudaHostRegister(1, 2, 3) == cuda.cudaError.success == 0
    texts = [cuda.cudaGetErrorString(cuda.cudaError(code)) for code in (0, 2, 34, 99)]
    assert texts == ["no error", "out of memory", "device not ready", "unknown error"]


def test_settings_of_tunable_operators_are_kept() -> None:
    """PyTorch's defaults, then what was set."""
    found = {name.removeprefix("_cuda_"): function for name, function in tuning().items()}
    ask = {name: function for name, function in found.items() if name.startswith("tunableop_")}
    assert (ask["tunableop_is_enabled"](), ask["tunableop_tuning_is_enabled"]()) == (False, True)
    assert (ask["tunableop_get_max_tuning_duration"](), ask["tunableop_get_max_tuning_iterations"]()) == (30, 100)
    assert (ask["tunableop_get_filename"](), ask["tunableop_get_rotating_buffer_size"]()) == ("", 0)
    ask["tunableop_enable"](True)
    ask["tunableop_tuning_enable"](False)
    ask["tunableop_set_max_tuning_duration"](5)
    ask["tunableop_set_filename"]("a.csv", True)
    assert (ask["tunableop_is_enabled"](), ask["tunableop_tuning_is_enabled"]()) == (True, False)
    assert (ask["tunableop_get_max_tuning_duration"](), ask["tunableop_get_filename"]()) == (5, "a.csv")
    assert ask["tunableop_get_results"]() == ask["tunableop_get_validators"]() == ()
    assert ask["tunableop_read_file"]("a.csv") and ask["tunableop_write_file"]()
    assert ask["tunableop_write_file_on_exit"](True) is None
    assert not found["record_untuned_is_enabled"]()
    found["record_untuned_enable"](True)
    assert found["record_untuned_is_enabled"]()


@pytest.mark.parametrize(
    ("of_build", "version", "number"),
    [(None, CUDA_VERSION, 13000), ("12.6", "12.6", 12060), ("13.2.1", "13.2.1", 13020)],
)
def test_the_version_of_cuda_is_the_builds(
    monkeypatch: pytest.MonkeyPatch, of_build: str | None, version: str, number: int
) -> None:
    """Torchvision refuses to be imported beside another one; a build without CUDA has that of the usual wheels."""
    monkeypatch.setattr(torch.version, "cuda", of_build)
    assert (cuda_version(), compiled_version()) == (version, number)

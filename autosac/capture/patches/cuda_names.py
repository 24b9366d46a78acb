"""What a training step calls ``cuda`` is the simulated GPU.

`make_step` gets a device of another name (`autosac.capture.device.device`), but code says ``torch.autocast("cuda")`` and
``.cuda()`` all the same. On a machine without CUDA autocast and GradScaler of that name switch themselves off with a warning:
the step would be simulated in float32. `torch.cuda.is_available` stays False: PyTorch's own code asks it, and would take the
simulated GPU for a real one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from autosac.capture.device.device import CUDA, DEVICE_TYPE, called_cuda
from autosac.capture.patches.registry import Patched, patch

# What torch.cuda and the simulated device's module both have, and code that trains calls.
_CALLS = (
    *("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize", "empty_cache"),
    *("get_device_name", "get_device_capability", "get_device_properties", "mem_get_info", "is_bf16_supported"),
    *("memory_stats", "reset_peak_memory_stats", "ipc_collect", "set_device", "device"),
)


def _renames(capture: Patched) -> bool:
    return capture.mode.target == DEVICE_TYPE


def _gpu() -> torch.device:
    return torch.device(DEVICE_TYPE, 0)


@patch("torch.amp:GradScaler.__init__")
def cuda_grad_scalers(capture: Patched) -> None:
    """``GradScaler("cuda")``, the default, switches itself off where PyTorch finds no CUDA."""
    if not _renames(capture):
        return
    scaler: Any = torch.amp.GradScaler
    make = scaler.__init__

    @functools.wraps(make)
    def renamed(self: Any, device: str = CUDA, *args: Any, **kwargs: Any) -> None:
        make(self, DEVICE_TYPE if device == CUDA else device, *args, **kwargs)

    scaler.__init__ = renamed


@patch("torch:autocast.__init__", "torch:autocast.__enter__", "torch:autocast.__exit__", "torch:set_autocast_enabled")
def cuda_autocast(capture: Patched) -> None:
    """``torch.autocast("cuda")`` switches itself off where PyTorch finds no CUDA.

    Autocast of the simulated GPU is CUDA's, too, for code that asks: `torch.is_autocast_enabled` means CUDA's.
    """
    if not _renames(capture):
        return
    autocast: Any = torch.autocast
    make, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    @functools.wraps(make)
    def renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, DEVICE_TYPE if device_type == CUDA else device_type, *args, **kwargs)

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        found = enter(self)
        _follow(self)
        return found

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        found = leave(self, *error)
        _follow(self)
        return found

    autocast.__init__, autocast.__enter__, autocast.__exit__ = renamed, entered, left


def _follow(autocast: Any) -> None:
    """CUDA's autocast becomes what the simulated GPU's is."""
    if autocast.device == DEVICE_TYPE:
        torch.set_autocast_enabled(CUDA, torch.is_autocast_enabled(DEVICE_TYPE))
        torch.set_autocast_dtype(CUDA, torch.get_autocast_dtype(DEVICE_TYPE))


@patch("torch:Tensor.to", "torch:Tensor.cuda")
def cuda_tensors(capture: Patched) -> None:
    """``.to("cuda")``, ``.cuda()`` and ``is_cuda`` of tensors and modules; C++ knows no such device.

    Factories with ``device="cuda"`` come to the dispatch mode, which renames the device itself. Inductor, which generates code
    for a device of CUDA's name, runs without that mode: there the name stays.
    """
    if not _renames(capture):
        return
    tensor: Any = torch.Tensor
    to, is_cuda = tensor.to, tensor.is_cuda

    @functools.wraps(to)
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if called_cuda(args[0] if args else kwargs.get("device")) and capture.mode in dispatch_modes():
            if args:
                args = (_gpu(), *args[1:])
            else:
                kwargs["device"] = _gpu()
        return to(self, *args, **kwargs)

    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return self.to(_gpu(), non_blocking=non_blocking, memory_format=memory_format)

    tensor.to, tensor.cuda = moved, cuda
    tensor.is_cuda = property(lambda self: self.device.type == DEVICE_TYPE or is_cuda.__get__(self))


@patch("torch:Generator")
def cuda_generators(capture: Patched) -> None:
    """``torch.Generator(device)`` of the simulated GPU: PyTorch asks C++ hooks for it that are not there. The host's stands
    for it, as no values are drawn.
    """
    if not _renames(capture):
        return
    generator: Any = torch.Generator

    class Kind(type(generator)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

    class Generator(generator, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu" if called_cuda(device) or torch.device(device).type == DEVICE_TYPE else device)

    vars(torch)["Generator"] = Generator


@patch(*(f"torch.cuda:{name}" for name in _CALLS))
def cuda_calls(capture: Patched) -> None:
    """Streams, events and queries of `torch.cuda`, which refuses all of them where PyTorch finds no CUDA."""
    if not _renames(capture):
        return
    module = torch.get_device_module(DEVICE_TYPE)
    for name in _CALLS:
        call = getattr(module, name)
        setattr(torch.cuda, name, call if isinstance(call, type) else _own(call))


def _own(call: Any) -> Any:
    """The same as a function of its own: Dynamo refuses one that it knows by two names."""
    return lambda *args, **kwargs: call(*args, **kwargs)

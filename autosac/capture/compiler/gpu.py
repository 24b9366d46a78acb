"""What Inductor asks about the GPU while it generates code, answered for the simulated one.

Inductor decides by a device called ``cuda`` and by its properties. `answers` stands in for the functions that it asks, for as
long as one graph is compiled; nothing is launched or allocated inside. torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.target import WARP, TargetGPU

CUDA = torch.device("cuda", 0)


class _Driver:
    """What is asked of Triton's driver."""

    def __init__(self, gpu: TargetGPU) -> None:
        major, minor = gpu.compute_capability
        self._architecture = 10 * major + minor

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def _device(gpu: TargetGPU) -> dict[str, Callable[..., Any]]:
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(**gpu.properties())
    return {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]`` of numbers, slices, an ellipsis, None and tensors of one dimension, by operators."""
    aten = torch.ops.aten
    indices: list[Any] = list(index) if isinstance(index, tuple) else [index]
    dimension = 0
    gathered: list[Any] = []
    for number, i in enumerate(indices):
        if i is ...:
            dimension = tensor.dim() - sum(j is not None for j in indices[number + 1 :])
            continue
        if isinstance(i, slice):
            tensor = aten.slice.Tensor(tensor, dimension, i.start, i.stop, i.step or 1)
        elif i is None:
            tensor = aten.unsqueeze.default(tensor, dimension)
        elif isinstance(i, torch.Tensor):
            gathered += [None] * (dimension - len(gathered)) + [i]
        else:
            tensor = aten.select.int(tensor, dimension, i)
            continue
        dimension += 1
    found: torch.Tensor = aten.index.Tensor(tensor, gathered) if gathered else tensor
    return found


# Methods that enter their tensor's device before they reach the dispatcher: a build without CUDA has no such device.
_UNGUARDED: dict[str, Callable[..., Any]] = {
    "clone": torch.ops.aten.clone.default,
    "contiguous": torch.ops.aten.contiguous.default,
    "copy_": torch.ops.aten.copy_.default,
    "__invert__": torch.ops.aten.bitwise_not.default,
    "__getitem__": _indexed,
}


def _unguarded(name: str) -> Callable[..., Any]:
    """The method as it is, but for tensors on a GPU."""
    original, operator = getattr(torch.Tensor, name), _UNGUARDED[name]

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_guarded = isinstance(self, FakeTensor) and self.device.type == CUDA.type
        return (operator if is_guarded else original)(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def answers(gpu: TargetGPU) -> Iterator[None]:
    """While this is entered, PyTorch and Triton speak of `gpu` where they are asked about CUDA."""
    from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties
    from torch.utils import _triton
    from triton.runtime import driver

    device = _device(gpu)
    bound = {name.removeprefix("_"): answer for name, answer in device.items()}
    with contextlib.ExitStack() as stack:
        for name, answer in device.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if torch.distributed.is_available():
            stack.enter_context(mock.patch.object(torch.distributed, "is_nccl_available", lambda: True))
        for name in _UNGUARDED:
            stack.enter_context(mock.patch.object(torch.Tensor, name, _unguarded(name)))
        for name in ("get_device_properties", "current_device", "device_count", "exchange_device"):
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(bound[name])))
        stack.enter_context(mock.patch.object(CudaInterface, "maybe_exchange_device", staticmethod(lambda _: 0)))
        stack.enter_context(mock.patch.dict(caching_worker_device_properties))
        _triton.has_triton.cache_clear()
        stack.callback(_triton.has_triton.cache_clear)
        active = "_active" if hasattr(driver, "_active") else "active"
        stack.enter_context(mock.patch.object(driver, active, _Driver(gpu)))
        yield

"""What Inductor asks about the GPU while it generates code, answered for the simulated one.

Inductor decides by a device called ``cuda`` and by its properties. `answers` stands in for the functions that it asks, for as
long as one graph is compiled; nothing is launched or allocated inside. torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from autosac.target import TargetGPU

CUDA = torch.device("cuda", 0)
_WARP = 32


@dataclass(frozen=True, kw_only=True)
class _Properties:
    """The part of ``torch.cuda.get_device_properties`` that code generation reads."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    warp_size: int = _WARP
    gcnArchName: str = ""
    # The same for every data-centre GPU since Volta.
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472


class _Driver:
    """What is asked of Triton's driver."""

    def __init__(self, gpu: TargetGPU) -> None:
        major, minor = gpu.compute_capability
        self._architecture = 10 * major + minor

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, _WARP)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def _device(gpu: TargetGPU) -> dict[str, Callable[..., Any]]:
    major, minor = gpu.compute_capability
    properties = _Properties(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.sm_count,
        total_memory=gpu.memory_bytes,
        L2_cache_size=gpu.l2_bytes,
    )
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


class _Unguarded(TorchFunctionMode):
    """Methods that enter their tensor's device before they reach the dispatcher: a build without CUDA has no such device."""

    _operators: ClassVar[dict[Any, Any]] = {
        torch.Tensor.clone: torch.ops.aten.clone.default,
        torch.Tensor.contiguous: torch.ops.aten.contiguous.default,
        torch.Tensor.copy_: torch.ops.aten.copy_.default,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operators.get(func, func)(*args, **(kwargs or {}))


def _eager_force_stride(input_tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The layout of Inductor's function of this name, without its copy. It is called where `_Unguarded` is not in force."""
    if input_tensor.stride() == stride:
        return input_tensor
    return torch.empty_strided(input_tensor.shape, stride, dtype=input_tensor.dtype, device=input_tensor.device)


@contextlib.contextmanager
def _code(function: Any, code: CodeType) -> Iterator[None]:
    """The function does something else while this is entered, for those too who hold it.

    Inductor has registered the function with its operator: another one under the same name would never be called, and the
    copy that the registered one makes cannot run on the simulated device.
    """
    original = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = original


@contextlib.contextmanager
def answers(gpu: TargetGPU) -> Iterator[None]:
    """While this is entered, PyTorch and Triton speak of `gpu` where they are asked about CUDA."""
    from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties
    from torch._inductor import inductor_prims
    from torch.utils import _triton
    from triton.runtime import driver

    device = _device(gpu)
    bound = {name.removeprefix("_"): answer for name, answer in device.items()}
    with contextlib.ExitStack() as stack:
        for name, answer in device.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if torch.distributed.is_available():
            stack.enter_context(mock.patch.object(torch.distributed, "is_nccl_available", lambda: True))
        stack.enter_context(_Unguarded())
        stack.enter_context(_code(inductor_prims.eager_force_stride, _eager_force_stride.__code__))
        for name in ("get_device_properties", "current_device", "device_count", "exchange_device"):
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(bound[name])))
        stack.enter_context(mock.patch.object(CudaInterface, "maybe_exchange_device", staticmethod(lambda _: 0)))
        stack.enter_context(mock.patch.dict(caching_worker_device_properties))
        _triton.has_triton.cache_clear()
        stack.callback(_triton.has_triton.cache_clear)
        active = "_active" if hasattr(driver, "_active") else "active"
        stack.enter_context(mock.patch.object(driver, active, _Driver(gpu)))
        yield

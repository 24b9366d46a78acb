"""What programs ask of `torch.cuda` besides training: its runtime library, monitors, tuning, and which attention can run.

A program that logs or sets these must not fail here where it runs on a machine with GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from autosac.target import TargetGPU

_TUNING_MS, _TUNING_ITERATIONS = 30, 100  # PyTorch's defaults (Tunable.h)
_ERRORS = {0: "no error", 2: "out of memory", 34: "device not ready"}
_UNKNOWN = ("temperature", "power_draw", "clock_rate")


class _CudaError(int):
    """`cudaError_t`."""

    success = 0


def runtime(free_bytes: Callable[[], int], total_bytes: int) -> SimpleNamespace:
    """`torch.cuda.cudart()`. Everything succeeds."""

    def success(*_: Any) -> _CudaError:
        return _CudaError(0)

    names = ("ProfilerStart", "ProfilerStop", "HostRegister", "HostUnregister", "StreamCreate", "StreamDestroy")
    return SimpleNamespace(
        cudaError=_CudaError,
        cudaGetErrorString=lambda code: _ERRORS.get(int(code), "unknown error"),
        cudaMemGetInfo=lambda _=0: (free_bytes(), total_bytes),
        **{f"cuda{name}": success for name in names},
    )


def monitors(cuda: Any, free_bytes: Callable[[], int], total_bytes: int) -> None:
    """What NVML knows of a GPU: it is always busy, and nobody knows how warm it is."""

    def unknown(name: str) -> Callable[..., int]:
        def ask(_: Any = None) -> int:
            raise NotImplementedError(f"the simulated GPU has no {name.replace('_', ' ')}")

        return ask

    cuda.utilization = lambda _=None: 100
    cuda.memory_usage = lambda _=None: 100
    cuda.device_memory_used = lambda _=None: total_bytes - free_bytes()
    for name in _UNKNOWN:
        setattr(cuda, name, unknown(name))


def tuning() -> dict[str, Any]:
    """The functions of C++ behind `torch.cuda.tunable`. Settings are kept and change nothing."""
    state: dict[str, Any] = {
        "is_enabled": False,
        "tuning_is_enabled": True,
        "get_max_tuning_duration": _TUNING_MS,
        "get_max_tuning_iterations": _TUNING_ITERATIONS,
        "get_filename": "",
        "get_rotating_buffer_size": 0,
    }
    setters = {"enable": "is_enabled", "tuning_enable": "tuning_is_enabled"}
    setters |= {name.replace("get_", "set_"): name for name in state if name.startswith("get_")}
    untuned = [False]

    def setter(name: str) -> Callable[..., None]:
        return lambda value, *_: state.update({name: value})

    found: dict[str, Any] = {f"_cuda_tunableop_{name}": lambda name=name: state[name] for name in state}
    found |= {f"_cuda_tunableop_{name}": setter(read) for name, read in setters.items()}
    found |= {f"_cuda_tunableop_get_{name}": tuple for name in ("results", "validators")}
    found |= {f"_cuda_tunableop_{name}": lambda *_: True for name in ("read_file", "write_file")}
    found |= {
        f"_cuda_tunableop_{name}": lambda *_: None for name in ("write_file_on_exit", "set_numerical_check_tolerances")
    }
    found["_cuda_record_untuned_enable"] = lambda value: untuned.__setitem__(0, value)
    found["_cuda_record_untuned_is_enabled"] = lambda: untuned[0]
    return found


def attention_queries(gpu: TargetGPU) -> None:
    """`torch.backends.cuda.can_use_flash_attention` and others, by the rules that also choose the kernel."""
    import torch.backends.cuda as backend

    from autosac.capture.device.attention import AttentionCall

    def asked(kernel: str) -> Callable[..., bool]:
        def can(params: Any, debug: bool = False) -> bool:
            call = AttentionCall(
                params.query,
                params.key,
                params.value,
                params.attn_mask,
                params.dropout,
                params.enable_gqa,
                params.is_causal,
            )
            return bool(getattr(call, f"{kernel}_can")(gpu.compute_capability))

        return can

    names = {"flash": "flash_attention", "efficient": "efficient_attention", "cudnn": "cudnn_attention"}
    for kernel, name in names.items():
        setattr(backend, f"can_use_{name}", asked(kernel))
    backend.is_flash_attention_available = lambda: True


def nccl() -> None:
    """`torch.cuda.nccl.is_available` asks whether PyTorch was built with it."""
    module: Any = importlib.import_module("torch.cuda.nccl")
    module.is_available = lambda tensors: all(tensor.is_cuda and not tensor.is_sparse for tensor in tensors)

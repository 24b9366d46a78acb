"""Kernels that are launched below the dispatcher."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from autosac.capture.device import device as simulated
from autosac.capture.patches import without_triton
from autosac.capture.patches.registry import Patched, patch
from autosac.integrations.operators.kernels import written_arguments_of


@patch()
def triton_launches(capture: Patched) -> None:
    """User-written Triton kernels are launched below the dispatcher: record them, do not compile them."""

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        arguments = [*args, *kwargs.values()]
        capture.recorder.launch(
            getattr(self.fn, "__name__", "kernel"), arguments, written_arguments_of(self, args, kwargs)
        )

    def run_first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = self.configs[0].all_kwargs() if self.configs else {}
        return self.fn.run(*args, **kwargs, **chosen)

    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        without_triton.JITFunction.run = run  # type: ignore[method-assign]
        return
    JITFunction.run = run
    Autotuner.run = run_first_config


@patch()
def cuda_sources(capture: Patched) -> None:
    """Kernels that a program compiles from CUDA source (`torch.cuda._compile_kernel`) need NVRTC and a GPU: their launches are
    recorded as those of Triton kernels are.
    """

    def compile_kernel(kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> _FromSource:
        return _FromSource(capture, kernel_source, kernel_name)

    for name in ("_compile_kernel", "compile_kernel"):
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, compile_kernel)


class _FromSource:
    """What stands for a compiled kernel. It writes to what its parameters do not call const."""

    def __init__(self, capture: Patched, source: str, name: str) -> None:
        self._capture, self._name = capture, name
        self._written = written_parameters(source, name)

    def __call__(self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = None, *_: Any, **__: Any) -> None:
        arguments = list(args or ())
        written = None if self._written is None else [arguments[i] for i in self._written if i < len(arguments)]
        self._capture.recorder.launch(self._name, arguments, written)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Nothing: there is no kernel."""


def written_parameters(source: str, name: str) -> tuple[int, ...] | None:
    """The positions of the pointers that ``__global__ void name(...)`` may write through; None if it is not found."""
    found = re.search(rf"\b{re.escape(name)}\s*\(([^)]*)\)", source)
    if found is None:
        return None
    parameters = found[1].split(",")
    return tuple(
        i for i, said in enumerate(parameters) if "*" in said and not re.search(r"\bconst\b", said.split("*")[0])
    )


@patch(
    "torch.nn.attention.flex_attention:flex_attention",
)
def flex_attention_device(_: Patched) -> None:
    """flex_attention() refuses device types that it does not know."""
    accept_device()


def accept_device() -> None:
    """See `flex_attention_device`."""
    import torch.nn.attention.flex_attention as flex

    if hasattr(flex, "_validate_device"):
        flex._validate_device = _accept  # one function: compiled code is guarded by it


def _accept(*_: Any, **__: Any) -> None:
    pass


@patch(
    "torch.nn.attention._registry:activate_flash_attention_impl",
    "torch.nn.attention._registry:current_flash_attention_impl",
)
def flash_attention_implementations(_: Patched) -> None:
    """A job may put FlashAttention-3 or 4 in the place of PyTorch's FlashAttention, from packages that are for CUDA only: the
    operators stay, and their signatures say which kernels they run.
    """
    from torch.nn.attention import _registry

    for name, capabilities in (("FA3", (9,)), ("FA4", (9, 10))):
        _registry.register_flash_attention_impl(name, register_fn=partial(_activated, name, capabilities))


class _Active:
    """What PyTorch keeps while such kernels are in use."""

    def remove(self) -> None:
        """Nothing: none was registered."""


def _activated(name: str, capabilities: tuple[int, ...]) -> _Active:
    if simulated.stood_for.compute_capability[0] not in capabilities:
        needed = " or ".join(f"{capability}.0" for capability in capabilities)
        raise RuntimeError(f"{name} requires compute capability {needed}")
    return _Active()


@patch()
def grouped_products(_: Patched) -> None:
    """CUDA's grouped product takes all floating-point types; the shape function, of bfloat16 only, is older than that."""
    import torch._meta_registrations as shapes

    shapes_of: Any = shapes
    original = getattr(shapes_of, "_meta_grouped_mm_common", None)
    if original is None:
        return

    def common(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype not in (torch.float16, torch.float32) or b.dtype != a.dtype or kwargs.get("scale_a") is not None:
            out: torch.Tensor = original(a, b, *args, **kwargs)
            return out
        wanted = kwargs.pop("out_dtype", None) or a.dtype
        found: torch.Tensor = original(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
        return found.to(wanted)

    shapes_of._meta_grouped_mm_common = common

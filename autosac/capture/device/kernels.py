"""What CUDA would dispatch: registrations with PyTorch's dispatcher that make composite operators take CUDA's path.

1. Attention (attention.py).
2. Operators that CUDA runs as one kernel of its own and other devices decompose (Llama-3 8B without checkpointing is 12 GiB
   smaller with native RMSNorm and SiLU backward). The list is {operators with a CUDA and a CompositeImplicitAutograd kernel}.
3. softmax and log_softmax of float16 into float32, which need no cast copy on CUDA.
4. Autocast (autocast.py).
5. Shapes of operators that PyTorch has none for (shapes.py).
6. RNNs, which cuDNN runs (recurrent.py).
7. CTC loss with tensors of lengths, which reads them; for tensor subclasses PyTorch takes a path that never runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosac.capture.device import recurrent, shadows, shapes
from autosac.capture.device.attention import Attention
from autosac.capture.device.autocast import Autocast
from autosac.capture.device.device import CUDA, DEVICE_TYPE, key_of, stand_for
from autosac.target import TargetGPU

aten = torch.ops.aten
_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library

NATIVE_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")


def install(gpu: TargetGPU, device_type: str = DEVICE_TYPE) -> None:
    """Register everything for a simulated device that stands for `gpu`. Once per process.

    Under CUDA's own name C++ has its casts and its softmax already.
    """
    stand_for(gpu)
    key = key_of(device_type)
    library = _library("aten")
    attention = Attention(gpu)
    library.impl("scaled_dot_product_attention", attention, f"Autograd{key}")
    library.impl("scaled_dot_product_attention", attention, key)
    for name in NATIVE_ON_CUDA:
        library.impl(name, _unreachable(name), key)
    shapes.install(library)
    recurrent.install(library, key)
    for target in (f"Autograd{key}", key):
        library.impl("ctc_loss.Tensor", _ctc_loss, target)
    if device_type == CUDA:
        return
    library.impl("empty.memory_format", _empty, key)
    library.impl("empty_strided", _empty_strided, key)
    library.impl("_copy_from", _copy_from, key)
    for name, native in (("softmax.int", aten._softmax), ("log_softmax.int", aten._log_softmax)):
        library.impl(name, _softmax(native), f"Autograd{key}")
        library.impl(name, _softmax(native), key)
    _autocast.install(_library)


def _library(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Unknown lengths are the largest that they can be."""
    longest = targets.shape[-1] // (1 if targets.dim() == 2 else target_lengths.numel())
    lengths = shadows.known_lengths(input_lengths, log_probs.shape[0]), shadows.known_lengths(target_lengths, longest)
    out: torch.Tensor = aten.ctc_loss.IntList(log_probs, targets, *lengths, *rest, **named)
    return out


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    """A tensor without data, for the few callers that allocate below the dispatch modes."""
    return torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A copy below the dispatch modes: of a constant that Dynamo makes while it traces (a mask of flex attention)."""
    return target


def _unreachable(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"aten::{name} reached the simulated device outside of its dispatch mode")

    return kernel


def _softmax(native: Any) -> Callable[..., torch.Tensor]:
    """Softmax and log_softmax of float16 into float32 read the half directly on CUDA: no cast copy (SoftMax.cpp)."""

    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        out: torch.Tensor
        if input.dtype == torch.float16 and dtype == torch.float32:
            out = native(input, dim, True)
        else:
            out = native(input if dtype is None else input.to(dtype), dim, False)
        return out

    return kernel


_autocast = Autocast()


def clear_autocast_weights() -> None:
    """Drop the cast copies of weights; called when autocast ends."""
    _autocast.clear()

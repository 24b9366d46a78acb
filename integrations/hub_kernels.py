"""Stand-ins for kernels of Hugging Face's hub (`kernels.get_kernel`): FlashAttention-3.

Without a window PyTorch has kernels of the same kind and speed: cuDNN's. A window (`window_size`) leaves out all pairs of
positions beyond it; PyTorch has no such kernel for tensors of one length, so that it is priced by its FLOPs.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_NAMES = ("flash-attn3", "flash-attention-3", "flash-attn", "flash-attention")
_BACKWARD = 2.5  # its FLOPs beside the forward's: five products instead of two
_EVERYTHING = (-1, -1)
_AMPERE = (8, 0)
Window = tuple[int, int]


@lru_cache(maxsize=64)  # every layer of every step asks
def pairs(queries: int, keys: int, causal: bool, window: Window) -> int:
    """How many of queries x keys positions are computed: `window` positions to the left and to the right, -1 for all.

    The last query is beside the last key, as in FlashAttention.
    """
    left, right = window
    right = 0 if causal else right
    total = 0
    for query in range(queries):
        at = query + keys - queries
        begin = 0 if left < 0 else max(0, at - left)
        end = keys - 1 if right < 0 else min(keys - 1, at + right)
        total += max(0, end - begin + 1)
    return total


def flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_size: Window = _EVERYTHING,
) -> float:
    """Of the forward: two products. (batch, length, heads, size) in."""
    return (
        2.0 * q.shape[0] * q.shape[2] * (q.shape[3] + v.shape[3]) * pairs(q.shape[1], k.shape[1], causal, window_size)
    )


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """The shape of attention's result."""
    return q.new_empty(*q.shape[:3], v.shape[3])


def narrow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """RuntimeError for what FlashAttention's kernels refuse, too: autocast casts nothing for them."""
    wide = {str(x.dtype).removeprefix("torch.") for x in (q, k, v) if x.dtype.itemsize > 2}
    if wide:
        raise RuntimeError(f"FlashAttention takes tensors of 16 and 8 bits, not {', '.join(sorted(wide))}")
    if q.is_cuda and torch.cuda.get_device_capability() < _AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def flash_attention_3(with_window: Any) -> Any:
    """`flash_attn_func`; `with_window` is called where a window leaves something out."""

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        *,
        window_size: Window = _EVERYTHING,
        **_: Any,
    ) -> torch.Tensor:
        """(batch, length, heads, size) in and out."""
        narrow(q, k, v)
        left, right = window_size
        longest = max(q.shape[1], k.shape[1]) - 1
        if (0 <= left < longest) or (not causal and 0 <= right < longest):
            return with_window(q, k, v, causal=causal, window_size=(left, right))  # type: ignore[no-any-return]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            attended = torch.nn.functional.scaled_dot_product_attention(
                *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
                scale=softmax_scale,
                is_causal=causal,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return attended.transpose(1, 2)

    return torch.compiler.allow_in_graph(call)  # for Dynamo an operator, as the kernel is


def install(stand_in: Any, replace: Any, varlen: Any) -> None:
    """Let scripts find it, by `stand_ins.stand_in` and `stand_ins.replace`. `varlen`: `flash_attn_varlen_func`."""
    call = flash_attention_3(stand_in("kernels:flash_attention_3", flops=flops, backward=_BACKWARD)(windowed))
    functions = {"flash_attn_func": call, "flash_attn_varlen_func": varlen}
    module = SimpleNamespace(flash_attn_interface=SimpleNamespace(**functions), **functions)

    def get_kernel(name: str, *_: Any, **__: Any) -> Any:
        if not has_kernel(name):
            raise ImportError(f"{name}: AutoSAC has a stand-in for flash attention only (--stand-in FILE for others)")
        return module

    def has_kernel(name: str, *_: Any, **__: Any) -> bool:
        return any(part in name for part in _NAMES)

    replace("kernels:get_kernel", get_kernel)
    replace("kernels:has_kernel", has_kernel)

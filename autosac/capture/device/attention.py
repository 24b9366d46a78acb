"""Attention as `select_sdp_backend` (sdp_utils.cpp) decides it for an NVIDIA GPU, the priorities of `sdpa_kernel` included.

It is registered for the simulated device at the level of autograd, hence below DTensor and inside context parallelism's ring.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from autosac.target import TargetGPU

aten = torch.ops.aten


class Attention:
    """`scaled_dot_product_attention` of the target GPU."""

    def __init__(self, gpu: TargetGPU) -> None:
        self.capability = gpu.compute_capability

    def choose(
        self, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, gqa: bool, is_causal: bool = False
    ) -> SDPBackend:
        """The first backend in order of priority that is enabled and can do it."""
        enabled = torch.backends.cuda
        head, head_v = q.shape[-1], v.shape[-1]
        half = q.dtype in (torch.float16, torch.bfloat16)
        ampere = self.capability >= (8, 0)
        plain = all(t.dim() == 4 and t.stride(-1) == 1 and t.numel() for t in (q, k, v))
        same_batch = q.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
        same_heads = q.dim() == 4 and q.shape[1] == k.shape[1] == v.shape[1]
        square = not is_causal or q.shape[-2] == k.shape[-2]
        alignment = (8 if half else 4) if ampere else 1
        usable = {
            SDPBackend.FLASH_ATTENTION: enabled.flash_sdp_enabled()
            and plain
            and half
            and ampere
            and mask is None
            and head == k.shape[-1] == head_v
            and head <= 256
            and same_batch
            and (same_heads or gqa)
            and square,
            SDPBackend.CUDNN_ATTENTION: enabled.cudnn_sdp_enabled()
            and plain
            and half
            and ampere
            and dropout_p == 0.0
            and head % 8 == 0
            and head_v % 8 == 0
            and (head <= 128 or (self.capability >= (9, 0) and head <= 256)),
            SDPBackend.EFFICIENT_ATTENTION: enabled.mem_efficient_sdp_enabled()
            and plain
            and (half or q.dtype == torch.float32)
            and head == k.shape[-1]
            and head % alignment == head_v % alignment == 0
            and same_batch
            and same_heads,
            SDPBackend.MATH: enabled.math_sdp_enabled(),
        }
        for priority in torch._C._get_sdp_priority_order():
            backend = SDPBackend(int(priority))
            if usable.get(backend, False):
                return backend
        raise RuntimeError("No available kernel for scaled_dot_product_attention on the target GPU")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        backend = self.choose(q, k, v, attn_mask, dropout_p, enable_gqa, is_causal)
        with_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out: torch.Tensor
        if backend == SDPBackend.MATH:
            out, _ = aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-math.inf, dtype=q.dtype, device=q.device))
        if backend == SDPBackend.CUDNN_ATTENTION:
            out, *_ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, attn_mask, with_lse, dropout_p, is_causal, False, scale=scale
            )
            return out
        if backend == SDPBackend.FLASH_ATTENTION:
            return self._flash(q, k, v, dropout_p, is_causal, scale)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        out, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, with_lse, dropout_p, is_causal, scale=scale
        )
        return out

    @staticmethod
    def _flash(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, scale: float | None) -> torch.Tensor:
        """Flash attention wants head sizes in multiples of 8; PyTorch pads and slices (attention.cu)."""
        head = q.shape[-1]
        scale = scale if scale is not None else 1 / math.sqrt(head)
        if head % 8:
            q, k, v = (torch.nn.functional.pad(t, (0, 8 - head % 8)) for t in (q, k, v))
        out: torch.Tensor
        out, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
        return out[..., :head] if head % 8 else out

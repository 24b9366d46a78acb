"""Attention as `select_sdp_backend` (sdp_utils.cpp) decides it for an NVIDIA GPU, the priorities of `sdpa_kernel` included.

It is registered for the simulated device at the level of autograd, hence below DTensor and inside context parallelism's ring.
What cuDNN can do is that of version 9.19, which PyTorch's wheels for CUDA 13 bring; wheels for older CUDA, whose cuDNN is not
preferred, are recognised by ``TORCH_CUDNN_SDPA_DEPRIORITIZED=1``, as in PyTorch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from autosac.target import TargetGPU

aten = torch.ops.aten

_DEFAULT_ORDER: tuple[int, ...] = tuple(torch._C._get_sdp_priority_order())


class AttentionCall(NamedTuple):
    """A call, and what each kernel asks of it: the constraints of `can_use_..._attention` (sdp_utils.cpp)."""

    q: Any
    k: Any
    v: Any
    mask: Any
    dropout_p: float
    gqa: bool
    is_causal: bool

    def flash_can(self, capability: tuple[int, int]) -> bool:
        """FlashAttention 2."""
        head = self.q.shape[-1]
        return (
            self._dense(a_single_column=True)
            and self._half()
            and capability >= (8, 0)
            and self.mask is None
            and head == self.k.shape[-1] == self.v.shape[-1]
            and head <= 256
            and not (self._small_shared_memory(capability) and self._trains() and self._too_wide_to_train())
            and (self._same_heads() or self.gqa)
            and (not self.is_causal or self.q.shape[-2] == self.k.shape[-2])
        )

    def cudnn_can(self, capability: tuple[int, int]) -> bool:
        """The kernels of cuDNN."""
        head, head_v = self.q.shape[-1], self.v.shape[-1]
        return (
            self._dense(a_single_column=True)
            and self._half()
            and capability >= (8, 0)
            and not _must_repeat_itself()
            and self._mask_broadcasts()
            and self.k.shape[-2] != 1
            and (self.dropout_p == 0.0 or self.q.shape[-2] != 1)
            and head % 8 == 0
            and head_v % 8 == 0
            and (head <= 128 or (capability >= (9, 0) and head <= 256))
        )

    def efficient_can(self, capability: tuple[int, int]) -> bool:
        """The memory-efficient kernels of CUTLASS."""
        head, head_v = self.q.shape[-1], self.v.shape[-1]
        alignment = (8 if self._half() else 4) if capability >= (8, 0) else 1
        return (
            self._dense(a_single_column=False)
            and (self._half() or self.q.dtype == torch.float32)
            and (self.q.dtype != torch.bfloat16 or capability >= (8, 0))
            and head == self.k.shape[-1]
            and head % alignment == head_v % alignment == 0
            and self._same_heads()
        )

    def _dense(self, a_single_column: bool) -> bool:
        """Four dimensions, a batch for all, and elements side by side: `a_single_column` needs no stride of one."""
        if not all(t.dim() == 4 and t.numel() for t in (self.q, self.k, self.v)):
            return False
        side_by_side = all(t.stride(-1) == 1 for t in (self.q, self.k, self.v))
        return (
            (side_by_side or (a_single_column and self.q.shape[-1] == 1))
            and (self.mask is None or self.mask.stride(-1) == 1)
            and self.q.shape[0] == self.k.shape[0] == self.v.shape[0]
        )

    def _half(self) -> bool:
        return self.q.dtype in (torch.float16, torch.bfloat16)

    def _same_heads(self) -> bool:
        return bool(self.q.shape[1] == self.k.shape[1] == self.v.shape[1])

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))

    def _too_wide_to_train(self) -> bool:
        head = self.q.shape[-1]
        return head > 192 and (head <= 224 or self.dropout_p > 0.0)

    @staticmethod
    def _small_shared_memory(capability: tuple[int, int]) -> bool:
        return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)

    def _mask_broadcasts(self) -> bool:
        """`check_attn_mask_shape`: no gradient, and each size that of the scores or one."""
        if self.mask is None:
            return True
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        shape = tuple(self.mask.shape)
        fits = all(size in (1, whole) for size, whole in zip(shape, scores[-len(shape) :], strict=True))
        return not self.mask.requires_grad and len(shape) in (2, 4) and fits


def _must_repeat_itself() -> bool:
    """Whether the job wants deterministic kernels only, which cuDNN's attention is not."""
    wanted = torch.are_deterministic_algorithms_enabled()
    return wanted and not torch.is_deterministic_algorithms_warn_only_enabled()


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: rows that begin at multiples of 8 elements, or a padded copy whose rows do."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 16 - columns % 16))[..., :columns]


class Attention:
    """`scaled_dot_product_attention` of the target GPU."""

    def __init__(self, gpu: TargetGPU) -> None:
        self.capability = gpu.compute_capability

    def choose(
        self, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, gqa: bool, is_causal: bool = False
    ) -> SDPBackend:
        """The first backend in order of priority that is enabled and can do it."""
        call = AttentionCall(q, k, v, mask, dropout_p, gqa, is_causal)
        enabled = torch.backends.cuda
        usable = {
            SDPBackend.FLASH_ATTENTION: enabled.flash_sdp_enabled() and call.flash_can(self.capability),
            SDPBackend.CUDNN_ATTENTION: enabled.cudnn_sdp_enabled() and call.cudnn_can(self.capability),
            SDPBackend.EFFICIENT_ATTENTION: enabled.mem_efficient_sdp_enabled() and call.efficient_can(self.capability),
            SDPBackend.MATH: enabled.math_sdp_enabled(),
        }
        for priority in self._order():
            backend = SDPBackend(priority)
            if usable.get(backend, False):
                return backend
        raise RuntimeError("No available kernel for scaled_dot_product_attention on the target GPU")

    def _order(self) -> Sequence[int]:
        """The order of priority: cuDNN comes first on Hopper and Blackwell, unless the job has set an order.

        `check_prefer_cudnn_attention` and `priority_order` of sdp_utils.cpp, PyTorch 2.11.
        """
        order: tuple[int, ...] = tuple(torch._C._get_sdp_priority_order())
        preferred = self.capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") != "1"
        if order == _DEFAULT_ORDER and preferred:
            first: int = SDPBackend.CUDNN_ATTENTION.value
            return (first, *(backend for backend in order if backend != first))
        return order

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
            attn_mask = aligned_mask(attn_mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
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

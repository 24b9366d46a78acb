"""Shapes of operators for which PyTorch has none: it traces no graph with them, but CUDA trains with them.

Each function makes the outputs that the CUDA kernel allocates, on the meta device (aten/src/ATen/native/cuda: RNN.cu,
Normalization.cu, LossCTC.cu, MultiMarginLoss.cu, LogcumsumexpKernel.cu, FakeQuantizeCore.cu, Distributions.cpp, attention.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from autosac.capture.device.recurrent_shapes import SHAPES

Shape: TypeAlias = Callable[..., Any]
_GRU_WORKSPACE = 5  # times the hidden size: the gates, and what they are made of (GRU_WORKSPACE_MULTIPLIER)
_GRU_GATES = 3


def install(library: torch.library.Library) -> None:
    """Register those that this PyTorch lacks. `library` implements aten and lives as long as they are needed."""
    for name, function in SHAPES.items():
        # PyTorch's own, where it has any (2.11 in Python, which counts as another's), leaves the reserve out.
        library.impl(name, function, "Meta", allow_override=True)
    for name, function in _SHAPES.items():
        if hasattr(torch.ops.aten, name.split(".")[0]) and not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "Meta"
        ):
            library.impl(name, function, "Meta")


def _like(position: int) -> Shape:
    def shape(*args: Any, **_: Any) -> torch.Tensor:
        return torch.empty_like(args[position])

    return shape


def _with_mask(self: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(
        hx.shape[0], hx.shape[1] * _GRU_WORKSPACE
    )


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    gates = workspace.shape[0], workspace.shape[1] * _GRU_GATES // _GRU_WORKSPACE
    gate_gradients = workspace.new_empty(gates), workspace.new_empty(gates)
    biases = [workspace.new_empty(gates[1]) if has_bias else None for _ in range(2)]
    return (*gate_gradients, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases)


def _of_channels(number: int) -> Shape:
    """Statistics in the type that sums are taken in: float32 for 16 bits."""

    def shape(input: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
        return tuple(input.new_empty(input.shape[1], dtype=dtype) for _ in range(number))

    return shape


def _batch_norm_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    dtype = weight.dtype if weight is not None else input.dtype
    return (*sums, *(input.new_empty(input.shape[1], dtype=dtype) if wanted else None for wanted in (weight_g, bias_g)))


def _extremes(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.new_empty(()), self.new_empty(())


def _heads_of_qkv(qkv: torch.Tensor, _: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, head by head."""
    batch, length, width = qkv.shape
    return tuple(qkv.new_empty(batch, heads, length, width // 3 // heads) for _ in range(3))


def _nothing(*_: Any, **__: Any) -> None:
    """It updates parameters in place."""


def _learnable_fake_quantize_backward(grad: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of scale and zero point are one number each."""
    return torch.empty_like(grad), grad.new_empty(1), grad.new_empty(1)


_SHAPES: dict[str, Shape] = {
    "_fused_adam_.tensor_lr": _nothing,  # torch.optim's fused kernels; the rate may be a tensor
    "_fused_adamw_.tensor_lr": _nothing,
    "_fused_sgd_": _nothing,
    "_fused_sgd_.tensor_lr": _nothing,
    "_fused_adagrad_": _nothing,
    "_fused_adagrad_.tensor_lr": _nothing,
    "_transform_bias_rescale_qkv": _heads_of_qkv,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_use_cudnn_ctc_loss": lambda *_: False,  # it takes targets on the host only
    "_use_miopen_ctc_loss": lambda *_: False,
    "_nested_tensor_from_mask_left_aligned": lambda *_: False,  # evaluated with padding, not as nested tensors
    "_ctc_loss_backward": _like(1),
    "batch_norm_stats": _of_channels(2),
    "batch_norm_update_stats": _of_channels(2),
    "batch_norm_gather_stats": _of_channels(2),
    "batch_norm_gather_stats_with_counts": _of_channels(2),
    "batch_norm_elemt": _like(0),
    "batch_norm_backward_reduce": _batch_norm_reduce,
    "batch_norm_backward_elemt": _like(1),
    "_logcumsumexp": _like(0),
    "_cummax_helper": lambda *_: None,
    "_cummin_helper": lambda *_: None,
    "multi_margin_loss_backward": _like(1),
    "multilabel_margin_loss_backward": _like(1),
    "fractional_max_pool3d_backward": _like(1),
    "_standard_gamma_grad": _like(0),
    "_dirichlet_grad": _like(0),
    "_sample_dirichlet": _like(0),
    "binomial": _like(0),
    "_aminmax": _extremes,
    "_masked_softmax": _like(0),
    "_masked_softmax_backward": _like(0),
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine": _like(0),
    "_fake_quantize_learnable_per_tensor_affine_backward": _learnable_fake_quantize_backward,
}

"""Operators for autograd that CUDA composes of others: attention of modules that are evaluated, sparse gradients of tables.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call those of attention without gradients: teachers, frozen encoders,
validation. As in aten/src/ATen/native/transformers (transformer.cpp, cuda/attention.cu), but for nested tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from autosac.capture.device.device import key_of

aten: Any = torch.ops.aten
_BAG_BACKWARD, _SPARSE = aten._embedding_bag_backward.default, 9  # the position of ``sparse``
_ALIGNED = 8  # sizes of heads that scaled dot-product attention takes here


def _chosen_attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """By the kernel that the GPU takes (`device.attention`), which stands at the level of autograd: this is below it.

    In inference mode the operator itself comes here, and builds of PyTorch for CUDA would ask the GPU.
    """
    level = getattr(torch._C.DispatchKey, f"Autograd{key_of(q.device.type)}")
    found: torch.Tensor = aten.scaled_dot_product_attention.default._op_dk(level, q, *args, **kwargs)
    return found


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``_native_multi_head_attention``."""
    is_same = query is key and key is value
    width = embed_dim // heads
    if is_same and mask is None and not need_weights and width % _ALIGNED == 0:
        parts = functional.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
        q, k, v = (part.view(query.shape[0], -1, heads, width).transpose(1, 2) for part in parts)
        found = _chosen_attention(q, k, v)
        return functional.linear(found.transpose(1, 2).reshape(query.shape), proj_weight, proj_bias), None
    if is_same:
        projected = query @ qkv_weight.t()
    else:
        weights = qkv_weight.chunk(3)
        projected = torch.cat([x @ w.t() for x, w in zip((query, key, value), weights, strict=True)], 2)
    q, k, v = aten._transform_bias_rescale_qkv(projected, qkv_bias, heads)
    del projected
    scores = q @ k.transpose(-2, -1)
    shares = scores.softmax(-1) if mask is None else aten._masked_softmax(scores, mask, 3, mask_type)
    del scores
    context = (shares @ v).transpose(1, 2).reshape(query.shape)
    found = functional.linear(context, proj_weight, proj_bias)
    if not need_weights:
        return found, None
    return found, shares.sum(1).div_(heads) if average_attn_weights else shares


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """``_transformer_encoder_layer_fwd``."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    x = first(src) if norm_first else src
    weights = qkv_weight, qkv_bias, proj_weight, proj_bias
    x = _attention(x, x, x, embed_dim, heads, *weights, mask, need_weights=False, mask_type=mask_type)[0]
    x.add_(src)
    x = x if norm_first else first(x)
    before = x
    x = second(x) if norm_first else x
    hidden = aten._addmm_activation(ffn_bias_1, x.view(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = functional.linear(hidden, ffn_weight_2, ffn_bias_2).view(src.shape)
    del hidden
    x.add_(before)
    return x if norm_first else second(x)


def _bag_backward(*args: Any) -> torch.Tensor:
    """``_embedding_bag_backward`` of sparse gradients. Rows of padding are left out by a mask, which shape functions by
    themselves do not follow.
    """
    *first, _, rows, by_frequency, mode, _ = args[: _SPARSE + 1]
    found: torch.Tensor = aten._embedding_bag_sparse_backward.default.decompose(
        *first, rows, by_frequency, mode, *args[_SPARSE + 1 :]
    )
    return found


@functools.cache
def made_of_others(func: Any, device_type: str) -> Callable[..., Any] | None:
    """What calls the operators that this one is made of on such a device; None if it is an operator by itself.

    With gradients, or under `torch.no_grad`, C++ does that before a dispatch mode sees anything. In inference mode it leaves
    out the level of autograd, and composite operators come whole.
    """
    kernel = torch._C.DispatchKey.CompositeImplicitAutograd
    if func in COMPOSED or not _has_kernel(func, kernel):
        return None
    if device_type != "cpu":
        key = key_of(device_type)
        above, own = getattr(torch._C.DispatchKey, f"Autograd{key}"), getattr(torch._C.DispatchKey, key)
        if not _has_kernel(func, above) and _has_kernel(func, own):
            return None
        kernel = above if _has_kernel(func, above) else kernel
    return functools.partial(func._op_dk, kernel)


def _has_kernel(func: Any, key: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def is_composed(func: Any, args: Any) -> bool:
    """Whether CUDA composes this call: dense gradients of a table are one kernel."""
    return func in COMPOSED and (func is not _BAG_BACKWARD or bool(args[_SPARSE]))


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _chosen_attention,
    aten._native_multi_head_attention.default: _attention,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    _BAG_BACKWARD: _bag_backward,
}

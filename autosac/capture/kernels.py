"""What CUDA would dispatch: registrations with PyTorch's dispatcher that make composite operators take CUDA's path.

1. Attention: `scaled_dot_product_attention` chooses cuDNN, flash, efficient or math as `sdp_utils.cpp` of the target GPU
   would (priorities of `torch.nn.attention.sdpa_kernel` included), below DTensor and inside context parallelism's ring too.
2. Operators that CUDA runs as one kernel of its own and other devices decompose (Llama-3 8B without checkpointing is 12 GiB
   smaller with native RMSNorm and SiLU backward). The list is {operators with a CUDA and a CompositeImplicitAutograd kernel}.
3. softmax and log_softmax of float16 into float32, which need no cast copy on CUDA.
4. Autocast's operator lists, which belong to the device type.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend

from autosac.capture.device import DEVICE_TYPE
from autosac.capture.target import TargetGPU

aten = torch.ops.aten
_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library

NATIVE_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")


def install(gpu: TargetGPU) -> None:
    """Register everything for a simulated device that stands for `gpu`. Once per process."""
    library = _library("aten")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    attention = _Attention(gpu)
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", attention, "PrivateUse1")
    for name, native in (("softmax.int", aten._softmax), ("log_softmax.int", aten._log_softmax)):
        library.impl(name, _softmax(native), "AutogradPrivateUse1")
        library.impl(name, _softmax(native), "PrivateUse1")
    for name in NATIVE_ON_CUDA:
        library.impl(name, _unreachable(name), "PrivateUse1")
    _autocast.install()


def _library(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    """A tensor without data, for the few callers that allocate below the dispatch modes."""
    return torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())


def _unreachable(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"aten::{name} reached the simulated device outside of its dispatch mode")

    return kernel


def _softmax(native: Any) -> Callable[..., torch.Tensor]:
    """Softmax and log_softmax of float16 into float32 read the half directly on CUDA: no cast copy (SoftMax.cpp)."""

    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return native(input, dim, True)
        return native(input if dtype is None else input.to(dtype), dim, False)

    return kernel


class _Attention:
    """`scaled_dot_product_attention` as `select_sdp_backend` (sdp_utils.cpp) decides it for an NVIDIA GPU."""

    def __init__(self, gpu: TargetGPU) -> None:
        self.capability = gpu.compute_capability

    def choose(self, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, gqa: bool) -> SDPBackend:
        enabled = torch.backends.cuda
        head, head_v = q.shape[-1], v.shape[-1]
        half = q.dtype in (torch.float16, torch.bfloat16)
        ampere = self.capability >= (8, 0)
        usable = {
            SDPBackend.FLASH_ATTENTION: enabled.flash_sdp_enabled() and half and ampere and mask is None
            and head == k.shape[-1] == head_v and head <= 256,
            SDPBackend.CUDNN_ATTENTION: enabled.cudnn_sdp_enabled() and half and ampere and dropout_p == 0.0
            and head % 8 == 0 and head_v % 8 == 0 and (head <= 128 or (self.capability >= (9, 0) and head <= 256)),
            SDPBackend.EFFICIENT_ATTENTION: enabled.mem_efficient_sdp_enabled()
            and not (gqa and q.shape[-3] != k.shape[-3]),
            SDPBackend.MATH: enabled.math_sdp_enabled(),
        }  # fmt: skip
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
        backend = self.choose(q, k, v, attn_mask, dropout_p, enable_gqa)
        with_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if backend == SDPBackend.MATH:
            return aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(q.dtype)
        if backend == SDPBackend.CUDNN_ATTENTION:
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, attn_mask, with_lse, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == SDPBackend.FLASH_ATTENTION:
            return self._flash(q, k, v, dropout_p, is_causal, scale)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, with_lse, dropout_p, is_causal, scale=scale
        )[0]

    @staticmethod
    def _flash(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, scale: float | None) -> torch.Tensor:
        """Flash attention wants head sizes in multiples of 8; PyTorch pads and slices (attention.cu)."""
        head = q.shape[-1]
        scale = scale if scale is not None else 1 / math.sqrt(head)
        if head % 8:
            q, k, v = (torch.nn.functional.pad(t, (0, 8 - head % 8)) for t in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if head % 8 else out


class _Autocast:
    """autocast_mode.h: what runs in the lower precision, what in float32, what sets its `dtype` argument to float32."""

    LOWER: ClassVar = [
        "_convolution.deprecated",
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
    FLOAT32: ClassVar = [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow.Tensor_Scalar",
        "pow.Tensor_Tensor",
        "pow.Scalar",
        "softplus",
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "frobenius_norm.dim",
        "nuclear_norm",
        "nuclear_norm.dim",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "nll_loss",
        "nll_loss2d",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "pdist",
        "cdist",
        "renorm",
        "logsumexp",
    ]
    SET_DTYPE: ClassVar = [
        "prod",
        "prod.dim_int",
        "softmax.int",
        "log_softmax.int",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "sum",
        "sum.dim_IntList",
    ]
    PROMOTE: ClassVar = [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    ]

    def __init__(self) -> None:
        self.weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def install(self) -> None:
        _library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        library = _library("aten")
        for names, wrap in (
            (self.LOWER, self._cast_to(lambda _: torch.get_autocast_dtype(DEVICE_TYPE))),
            (self.FLOAT32, self._cast_to(lambda _: torch.float32)),
            (self.PROMOTE, self._cast_to(_widest)),
            (self.SET_DTYPE, self._set_dtype),
        ):
            for name in names:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(aten, packet, None), overload or "default", None)
                if operator is not None:  # the lists are those of the newest supported torch
                    library.impl(name, wrap(operator), "AutocastPrivateUse1")

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a floating tensor (or a list of them); weights keep their cast copy until autocast ends, as on CUDA."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(v, dtype) for v in value)
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()) or value.dtype in (dtype, torch.float64):
            return value
        weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and dtype != torch.float32
        if not (weight and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        known = self.weights.get(id(value))
        if known is None or known[0]() is not value:
            known = self.weights[id(value)] = (weakref.ref(value), value.to(dtype))
        return known[1]

    def clear(self) -> None:
        """Leaving the outermost autocast region drops the cached weights."""
        self.weights.clear()

    def _cast_to(self, dtype_of: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[[Any], Callable[..., Any]]:
        def wrap(operator: Any) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(self.keys):
                    dtype = dtype_of(args)
                    return operator(
                        *(self.cast(a, dtype) for a in args), **{k: self.cast(a, dtype) for k, a in kwargs.items()}
                    )

            return kernel

        return wrap

    def _set_dtype(self, operator: Any) -> Callable[..., Any]:
        names = [argument.name for argument in operator._schema.arguments]
        position = names.index("dtype") if "dtype" in names else None

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                floating = isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
                if floating and position is not None and len(args) <= position and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
                return operator(*args, **kwargs)

        return kernel


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """Float32 if any tensor argument is, else the autocast dtype."""
    floating = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return torch.float32 if torch.float32 in floating else torch.get_autocast_dtype(DEVICE_TYPE)


_autocast = _Autocast()


def clear_autocast_weights() -> None:
    """Drop the cast copies of weights; called when autocast ends."""
    _autocast.clear()

"""Autocast on the simulated device: CUDA's operator lists and cast rules (autocast_mode.h, autocast_mode.cpp).

PyTorch keeps the lists per device type. Those here are of torch 2.15; an operator counts only if the installed torch
autocasts it on CUDA, which its dispatcher tells on any machine. The last argument of an operator is cast first, as in
PyTorch's wheels: their compiler (gcc) evaluates a call's arguments from right to left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autosac.capture.device.device import DEVICE_TYPE

aten = torch.ops.aten

LOWER_PRECISION = (
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
)
FLOAT32 = (
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
    "rms_norm",
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
    "linalg_matrix_sqrth",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)
FLOAT32_BY_DTYPE = (  # their `dtype` argument becomes float32 unless it is given
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)
WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)
BANNED = ("binary_cross_entropy",)


def operator(name: str) -> Any:
    """The overload ``"name"`` (the default one) or ``"name.overload"`` of aten."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _cast_on_cuda() -> frozenset[str]:
    """What the installed torch autocasts on CUDA; operators that it does not have are not among them."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return frozenset(name.removeprefix("aten::") for name in names)


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == DEVICE_TYPE
    )


class Autocast:
    """The cast rules, and the cast copies of weights that live until the outermost autocast region is left."""

    def __init__(self) -> None:
        self.weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        keys: Any = torch._C.DispatchKey
        self.keys = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def install(self, library_of: Callable[[str], torch.library.Library]) -> None:
        """Register the operators of all lists that the installed torch has."""
        library_of("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        library = library_of("aten")
        rules: tuple[tuple[Any, Callable[[str], Callable[..., Any]]], ...] = (
            (LOWER_PRECISION, self._cast_to(lambda _: torch.get_autocast_dtype(DEVICE_TYPE))),
            (FLOAT32, self._cast_to(lambda _: torch.float32)),
            (WIDEST, self._cast_to(_widest)),
            (FLOAT32_BY_DTYPE, self._set_dtype),
            (WITH_DTYPE, self._append_dtype),
            (BANNED, _refuse),
        )
        known = _cast_on_cuda()
        for names, rule in rules:
            for name in filter(known.__contains__, names):
                library.impl(name, rule(name), "AutocastPrivateUse1")
        self._higher_order()

    def _higher_order(self) -> None:
        """Higher-order operators do what they do on CUDA: most ignore autocast, flexible attention casts its operands."""
        keys: Any = torch._C.DispatchKey
        ours, cuda = keys.AutocastPrivateUse1, keys.AutocastCUDA
        ignoring = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
        if ours not in ignoring:  # those that are made from now on
            ignoring.append(ours)
        for call in torch._ops._higher_order_ops.values():
            known = call.py_kernels.get(cuda)
            if known is None:
                call.fallthrough(ours)
            else:
                call.py_impl(ours)(self._without_keys(known))

    def _without_keys(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                return rule(*args, **kwargs)

        return kernel

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a floating tensor (or a list of them); weights keep their cast copy until autocast ends, as on CUDA."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(v, dtype) for v in value)
        if not _is_eligible(value) or value.dtype == dtype:
            return value
        weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and not value._is_view()
        if not (weight and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        known = self.weights.get(id(value))
        if known is None or known[0]() is not value:
            known = self.weights[id(value)] = (weakref.ref(value), value.to(dtype))
        return known[1]

    def clear(self) -> None:
        """Leaving the outermost autocast region drops the cached weights."""
        self.weights.clear()

    def _cast_to(self, dtype_of: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[[str], Callable[..., Any]]:
        def rule(name: str) -> Callable[..., Any]:
            call = operator(name)

            def kernel(*args: Any, **kwargs: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(self.keys):
                    dtype = dtype_of(args)
                    last_first = [(k, self.cast(a, dtype)) for k, a in reversed(kwargs.items())]
                    cast = [self.cast(a, dtype) for a in reversed(args)]
                    return call(*reversed(cast), **dict(reversed(last_first)))

            return kernel

        return rule

    def _set_dtype(self, name: str) -> Callable[..., Any]:
        call = operator(name)
        position = [argument.name for argument in call._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                if _is_eligible(args[0]) and len(args) <= position and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
                return call(*args, **kwargs)

        return kernel

    def _append_dtype(self, name: str) -> Callable[..., Any]:
        call, with_dtype = operator(name), operator(WITH_DTYPE[name])

        def kernel(x: torch.Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                if not _is_eligible(x):
                    return call(x, p, *args, **kwargs)
                if name == "norm.ScalarOpt_dim" and len(args) < 2:
                    kwargs.setdefault("keepdim", False)
                return with_dtype(x, p, *args, **kwargs, dtype=torch.float32)

        return kernel


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """Float32 if any tensor argument is, else the autocast dtype."""
    floating = [a.dtype for a in args if _is_eligible(a)]
    return torch.float32 if torch.float32 in floating else torch.get_autocast_dtype(DEVICE_TYPE)


def _refuse(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} is unsafe to autocast, and CUDA refuses it: use {name}_with_logits")

    return kernel

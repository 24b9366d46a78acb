"""Operators that are priced as the kernels that PyTorch launches for them: their grids, passes and accesses.

Each module knows one kind of operator. A rule takes an operator's signature and the `Streams` of a GPU, which know how fast
memory is filled, copied and waited for, and answers with microseconds, or with None where PyTorch runs other kernels.

The rules were fitted to the single operators of `autosac calibrate` on an H100 and to the even ones of 20 training steps on
it, and judged on the odd ones (`benchmarks/step_kinds`). `docs/causes.md` has the errors. They hold for GPUs of NVIDIA;
those that count instructions alone hold for others, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from autosac.estimator.kernels import (
    batch_norm,
    copies,
    lists,
    lookups,
    losses,
    norms,
    pools,
    rows,
    sorts,
    sums,
    thin,
    views,
)
from autosac.estimator.kernels.streams import Streams
from autosac.estimator.models import Estimate
from autosac.estimator.work import base_name
from autosac.trace import Signature

__all__ = ["Kernels", "Streams"]

Rule: TypeAlias = Callable[[Streams, Signature], float | None]

_LISTS = "aten._foreach_"
# base name, or lists of tensors -> what the source is called, its rule, the relative standard error
_RULES: Mapping[str, tuple[str, Rule, float]] = {
    _LISTS: ("list", lists.list_us, 0.2),
    **dict.fromkeys(("_fused_adam", "_fused_adamw"), ("list", lists.adam_us, 0.2)),
    "select_backward": ("view", views.gradient_us, 0.1),
    "slice_backward": ("view", views.gradient_us, 0.1),
    **dict.fromkeys(("cat", "stack"), ("concatenation", copies.concatenation_us, 0.15)),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d"), ("pooling", pools.pooling_us, 0.15)
    ),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "avg_pool2d_backward"), ("pooling", pools.pooling_gradient_us, 0.15)
    ),
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest2d_backward"), ("nearest", pools.nearest_us, 0.2)),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bilinear2d_backward"), ("bilinear", pools.bilinear_us, 0.2)),
    "roll": ("roll", copies.roll_us, 0.15),
    "embedding": ("lookup", copies.lookup_us, 0.15),
    "index_select": ("lookup", copies.lookup_us, 0.15),
    "index": ("lookup", rows.index_us, 0.15),
    "gather": ("lookup", rows.gather_us, 0.15),
    **dict.fromkeys(("index_put", "_index_put_impl"), ("rows", rows.added_us, 0.2)),
    **dict.fromkeys(("index_add", "scatter_add"), ("rows", rows.summed_us, 0.4)),
    "bmm": ("thin", thin.thin_us, 0.4),
    "embedding_dense_backward": ("embedding", lookups.embedding_gradient_us, 0.2),
    "_embedding_bag_backward": ("embedding", lookups.embedding_gradient_us, 0.2),
    "_embedding_bag": ("lookup", lookups.bag_us, 0.3),
    "nll_loss2d_forward": ("likelihood", losses.likelihood_of_images_us, 0.3),
    "nll_loss2d_backward": ("likelihood", losses.likelihood_of_images_us, 0.3),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss_backward"), ("recursion", losses.recursion_us, 0.4)),
    "sort": ("sort", sorts.sort_us, 0.4),
    "topk": ("sort", sorts.topk_us, 0.4),
    **dict.fromkeys(("cumsum", "cumprod"), ("scan", sorts.scan_us, 0.4)),
    "native_group_norm": ("group_norm", norms.group_norm_us, 0.15),
    "_softmax": ("softmax", losses.softmax_us, 0.1),
    "_log_softmax": ("softmax", losses.softmax_us, 0.1),
    "_log_softmax_backward_data": ("softmax", losses.softmax_us, 0.1),
    "nll_loss_forward": ("likelihood", losses.likelihood_us, 0.2),
    "nll_loss_backward": ("likelihood", losses.likelihood_gradient_us, 0.1),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "linalg_vector_norm"), ("sum", sums.sum_us, 0.15)),
    "native_layer_norm": ("layer_norm", norms.layer_norm_us, 0.1),
    "native_layer_norm_backward": ("layer_norm", norms.layer_norm_gradient_us, 0.1),
    "_fused_rms_norm": ("layer_norm", norms.layer_norm_us, 0.1),
    "_fused_rms_norm_backward": ("layer_norm", norms.layer_norm_gradient_us, 0.1),
    "native_group_norm_backward": ("group_norm", norms.group_norm_gradient_us, 0.1),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), ("batch_norm", batch_norm.forward_us, 0.15)),
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward"), ("batch_norm", batch_norm.backward_us, 0.2)
    ),
}


_FITTED_ON, _SCALED_STD = "h100-sxm-80gb", 0.1
_ANY_VENDOR = ("pooling", "nearest")  # whose kernels are the same code, bound by its instructions
_LENGTHS_ON_HOST = ("recursion",)


class Kernels:
    """The operators with a rule of their own, on one GPU; answers say so if it is not the one that was measured."""

    def __init__(self, streams: Streams) -> None:
        """Model the GPU of `streams`; one of another vendor is left to the other models."""
        hardware = streams.hardware
        self._hardware = hardware
        self._streams = streams
        self._suffix = hardware.fitted_elsewhere(_FITTED_ON)
        self._more_std = _SCALED_STD if self._suffix else 0.0

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the operators that have a rule."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        known = _RULES.get(_LISTS if signature.name.startswith(_LISTS) else base_name(signature.name))
        if known is None or not signature.inputs or not (signature.outputs or signature.mutates):
            return None
        name, rule, rel_std = known
        if self._hardware.vendor != "NVIDIA" and (name not in _ANY_VENDOR or self._hardware.device == "cpu"):
            return None
        inputs = () if name in _LENGTHS_ON_HOST else signature.inputs
        if any(meta.place != "device" for meta in (*inputs, *signature.outputs)):
            return None
        us = rule(self._streams, signature)
        if us is None:
            return None
        ms, std = max(us, self._hardware.kernel_us) * 1e-3, math.hypot(rel_std, self._more_std)
        return Estimate(ms, f"kernels:{name}{self._suffix}", std)

"""What the cost of an operator is a smooth function of: its group, a few numbers, and a roofline.

    log(t / baseline) = GP_group(features),         baseline = overhead + max(flops / peak, bytes / bandwidth)

Groups: products, attention and convolutions by family and type; every other operator by its own name and type, and by its
family where its name was not measured. Sizes enter as logarithms to the base 2; layouts and flags as 0, 2, 4, so that all
features vary on the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autosac.estimator.memory_bound import row_bytes
from autosac.estimator.walks import access
from autosac.estimator.work import (
    argument,
    attention_shape,
    base_name,
    convolution_flops,
    family,
    matmul_shape,
    reduces_outer,
    work_of,
)
from autosac.trace import Scalar, Signature

_ACCESS = {"elementwise": 0.0, "converted": 1.0, "broadcast": 2.0, "assembled": 2.0, "strided": 4.0}


class ShapeFeatures(NamedTuple):
    """Groups from the most to the least specific, features, and the work of the baseline."""

    groups: tuple[str, ...]
    features: tuple[float, ...]
    flops: float
    nbytes: float
    arithmetic: str


def shape_of(signature: Signature) -> ShapeFeatures | None:
    """The shape of an operator; None if it is not of the kind that is calibrated (nothing on the device)."""
    metas = (*signature.inputs, *signature.outputs)
    if signature.is_view or not any(meta.place == "device" for meta in metas):
        return None
    work = work_of(signature)
    kind = family(signature.name)
    dtype = next((m.dtype for m in metas if m.dtype.startswith(("float", "bfloat", "complex"))), metas[0].dtype)
    features = _features(signature, kind)
    if features is not None:
        groups: tuple[str, ...] = (f"{kind}:{dtype}",)
    else:
        features = _plain(signature, kind)
        name = f"{base_name(signature.name)}:{dtype}"
        groups = (name, f"family {kind}:{dtype}") if kind else (name,)
    return ShapeFeatures(groups, features, work.flops, work.nbytes, work.arithmetic)


def _log(value: float) -> float:
    return math.log2(max(value, 1.0))


def _features(signature: Signature, kind: str) -> tuple[float, ...] | None:
    if kind in ("matmul", "batched_matmul"):
        p = matmul_shape(signature)
        if p is None:
            return None
        bias = 2.0 if base_name(signature.name) in ("addmm", "baddbmm") else 0.0
        return (_log(p.batch), _log(p.m), _log(p.n), _log(p.k), 2.0 * p.a_transposed, 2.0 * p.b_transposed, bias)
    if kind in ("attention_forward", "attention_backward"):
        a = attention_shape(signature)
        if a is None:
            return None
        return (
            _log(a.batch * a.heads),
            _log(a.query_length),
            _log(a.key_length),
            _log(a.head_size),
            2.0 * a.causal,
            _log(a.heads / max(a.kv_heads, 1)),
        )
    if kind in ("convolution", "convolution_backward"):
        return _convolution(signature, kind)
    return None


def _convolution(signature: Signature, kind: str) -> tuple[float, ...] | None:
    backward = kind == "convolution_backward"
    if len(signature.inputs) < (3 if backward else 2):
        return None
    data, weight = signature.inputs[1:3] if backward else signature.inputs[:2]
    if len(weight.shape) < 3 or not signature.outputs:
        return None
    out = signature.inputs[0] if backward else signature.outputs[0]
    flops, depthwise = convolution_flops(signature)
    mask = argument(signature, "output_mask")
    parts = float(sum(map(bool, mask))) if isinstance(mask, tuple) else 1.0
    inner = data.stride[1] == 1 if len(data.stride) > 1 else False
    return (
        _log(data.shape[0]),
        _log(weight.shape[1]),
        _log(weight.shape[0]),
        _log(math.prod(out.shape[2:])),
        _log(math.prod(weight.shape[2:])),
        _log(math.prod(data.shape[2:])),
        4.0 * depthwise,
        parts,
        2.0 * inner,
        _log(flops),
    )


def _plain(signature: Signature, kind: str) -> tuple[float, ...]:
    """Bytes, the length of a row, how memory is walked, how many tensors, window, and whether it works in place."""
    work = work_of(signature)
    walked = _ACCESS[access(signature)] if kind in ("elementwise", "") else 0.0
    if kind == "reduction":
        walked = 4.0 if reduces_outer(signature) else 0.0
    rows = row_bytes(signature) if kind in ("norm", "norm_backward", "softmax", "reduction", "gather", "scatter") else 0
    return (
        _log(work.nbytes),
        _log(rows),
        walked,
        _log(len(signature.inputs) + len(signature.outputs)),
        _log(_window(argument(signature, "kernel_size"))),
        2.0 * bool(signature.mutates),
    )


def _window(size: Scalar) -> float:
    if isinstance(size, tuple):
        return math.prod(float(s) for s in size if isinstance(s, int | float))
    return float(size) if isinstance(size, int) else 1.0


def distinct(signatures: Sequence[Signature]) -> tuple[Signature, ...]:
    """Those of the signatures that can be measured, each once, in order."""
    return tuple(s for s in dict.fromkeys(signatures) if shape_of(s) is not None and family(s.name) != "host")

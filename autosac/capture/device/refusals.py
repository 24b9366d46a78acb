"""What kernels refuse and shape functions of fake tensors let pass: types of factors, weights, sources, labels; some shapes.

A script that mixes them ends on a GPU with one of these errors, so it ends here with the same. Products, convolutions and
norms have CUDA's message, the others that of CUDA and the CPU. Norms are refused on CUDA only: on the CPU inputs of 16 bits
may have parameters in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Check = Callable[..., None]

_LABELS = (torch.int64, torch.uint8)
_MASKS = (torch.bool, torch.uint8)
_SCALARS = {
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
    torch.float16: ("Half", "c10::Half"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"),
    torch.bool: ("Bool", "bool"),
}


def _name(x: torch.Tensor) -> str:
    return _SCALARS.get(x.dtype, (str(x.dtype).removeprefix("torch."),))[0]


def _cpp(x: torch.Tensor) -> str:
    return _SCALARS.get(x.dtype, (str(x.dtype),))[-1]


def _refuse(refused: bool, message: str) -> None:
    if refused:
        raise RuntimeError(message)


def _mm(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> None:
    text = f"expected mat1 and mat2 to have the same dtype, but got: {_cpp(left)} != {_cpp(right)}"
    _refuse(left.dtype != right.dtype, text)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> None:
    pairs = (("self", bias), ("mat1", left))
    for what, x in pairs:
        text = f"{what} and mat2 must have the same dtype, but got {_name(x)} and {_name(right)}"
        _refuse(x.dtype != right.dtype, text)


def _mv(matrix: torch.Tensor, vector: torch.Tensor, *_: Any, **__: Any) -> None:
    text = "addmv input tensors must have the same dtype, but got {1}, {0}, and {1}"
    _refuse(matrix.dtype != vector.dtype, text.format(_name(matrix), _name(vector)))


def _convolution(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> None:
    _refuse(x.dtype != weight.dtype, f"Input type ({_cpp(x)}) and weight type ({_cpp(weight)}) should be the same")


def _norm(x: torch.Tensor, *others: Any, **_: Any) -> None:
    for other in others[:3]:
        if isinstance(other, torch.Tensor):
            _expected(x, other)


def _expected(x: torch.Tensor, other: torch.Tensor, *_: Any, **__: Any) -> None:
    _refuse(x.dtype != other.dtype, f"expected scalar type {_name(x)} but found {_name(other)}")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> None:
    text = (
        f"Expected query, key, and value to have the same dtype, but got query.dtype: {_cpp(q)} key.dtype: {_cpp(k)} and "
        f"value.dtype: {_cpp(v)} instead."
    )
    _refuse(not q.dtype == k.dtype == v.dtype, text)


def _index_put(x: torch.Tensor, indices: Any, values: torch.Tensor, *_: Any, **__: Any) -> None:
    text = (
        "Index put requires the source and destination dtypes match, got {} for the destination and {} for the source."
    )
    _refuse(x.dtype != values.dtype, text.format(_name(x), _name(values)))
    if any(index is None or index.dtype in _MASKS for index in indices):  # what they choose depends on values
        return
    chosen = (*torch.broadcast_shapes(*(index.shape for index in indices)), *x.shape[len(indices) :])
    fits = len(values.shape) <= len(chosen) and all(
        given in (1, size) for given, size in zip(reversed(values.shape), reversed(chosen), strict=False)
    )
    text = "shape mismatch: value tensor of shape {} cannot be broadcast to indexing result of shape {}"
    _refuse(not fits, text.format(list(values.shape), list(chosen)))


def _index_add(x: torch.Tensor, dim: int, _: Any, source: torch.Tensor, **__: Any) -> None:
    text = f"index_add_(): self ({_name(x)}) and source ({_name(source)}) must have the same scalar type"
    _refuse(x.dtype != source.dtype, text)
    others = [(*t.shape[: dim % t.dim()], *t.shape[dim % t.dim() + 1 :]) if t.dim() else () for t in (x, source)]
    text = (
        f"source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
        f"{list(x.shape)} source.shape = {list(source.shape)}"
    )
    _refuse(others[0] != others[1], text)


def _index_copy(x: torch.Tensor, _: Any, __: Any, source: torch.Tensor) -> None:
    text = "index_copy_(): self and source expected to have the same dtype, but got (self) {} and (source) {}"
    _refuse(x.dtype != source.dtype, text.format(_name(x), _name(source)))


def _likelihood(_: Any, labels: torch.Tensor, *__: Any, **___: Any) -> None:
    _refuse(labels.dtype not in _LABELS, f"expected target dtype to be Long or Byte, but got {_name(labels)}")


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> None:
    _refuse(x.dtype != target.dtype, f"Found dtype {_name(target)} but expected {_name(x)}")


_CHECKS: dict[Any, Check] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.mv.default: _mv,
    aten.convolution.default: _convolution,
    aten.scaled_dot_product_attention.default: _attention,
    aten._scaled_dot_product_flash_attention.default: _attention,
    aten._scaled_dot_product_efficient_attention.default: _attention,
    aten._scaled_dot_product_cudnn_attention.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    aten._scaled_dot_product_attention_math.default: _attention,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _index_put),
    **dict.fromkeys((aten.index_add.default, aten.index_add_.default), _index_add),
    **dict.fromkeys((aten.index_copy.default, aten.index_copy_.default), _index_copy),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _likelihood),
    aten.binary_cross_entropy.default: _cross_entropy,
    **dict.fromkeys((aten.grid_sampler_2d.default, aten.grid_sampler_3d.default), _expected),
    aten._cdist_forward.default: _expected,
}
_ON_CUDA: dict[Any, Check] = dict.fromkeys((aten.native_layer_norm.default, aten.native_group_norm.default), _norm)


def refuse(func: Any, args: Any, kwargs: dict[str, Any], on_cuda: bool) -> None:
    """Raise PyTorch's RuntimeError if the kernel takes no such types."""
    check = _CHECKS.get(func) or (_ON_CUDA.get(func) if on_cuda else None)
    if check is not None:
        check(*args, **kwargs)

"""Sizes and layouts of tensors by their TensorMeta."""

from __future__ import annotations

from math import prod

from autosac.trace import TensorMeta

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def elements(meta: TensorMeta) -> int:
    """Number of elements."""
    return prod(meta.shape)


def dense_bytes(meta: TensorMeta) -> int:
    """Bytes of a contiguous tensor of this shape and dtype; 0 for a dtype that is not known."""
    return elements(meta) * ITEM_BYTES.get(meta.dtype, 0)


def is_contiguous(meta: TensorMeta) -> bool:
    """As `Tensor.is_contiguous()`: sizes of 1 may have any stride, an empty tensor is contiguous."""
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1 and stride != expected:
            return elements(meta) == 0
        expected *= size
    return True


def fastest_first(meta: TensorMeta) -> list[int]:
    """The dimensions of more than one element in the order of their strides: neighbours in memory differ in the first."""
    return sorted((d for d, size in enumerate(meta.shape) if size > 1), key=lambda d: meta.stride[d])


def contiguous(meta: TensorMeta) -> TensorMeta:
    """What `Tensor.contiguous()` returns."""
    strides, step = [], 1
    for size in reversed(meta.shape):
        strides.append(step)
        step *= size
    return meta._replace(stride=tuple(reversed(strides)))


def transposed(meta: TensorMeta, a: int, b: int) -> TensorMeta:
    """As `Tensor.transpose(a, b)`."""
    shape, stride = list(meta.shape), list(meta.stride)
    shape[a], shape[b] = shape[b], shape[a]
    stride[a], stride[b] = stride[b], stride[a]
    return meta._replace(shape=tuple(shape), stride=tuple(stride))


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple

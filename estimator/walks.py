"""How an elementwise kernel walks its memory, and what that takes.

A kernel whose operands all have one layout and one type loads vectors and is bound by the memory alone (`streamed.py`).
Any other computes an address for every element, with a division for each dimension that is left when neighbours are
joined, and has few bytes under way. Instructions and waiting loads take a time that overlaps with the memory's only partly:

    t = start + late + (walk^p + traffic^p)^(1/p),     walk = elements * cycles / (processors * clock)
    cycles = first + (operands - 1) * more + (dimensions - 2) * operands * division + cast + waiting * loads from memory

`first` is larger for a kernel that only converts. `cast` is paid if operands have several types and one of them is repeated
or strided: each load then asks for its type. Where neighbours of the walk lie in different sectors of an input, each load of
a warp fetches 32 of them, and nothing else counts. Fitted to the even ones of 20 training steps on an H100 and judged on the
odd ones and on other traces (`benchmarks/fit_elementwise.py`, `docs/causes.md`).
"""

from __future__ import annotations

import math
from itertools import pairwise

from autosac.estimator.work import base_name, item_bytes
from autosac.memory_sim.tensor_sizes import fastest_first
from autosac.trace import Signature, TensorMeta

LATE_CYCLES = 1_850.0
"""Cycles that such a kernel takes longer to start, and a gather, which waits for its indices."""

OVERLAP = 2.2
"""p: 1 if walking and traffic took turns, large if they hid each other."""

_FIRST, _FIRST_CONVERTED, _MORE, _DIVISION, _CAST = 0.484, 0.56, 0.014, 0.043, 0.40
_WAITING = 0.13
# With neighbours in different sectors. A block of threads uses a sector again if the walk turns soon.
_ACROSS, _SECTOR, _TURN = 1.78, 32, 80
_SIXTEEN_BITS = ("float16", "bfloat16")
_FLOATS = (*_SIXTEEN_BITS, "float32", "float64")
_NUMBERS = ("float64", "int64", "complex128")
_COPIES = ("_to_copy", "copy", "clone")


def access(signature: Signature) -> str:
    """How a kernel walks its memory: "elementwise" (vectorised), "strided", "broadcast", "assembled" or "converted".

    Strided: an input of the output's size has another layout, or the table of a complex product is broadcast. Broadcast:
    an input is repeated, be it a single element on the device: only numbers on the host are passed to the fast kernels.
    Assembled: an input is a part of the output (concatenation, padding). Converted: an input has 16 bits and the output
    is float32, inputs have different types, or a copy changes the type, unless from float32 to 16 bits.
    """
    if not signature.outputs or signature.name.startswith("aten._foreach"):
        return "elementwise"  # each tensor of a list is walked on its own
    out = _layout(signature.outputs[0])
    size = math.prod(signature.outputs[0].shape)
    found = "elementwise"
    for meta in signature.inputs:
        if meta.place != "device" or (math.prod(meta.shape) <= 1 and not (size > 1 and _is_element(meta))):
            continue
        smaller = math.prod(meta.shape) < size or any(s == 0 < n - 1 for n, s in zip(*meta[:2], strict=True))
        if smaller and not meta.dtype.startswith("complex"):
            found = "broadcast" if _spreads(meta, signature.outputs[0]) else "assembled"
        elif smaller or (math.prod(meta.shape) == size and _layout(meta) != out):
            return "strided"
        elif found == "elementwise" and _converts(signature, meta):
            found = "converted"
    return found


def _is_element(meta: TensorMeta) -> bool:
    """Whether this is a tensor of one element, rather than a number, which has no dimensions and a wide type."""
    return bool(meta.shape) or meta.dtype not in _NUMBERS


def _converts(signature: Signature, meta: TensorMeta) -> bool:
    """Whether the kernel changes the type of this input as it loads it."""
    out = signature.outputs[0].dtype
    if meta.dtype in _SIXTEEN_BITS and out == "float32":
        return True
    if base_name(signature.name) in _COPIES:
        return meta.dtype != out and not (meta.dtype == "float32" and out in _SIXTEEN_BITS)
    types = {m.dtype for m in signature.inputs if m.place == "device" and m.shape and m.dtype in _FLOATS}
    return len(types) > 1 and not signature.name.endswith("out")


def _spreads(meta: TensorMeta, out: TensorMeta) -> bool:
    """Whether the input's shape broadcasts to the output's."""
    pairs = zip(reversed(meta.shape), reversed(out.shape), strict=False)
    return len(meta.shape) <= len(out.shape) and all(n in (1, size) for n, size in pairs)


def _layout(meta: TensorMeta) -> tuple[tuple[int, int], ...]:
    """Sizes and strides with dimensions joined where they are contiguous with the next one."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


def element_cycles(signature: Signature, kind: str, uncached: float) -> float:
    """Cycles of one processor for an element of a kernel that is not vectorised. `kind`: how it walks (`access`);
    `uncached`: the share of its traffic that leaves the L2.
    """
    operands = walked(signature)
    if kind == "assembled":  # a part of the result, whose dimensions are its own
        return _FIRST
    loads = _WAITING * uncached * _loaded(signature, operands)
    if kind == "converted":
        return _FIRST_CONVERTED + _MORE * (len(operands) - 1) + loads
    cast = _CAST if len({meta.dtype for meta in operands if meta.dtype != "bool"}) > 1 else 0.0
    count = len(operands)
    cycles = _FIRST + _MORE * (count - 1) + _DIVISION * (_walked_dimensions(signature) - 2) * count + cast + loads
    return max(cycles, _ACROSS * walked_across(signature))


def _loaded(signature: Signature, operands: list[TensorMeta]) -> float:
    """The share of the traffic that is read."""
    read = sum(
        math.prod(n for n, s in zip(m.shape, m.stride, strict=True) if s) * item_bytes(m.dtype) for m in operands
    )
    written = math.prod(signature.outputs[0].shape) * item_bytes(signature.outputs[0].dtype)
    return read / max(1.0, read + written)


def _walked_dimensions(signature: Signature) -> int:
    """Dimensions that are left when those that all operands walk as one are joined, as TensorIterator does; at least 2."""
    out = signature.outputs[0]
    strides = [out.stride]
    for meta in walked(signature):
        missing = len(out.shape) - len(meta.shape)
        if not _spreads(meta, out):
            return 2  # a concatenation has dimensions of its own
        repeated = (s if n == m else 0 for n, m, s in zip(meta.shape, out.shape[missing:], meta.stride, strict=True))
        strides.append((*(0,) * missing, *repeated))
    order = fastest_first(out)
    joined = sum(all(s[outer] == s[inner] * out.shape[inner] for s in strides) for inner, outer in pairwise(order))
    return max(2, len(order) - joined)


def walked_across(signature: Signature) -> float:
    """The share of loads that fetch a sector for one element; 0 where neighbours in the result are so in all inputs of its
    size.
    """
    out = signature.outputs[0]
    if not any(meta.shape == out.shape and lies_apart(meta, out) for meta in walked(signature)):
        return 0.0
    return min(1.0, out.shape[fastest_first(out)[0]] / _TURN)


def lies_apart(meta: TensorMeta, out: TensorMeta) -> bool:
    """Whether neighbours of the result lie in different sectors of this input, which has as many dimensions."""
    order = fastest_first(out)
    return bool(order) and meta.stride[order[0]] * item_bytes(meta.dtype) >= _SECTOR


def walked(signature: Signature) -> list[TensorMeta]:
    """The inputs of which a kernel reads an element for every element of the result."""
    return [meta for meta in signature.inputs if meta.place == "device" and math.prod(meta.shape) > 1]

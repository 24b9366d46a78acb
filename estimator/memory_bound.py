"""Memory-bound operators: the three-segment model of elementwise kernels and slowdowns of the other families.

An elementwise kernel that moves x bytes takes (TorchSim section E, category one)

    log T(x) = a1 + b1 log x               x < K1          in the L2, dominated by the launch
             = a2 + b2 log x      K1 <= x < K2             transition
             = a3 +    log x      K2 <= x                  bandwidth-bound

continuous at K1 and K2 (`Segments`). The parameters are fitted where contiguous elementwise kernels were measured, and
scaled elsewhere: knots with the size of the L2, the last segment with the memory bandwidth. What the first takes
beyond the shortest kernel follows the processors and their clock, which decide how fast the L2 is read.

Any other family takes as long as an elementwise kernel of the same bytes times a slowdown (`Slowdown`)

    exp(c0 + c1 clip(log2(row / 8 KiB), 0, 3) + c2 clip(log2(row / 64 KiB), 0, 1) + c3 clip(log2(2 KiB / row),
    0, 3))

with the bytes of one row that is reduced: long rows need several blocks or passes, short ones leave threads
idle. Inputs that are not laid out like the output (transposed, sliced, broadcast) defeat vectorised loads, have a
slowdown of their own beyond the shortest kernel T0, may fetch more than they use (`sectors.py`), and leave a kernel that
computes an address for every element, with a division for each dimension that is left when neighbours are joined. Such
kernels start later (`_LATE_CYCLES`) and are bound by the instructions that their processors issue, whatever the type
(`_ISSUED_ELEMENTS`):

    T = late + max(T0 + exp(c0) (T(x) - T0), elements / (1.5 a cycle * processors * clock) * (1 + 0.08 (d - 2) inputs))

A softmax has three regimes, which are those of PyTorch's kernels (SoftMax.cu): rows of up to 1,024 elements stay in
registers; longer ones in shared memory, if they fit and begin at multiples of 16 bytes; all others are read three times,
and those that do not begin so element by element. Its backward multiplies gradient and result in a kernel before.

Some slowdowns are those of processors that issue too few bytes a cycle (`_ISSUED`). Where the memory has less to offer each
processor than on the GPU that they were fitted for, they shrink in that proportion, to nothing at the most: a GeForce's
memory feeds a processor with a quarter to a half of what an H100's does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.latencies import ROW_SUM_CYCLES
from autosac.estimator.models import Estimate
from autosac.estimator.sectors import overfetched_bytes
from autosac.estimator.work import (
    argument,
    base_name,
    crosses_to_host,
    family,
    item_bytes,
    kernel_count,
    moved_bytes,
    tensor_bytes,
)
from autosac.trace import Signature, TensorMeta

_ROW, _LONG_ROW, _SHORT_ROW = 8192.0, 65536.0, 2048.0


_MODELS = Path(__file__).resolve().parent / "data" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The three-segment model. Times in milliseconds, knots in bytes."""

    slope1: float
    slope2: float
    knot1_bytes: float
    knot2_bytes: float
    bandwidth_gbps: float

    def milliseconds(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """T(x); the last segment is x over the bandwidth, the others follow from continuity."""
        x = np.maximum(nbytes, 1.0)
        at2 = self.knot2_bytes / (self.bandwidth_gbps * 1e6)
        at1 = at2 * (self.knot1_bytes / self.knot2_bytes) ** self.slope2
        return np.where(
            x >= self.knot2_bytes,
            x / (self.bandwidth_gbps * 1e6),
            np.where(
                x >= self.knot1_bytes,
                at2 * (x / self.knot2_bytes) ** self.slope2,
                at1 * (x / self.knot1_bytes) ** self.slope1,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSegments:
    """The three segments of `source`, on `target`; see the module's docstring."""

    segments: Segments
    source: Hardware
    target: Hardware

    def milliseconds(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """T(x) on the target."""
        segments, source, target = self.segments, self.source, self.target
        cache = target.l2_bytes / source.l2_bytes
        knot1, knot2 = segments.knot1_bytes * cache, segments.knot2_bytes * cache
        at2 = knot2 / (segments.bandwidth_gbps * 1e6) * source.mem_bandwidth_gbps / target.mem_bandwidth_gbps
        x = np.maximum(nbytes, 1.0)
        near, at1 = self._cached_ms(np.minimum(x, knot1)), float(self._cached_ms(np.array([knot1]))[0])
        between = at1 * (x / knot1) ** (max(0.0, math.log(at2 / at1)) / math.log(knot2 / knot1))
        return np.where(x >= knot2, at2 * x / knot2, np.where(x >= knot1, between, near))

    def _cached_ms(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """In the L2: what is beyond the shortest kernel is read at the processors' clock."""
        base, source, target = self.segments, self.source, self.target
        first = base.milliseconds(np.minimum(nbytes, base.knot1_bytes))
        first *= np.maximum(1.0, nbytes / base.knot1_bytes) ** base.slope1
        beyond = np.maximum(first - source.kernel_us * 1e-3, 0.0)
        cycles = source.sm_count * source.boost_mhz / (target.sm_count * target.boost_mhz)
        return np.asarray(target.kernel_us * 1e-3 + beyond * cycles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Time relative to an elementwise kernel of the same bytes;

    `rel_std` is the residual's standard deviation.
    """

    constant: float
    per_octave: float = 0.0
    long_row: float = 0.0
    short_row: float = 0.0
    rel_std: float = 0.2

    def factor(self, row_bytes: float) -> float:
        """The slowdown for rows of this many bytes (0: not rows)."""
        coefficients = (self.constant, self.per_octave, self.long_row, self.short_row)
        return math.exp(sum(c * f for c, f in zip(coefficients, row_features(row_bytes), strict=True)))


# Not measured: drawing random numbers, walking a broadcast operand, or finding which input an element comes from, takes a
# part of the bandwidth away, and so does a permuted or sliced input ("strided_reals"; the fit's "strided" is one of complex
# products): two transposed float32 copies in NeuSight's tables took 1.3 and 1.4 times as long. "converted" is: kernels that
# convert an element as they load it are not vectorised, and ran 1.13 to 1.18 times as long as vectorised ones on an A100
# (github.com/pytorch/pytorch/pull/195542: 16 bits to float32, in every release up to 2.13) and 1.21 to 1.31 times on an H100
# (pull/137053: to 16 bits, before that was vectorised).
_ESTIMATED = {
    "converted": Slowdown(constant=0.2, rel_std=0.1),
    "random_elementwise": Slowdown(constant=0.18, rel_std=0.2),
    "broadcast": Slowdown(constant=0.2, rel_std=0.2),
    "assembled": Slowdown(constant=0.2, rel_std=0.2),
    "strided_reals": Slowdown(constant=0.26, rel_std=0.15),
}


# Elements a cycle and processor of kernels that are not vectorised: 1.05 to 1.56 for 14 kinds of strided, broadcast and
# converting calls in 16 bits in TraceLens's H100 traces (171dd747), 1.6 for six sizes of sliced rows (Liger's SwiGLU, H100).
# Elsewhere: float32 broadcasts in NeuSight's tables 1.0 and 1.3 on an H100, 0.9 and 1.1 on an A100; a fill on a B200 1.0.
_ISSUED_ELEMENTS = 1.5
_BY_ELEMENT = ("strided", "strided_reals", "broadcast", "converted", "assembled")
# The same where neighbours of the walk lie in different sectors of an input, so that each load of a warp fetches 32 of them:
# transposed copies of `autosac calibrate` on an H100. A block of threads uses a sector again if the walk turns soon.
ACROSS, _SECTOR, _TURN = 0.52, 32, 80
# What each dimension beyond two takes, of an element's time and for every input: eight kinds of calls in those traces.
_DIVISION = 0.08
# Cycles that such a kernel takes longer to start, and a gather, which waits for its indices: 0.9 to 1.4 us for eleven kinds of
# small calls in those traces, 1.3 to 1.9 us for three gathers. Held out: 0.7 us on a B200.
_LATE_CYCLES = 1_850.0
_LATE = (*_BY_ELEMENT, "gather")
# NeuSight's tables, float32 on H100, A100 and V100: rows of 512 and 1,024 take 0.96 to 1.07 of an elementwise kernel's time,
# rows of 2,048 1.10 to 1.16. Rows of 5,185 in bfloat16 (TraceLens, H100) take 3.5 times as long.
_SOFTMAX = {
    "softmax_registers": Slowdown(constant=0.0, rel_std=0.08),
    "softmax_shared": Slowdown(constant=0.12, rel_std=0.1),
    "softmax_reread": Slowdown(constant=0.72, rel_std=0.15),
    "softmax_unaligned": Slowdown(constant=1.25, rel_std=0.3),
    "softmax_backward_reread": Slowdown(constant=0.3, rel_std=0.2),  # by count: only the gradient is read twice
}
_REGISTERS_ELEMENTS, _SHARED_BYTES, _ALIGNED_BYTES = 1024, 48 * 1024 - 128, 16
_NORMS = ("norm", "norm_backward")  # which wait for their rows' sums as sums do
_ISSUED = (*_NORMS, "random_elementwise")
_WORD_BYTES = 4
_SIXTEEN_BITS = ("float16", "bfloat16")
_FLOATS = (*_SIXTEEN_BITS, "float32", "float64")
_NUMBERS = ("float64", "int64", "complex128")
_COPIES = ("_to_copy", "copy", "clone")


@cache
def _fitted() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((_MODELS / "memory.json").read_text(encoding="utf-8"))
    return table


def row_features(row_bytes: float) -> tuple[float, float, float, float]:
    """What a slowdown is linear in; see the module's docstring."""
    if row_bytes <= 0:
        return (1.0, 0.0, 0.0, 0.0)
    return (
        1.0,
        min(max(math.log2(row_bytes / _ROW), 0.0), 3.0),
        min(max(math.log2(row_bytes / _LONG_ROW), 0.0), 1.0),
        min(max(math.log2(_SHORT_ROW / row_bytes), 0.0), 3.0),
    )


def row_bytes(signature: Signature) -> float:
    """Bytes of one row that a norm or a softmax works on: its normalised extent, or the dimension `dim`."""
    data = max(signature.inputs, key=lambda meta: math.prod(meta.shape), default=None)
    if data is None or not data.shape:
        return 0.0
    extent = float(data.shape[-1])
    normalized, dim = argument(signature, "normalized_shape"), argument(signature, "dim")
    if isinstance(normalized, tuple):
        extent = math.prod(float(size) for size in normalized if isinstance(size, int | float))
    elif isinstance(dim, int) and -len(data.shape) <= dim < len(data.shape):
        extent = float(data.shape[dim])
    return extent * item_bytes(data.dtype)


def softmax_regime(row_bytes: float, item: int) -> str:
    """Which of PyTorch's softmax kernels takes rows of this many bytes; "softmax" if they are not known."""
    if row_bytes <= 0:
        return "softmax"
    if row_bytes <= _REGISTERS_ELEMENTS * item:
        return "softmax_registers"
    if row_bytes % _ALIGNED_BYTES:
        return "softmax_unaligned" if item < _WORD_BYTES else "softmax_reread"
    return "softmax_shared" if row_bytes < _SHARED_BYTES else "softmax_reread"


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


class LearnedMemory:
    """The memory-bound operators of one GPU: fitted segments and slowdowns (`data/models/memory.json`)."""

    def __init__(self, hardware: Hardware) -> None:
        """Scale the fitted model to `hardware`; a GPU of another vendor is left to the roofline."""
        fitted = _fitted()
        reference = load_hardware(fitted["reference"])
        self._known = hardware.vendor == reference.vendor
        self._floor_ms = hardware.kernel_us * 1e-3
        self._segments = ScaledSegments(segments=Segments(**fitted["segments"]), source=reference, target=hardware)
        plain = Slowdown(constant=0.0, rel_std=fitted["rel_std"])
        measured = {name: Slowdown(**values) for name, values in fitted["slowdowns"].items()}
        self._slowdowns = {"elementwise": plain, "fill": plain, "optimizer": plain} | _ESTIMATED | measured | _SOFTMAX
        self._l2_bytes = hardware.l2_bytes
        self._waits_ms = ROW_SUM_CYCLES / (hardware.boost_mhz * 1e3)
        self._late_ms = _LATE_CYCLES / (hardware.boost_mhz * 1e3)
        self._elements_per_ms = _ISSUED_ELEMENTS * hardware.sm_count * hardware.boost_mhz * 1e3
        self._fed = min(1.0, _bytes_per_cycle(hardware) / _bytes_per_cycle(reference))
        self._suffix = hardware.fitted_elsewhere(reference.name)

    def elementwise_ms(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """What contiguous elementwise kernels that move so many bytes take."""
        return self._segments.milliseconds(nbytes)

    def _factor(self, name: str, row_bytes: float) -> float:
        factor = self._slowdowns[name].factor(row_bytes)
        return float(min(factor, max(1.0, factor * self._fed))) if name in _ISSUED else factor

    def _slowed_ms(self, ms: float, name: str, row: float) -> float:
        factor = self._factor(name, row)
        if name in _LATE:  # what is slower is the traffic, not the start
            return self._floor_ms + (ms - self._floor_ms) * factor
        return ms * factor

    def _issue_ms(self, signature: Signature, name: str) -> float:
        """What the instructions of a kernel take that computes an address for every element."""
        if name not in _BY_ELEMENT:
            return 0.0
        divisions = _DIVISION * (_walked_dimensions(signature) - 2) * len(_walked(signature))
        across = _ISSUED_ELEMENTS / ACROSS * _walked_across(signature)
        return math.prod(signature.outputs[0].shape) / self._elements_per_ms * max(1 + divisions, across)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the operators whose family was fitted."""
        answers: list[Estimate | None] = [None] * len(signatures)
        if not self._known:
            return answers
        chosen = [
            (i, name)
            for i, signature in enumerate(signatures)
            if (name := _kernel(signature)) in self._slowdowns and not crosses_to_host(signature)
        ]
        moved = [moved_bytes(signatures[i], family(signatures[i].name)) for i, _ in chosen]
        extra = [
            overfetched_bytes(signatures[i], self._l2_bytes) if name == "strided_reals" else 0.0 for i, name in chosen
        ]
        plain = self._segments.milliseconds(np.array(moved))
        fetched = self._segments.milliseconds(np.array(moved) + np.array(extra))
        for (i, name), ms, wasteful in zip(chosen, plain.tolist(), fetched.tolist(), strict=True):
            signature = signatures[i]
            rows = row_bytes(signature) if name in _NORMS else 0.0
            longest = max(
                self._slowed_ms(ms, name, rows),
                self._issue_ms(signature, name),
                self._floor_ms * kernel_count(signature),
            )
            if name in _NORMS:
                longest = max(longest, self._waits_ms)
            if wasteful > ms:
                longest = max(longest, wasteful)
            if name in _LATE:
                longest += self._late_ms
            if base_name(signature.name) == "constant_pad_nd":  # fills the result first
                longest += float(self._segments.milliseconds(np.array([tensor_bytes(signature.outputs)]))[0])
            answers[i] = Estimate(longest, f"learned:{_label(name)}{self._suffix}", self._slowdowns[name].rel_std)
        return answers


def _kernel(signature: Signature) -> str:
    """The slowdown that an operator has: its family, refined by how its kernel walks memory."""
    kind = family(signature.name)
    if kind == "elementwise":
        name = access(signature)
        complexes = any(meta.dtype.startswith("complex") for meta in signature.inputs)
        return "strided_reals" if name == "strided" and not complexes else name
    if kind == "softmax" and signature.inputs:
        regime = softmax_regime(row_bytes(signature), item_bytes(signature.inputs[0].dtype))
        return "softmax_backward_reread" if regime == "softmax_reread" and "_backward" in signature.name else regime
    return kind


def _walked_dimensions(signature: Signature) -> int:
    """Dimensions that are left when those that all operands walk as one are joined, as TensorIterator does; at least 2."""
    out = signature.outputs[0]
    strides = [out.stride]
    for meta in _walked(signature):
        missing = len(out.shape) - len(meta.shape)
        if not _spreads(meta, out):
            return 2  # a concatenation has dimensions of its own
        repeated = (s if n == m else 0 for n, m, s in zip(meta.shape, out.shape[missing:], meta.stride, strict=True))
        strides.append((*(0,) * missing, *repeated))
    order = sorted((d for d, size in enumerate(out.shape) if size > 1), key=lambda d: out.stride[d])
    joined = sum(all(s[outer] == s[inner] * out.shape[inner] for s in strides) for inner, outer in pairwise(order))
    return max(2, len(order) - joined)


def _walked_across(signature: Signature) -> float:
    """The share of loads that fetch a sector for one element; 0 where neighbours in the result are so in all inputs of its
    size.
    """
    out = signature.outputs[0]
    fastest = min((d for d, size in enumerate(out.shape) if size > 1), key=lambda d: out.stride[d], default=None)
    if fastest is None or not any(
        meta.shape == out.shape and meta.stride[fastest] * item_bytes(meta.dtype) >= _SECTOR
        for meta in _walked(signature)
    ):
        return 0.0
    return min(1.0, out.shape[fastest] / _TURN)


def _walked(signature: Signature) -> list[TensorMeta]:
    """The inputs of which a kernel reads an element for every element of the result."""
    return [meta for meta in signature.inputs if meta.place == "device" and math.prod(meta.shape) > 1]


def _label(name: str) -> str:
    return "softmax" if name in _SOFTMAX else name.removesuffix("_reals")


def _bytes_per_cycle(hardware: Hardware) -> float:
    """What the memory has to offer one processor in one of its cycles."""
    return hardware.mem_bandwidth_gbps * 1e3 / (hardware.sm_count * hardware.boost_mhz)

"""Memory-bound operators: what an elementwise kernel takes, and slowdowns of the other families.

An elementwise kernel whose operands are laid out alike is bound by what it moves (`streamed.py`). One whose inputs are not
laid out or typed like the output (transposed, sliced, broadcast, converting) computes an address for every element
(`walks.py`), and may fetch more than it uses (`sectors.py`).

Any other family takes as long as an elementwise kernel of the same bytes times a slowdown (`Slowdown`)

    exp(c0 + c1 clip(log2(row / 8 KiB), 0, 3) + c2 clip(log2(row / 64 KiB), 0, 1) + c3 clip(log2(2 KiB / row),
    0, 3))

with the bytes of one row that is reduced: long rows need several blocks or passes, short ones leave threads idle.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.latencies import ROW_SUM_CYCLES
from autosac.estimator.models import Estimate
from autosac.estimator.sectors import overfetched_bytes
from autosac.estimator.streamed import Streamed
from autosac.estimator.walks import LATE_CYCLES, OVERLAP, access, element_cycles
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
from autosac.trace import Signature

_ROW, _LONG_ROW, _SHORT_ROW = 8192.0, 65536.0, 2048.0


_MODELS = Path(__file__).resolve().parent / "data" / "models"


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


# Not measured: drawing random numbers takes a part of the bandwidth away.
_ESTIMATED = {"random_elementwise": Slowdown(constant=0.18, rel_std=0.2)}
# Kernels that walk element by element -> the relative error of their prices.
_BY_ELEMENT = {"strided_reals": 0.12, "broadcast": 0.12, "converted": 0.1, "assembled": 0.2}
_LATE = (*_BY_ELEMENT, "strided", "gather")  # which start later
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


class LearnedMemory:
    """The memory-bound operators of one GPU: traffic, walks, and fitted slowdowns (`data/models/memory.json`)."""

    def __init__(self, hardware: Hardware) -> None:
        """Scale the fitted model to `hardware`; a GPU of another vendor is left to the roofline."""
        fitted = _fitted()
        reference = load_hardware(fitted["reference"])
        self._known = hardware.vendor == reference.vendor
        self._floor_ms = hardware.kernel_us * 1e-3
        self._streamed = Streamed(hardware=hardware)
        plain = Slowdown(constant=0.0, rel_std=fitted["rel_std"])
        measured = {name: Slowdown(**values) for name, values in fitted["slowdowns"].items()}
        self._slowdowns = {"elementwise": plain, "fill": plain, "optimizer": plain} | _ESTIMATED | measured | _SOFTMAX
        self._l2_bytes = hardware.l2_bytes
        self._waits_ms = ROW_SUM_CYCLES / (hardware.boost_mhz * 1e3)
        self._late_ms = LATE_CYCLES / (hardware.boost_mhz * 1e3)
        self._cycles_per_ms = hardware.sm_count * hardware.boost_mhz * 1e3
        self._fed = min(1.0, _bytes_per_cycle(hardware) / _bytes_per_cycle(reference))
        self._suffix = hardware.fitted_elsewhere(reference.name)

    def elementwise_ms(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """What contiguous elementwise kernels that move so many bytes take."""
        return self._streamed.milliseconds(nbytes)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the operators whose family was fitted."""
        answers: list[Estimate | None] = [None] * len(signatures)
        if not self._known:
            return answers
        chosen = [
            (i, name)
            for i, signature in enumerate(signatures)
            if ((name := _kernel(signature)) in self._slowdowns or name in _BY_ELEMENT)
            and not crosses_to_host(signature)
        ]
        moved = np.array([self._moved(signatures[i], name) for i, name in chosen])
        traffic, uncached = self._streamed.traffic_ms(moved), 1.0 - self._streamed.cached(moved)
        for (i, name), ms, missed in zip(chosen, traffic.tolist(), uncached.tolist(), strict=True):
            signature = signatures[i]
            if name in _BY_ELEMENT:
                took, rel_std = self._walked_ms(signature, name, ms, missed), _BY_ELEMENT[name]
            else:
                took, rel_std = self._slowed_ms(signature, name, ms), self._slowdowns[name].rel_std
            took = max(took, self._floor_ms * kernel_count(signature)) + self._before_ms(signature)
            answers[i] = Estimate(took, f"learned:{_label(name)}{self._suffix}", rel_std)
        return answers

    def _moved(self, signature: Signature, name: str) -> float:
        again = overfetched_bytes(signature, self._l2_bytes) if name == "strided_reals" else 0.0
        return moved_bytes(signature, family(signature.name)) + again

    def _walked_ms(self, signature: Signature, name: str, traffic_ms: float, uncached: float) -> float:
        """A kernel that computes an address for every element (`walks.py`)."""
        cycles = element_cycles(signature, name, uncached)
        walk_ms = math.prod(signature.outputs[0].shape) * cycles / self._cycles_per_ms
        both: float = (walk_ms**OVERLAP + traffic_ms**OVERLAP) ** (1 / OVERLAP)
        return self._floor_ms + self._late_ms + both

    def _slowed_ms(self, signature: Signature, name: str, traffic_ms: float) -> float:
        """A slowdown of an elementwise kernel."""
        factor = self._slowdowns[name].factor(row_bytes(signature) if name in _NORMS else 0.0)
        if name in _ISSUED:
            factor = min(factor, max(1.0, factor * self._fed))
        if name in _LATE:  # what is slower is the traffic, not the start
            return float(self._floor_ms + self._late_ms + traffic_ms * factor)
        return float(max((self._floor_ms + traffic_ms) * factor, self._waits_ms if name in _NORMS else 0.0))

    def _before_ms(self, signature: Signature) -> float:
        """A kernel that comes before: the result filled, to be padded, or copied, to be masked."""
        base = base_name(signature.name)
        if base == "constant_pad_nd" and _pads(signature):
            return float(self.elementwise_ms(np.array([tensor_bytes(signature.outputs)]))[0])
        if base == "masked_fill" and not signature.mutates:
            return float(self.elementwise_ms(np.array([2.0 * tensor_bytes(signature.outputs)]))[0])
        return 0.0


def _pads(signature: Signature) -> bool:
    """Whether there is anything to pad: without, the tensor is cloned."""
    pad = argument(signature, "pad")
    return not isinstance(pad, tuple) or any(pad)


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


def _label(name: str) -> str:
    return "softmax" if name in _SOFTMAX else name.removesuffix("_reals")


def _bytes_per_cycle(hardware: Hardware) -> float:
    """What the memory has to offer one processor in one of its cycles."""
    return hardware.mem_bandwidth_gbps * 1e3 / (hardware.sm_count * hardware.boost_mhz)

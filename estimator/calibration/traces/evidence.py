"""What profiler traces say of single operators: one row for every distinct way of calling one, in every trace.

The device time of a call is the sum of its kernels. What it adds to a stream that does not wait for its host is more:
for each kernel the gap that the device leaves before the next one of a full queue (`occupied`). That is what the models
price.

Calls whose kernels ran beside a collective are left out where there are others; what they took longer is the overlap
slowdown. Where there are no others, their time is divided by that slowdown.

A trace without strides does not tell layouts. Where a kernel ran that PyTorch takes for other layouts than the
contiguous one, and the shapes do not call for it, the call counts as unreadable.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.walks import access
from autosac.estimator.work import family
from autosac.kineto import Attribution, HostEvent, Kernel, OperatorCall, Profile, Unreadable, attribute, to_signature
from autosac.trace import Signature

_OVERLAPPED, _FREE = 0.5, 0.01  # shares of an operator's time beside collectives
_TF32_KERNELS = ("tf32", "s1688gemm", "s1688fprop", "s1688dgrad", "s1688wgrad", "xf32")
_FEWEST_OVERLAPS = 5
_GAP_US = 1.0  # what H100s and B200s leave
_SLOWER_BESIDE = 1.19  # as `runtime_sim.ConstantOverlap`, where a trace does not say
_ANY_LAYOUT = "::elementwise_kernel"  # of TensorIterator's kernels, the one that computes an address for every element


class EvidenceRow(NamedTuple):
    """One way of calling an operator in one trace.

    `us`: the sum of its kernels, the median of `calls` calls; `kernels`: how many they are, in the mean; `rel_std`:
    standard deviation of the calls, relative; `tf32`: float32 products ran on tensor cores; `has_strides`: the trace
    held strides, else tensors were taken to be contiguous; `beside`: no call ran without a collective beside it.
    """

    trace: str
    signature: Signature
    us: float
    calls: int
    rel_std: float
    tf32: bool
    kernels: float = 1.0
    has_strides: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvidence:
    """What one file says. Times in microseconds, of the device unless they are called the host's.

    `total_us`: of all kernels; `covered_us`: of those whose operator has a signature; `unreadable`: why others have none.
    `host_us`: the median of an operator that launches kernels, by phase. `overlap`: how much longer operators take beside
    collectives (ratio), and for how many kinds of calls that is known. `resolution_us`: in which steps times were noted.
    """

    path: str
    rank: int
    world_size: int
    total_us: float
    covered_us: float
    collectives_us: float
    rows: tuple[EvidenceRow, ...]
    collectives: tuple[tuple[Kernel, HostEvent | None], ...]
    unreadable: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)
    lost: dict[str, tuple[int, float]] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    launch_us: float = math.nan
    host_gap_us: float = 0.0
    queue_gap_us: float = math.nan
    span_us: float = 0.0
    overlap: tuple[float, int] = (math.nan, 0)
    resolution_us: float = 0.001
    with_stack: bool = False
    damaged: int = 0


def gather(profile: Profile) -> TraceEvidence:
    """All that a profile says."""
    found = attribute(profile)
    beside = _Beside([kernel for kernel, _ in found.collectives])
    calls: dict[tuple[Signature, bool], list[tuple[float, float]]] = {}
    kernels: dict[tuple[Signature, bool], list[int]] = {}
    unreadable: dict[str, float] = {}
    covered = 0.0
    reader = _Signatures()
    for measured in found.measured:
        signature, why = reader.read(measured)
        if signature is not None and not profile.with_strides and _layout_is_lost(signature, measured.kernels):
            signature, why = None, "the trace does not hold its strides"
        if signature is None:
            text = f"{measured.op.name}: {why}"
            unreadable[text] = unreadable.get(text, 0.0) + measured.us
            continue
        covered += measured.us
        key = (signature, _is_tf32(signature, measured.kernels))
        kernels.setdefault(key, []).append(len(measured.kernels))
        calls.setdefault(key, []).append((measured.us + measured.begins_us, beside.share(measured.kernels)))
    return TraceEvidence(
        path=profile.path,
        rank=profile.rank,
        world_size=profile.world_size,
        total_us=sum(kernel.us for kernel in profile.kernels),
        covered_us=covered,
        collectives_us=sum(kernel.us for kernel, _ in found.collectives),
        rows=tuple(_row(profile, *key, times, kernels[key]) for key, times in calls.items()),
        collectives=found.collectives,
        unreadable=dict(sorted(unreadable.items(), key=lambda item: -item[1])),
        unknown=dict(found.unknown),
        lost=dict(found.lost),
        host_us=_host_us(found),
        launch_us=statistics.median(found.launch_us) if found.launch_us else math.nan,
        host_gap_us=found.host_gap_us,
        queue_gap_us=found.queue_gap_us,
        span_us=max(k.end_us for k in profile.kernels) - profile.kernels[0].begin_us,
        overlap=_overlap(calls.values()),
        resolution_us=1.0 if all(kernel.us == int(kernel.us) for kernel in profile.kernels) else 0.001,
        with_stack=profile.with_stack,
        damaged=profile.damaged,
    )


def _row(
    profile: Profile, signature: Signature, tf32: bool, times: Sequence[tuple[float, float]], kernels: Sequence[int]
) -> EvidenceRow:
    free = [us for us, share in times if share <= _FREE]
    alone = free or [us for us, _ in times]
    middle = statistics.median(alone)
    spread = statistics.pstdev(alone) / middle if middle else 0.0
    return EvidenceRow(
        Path(profile.path).name,
        signature,
        middle,
        len(alone),
        spread,
        tf32,
        statistics.fmean(kernels),
        profile.with_strides,
        not free,
    )


def occupied(traces: Sequence[TraceEvidence]) -> tuple[TraceEvidence, ...]:
    """The traces of one GPU with the gaps of a full queue in every row's time, and without what collectives beside it cost.

    A trace whose device mostly waited for its host does not show the gap: it is then that of the other traces, or `_GAP_US`.
    """
    known = [trace.queue_gap_us for trace in traces if math.isfinite(trace.queue_gap_us)]
    usual = statistics.median(known) if known else _GAP_US
    return tuple(_occupied(trace, usual) for trace in traces)


def _occupied(trace: TraceEvidence, usual_us: float) -> TraceEvidence:
    gap = trace.queue_gap_us if math.isfinite(trace.queue_gap_us) else usual_us
    slower = max(1.0, trace.overlap[0]) if math.isfinite(trace.overlap[0]) else _SLOWER_BESIDE
    alone = (row._replace(us=row.us / slower) if row.beside else row for row in trace.rows)
    return replace(trace, rows=tuple(row._replace(us=row.us + gap * row.kernels) for row in alone))


class _Signatures:
    """Signatures of calls, each distinct one built once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[Signature | None, str]] = {}

    def read(self, measured: OperatorCall) -> tuple[Signature | None, str]:
        """The signature, or why there is none."""
        copies = tuple(sorted({kernel.name for kernel in measured.kernels if kernel.kind == "copy"}))
        noted = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        args = measured.op.args
        kernels = tuple(sorted({kernel.name for kernel in measured.kernels})) if _holds_list(args) else ()
        key = (measured.op.name, measured.node, *copies, *kernels, *(str(args.get(name)) for name in noted))
        if key not in self._known:
            try:
                self._known[key] = to_signature(measured.op, copies, measured.node, kernels), ""
            except Unreadable as e:
                self._known[key] = None, str(e)
        return self._known[key]


def _holds_list(args: Mapping[str, Any]) -> bool:
    """Whether a list of tensors was passed, whose type is not noted."""
    return "TensorList" in (args.get("Input type") or ())


def _is_tf32(signature: Signature, kernels: Iterable[Kernel]) -> bool:
    if family(signature.name) not in ("matmul", "batched_matmul") or signature.inputs[0].dtype != "float32":
        return False
    return any(mark in kernel.name for kernel in kernels for mark in _TF32_KERNELS)


def _layout_is_lost(signature: Signature, kernels: Iterable[Kernel]) -> bool:
    return access(signature) == "elementwise" and any(_ANY_LAYOUT in kernel.name for kernel in kernels)


def _host_us(found: Attribution) -> dict[str, float]:
    by_phase: dict[str, list[float]] = {}
    for measured in found.measured:
        by_phase.setdefault(measured.phase, []).append(measured.host_us)
    return {phase: statistics.median(times) for phase, times in sorted(by_phase.items())}


# ---- overlap ---------------------------------------------------------------------------------------------------


class _Beside:
    """Tells which share of an operator's time a collective was running."""

    def __init__(self, collectives: Sequence[Kernel]) -> None:
        merged: list[list[float]] = []
        for kernel in sorted(collectives, key=lambda k: k.begin_us):
            if merged and kernel.begin_us <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], kernel.end_us)
            else:
                merged.append([kernel.begin_us, kernel.end_us])
        table: NDArray[np.float64] = np.array(merged, dtype=np.float64).reshape(-1, 2)
        self._begins, self._ends = table[:, 0], table[:, 1]
        self._before = np.concatenate([[0.0], np.cumsum(self._ends - self._begins)])

    def _until(self, when: float) -> float:
        """Microseconds of collectives before this time."""
        i = int(np.searchsorted(self._begins, when, side="right"))
        if i == 0:
            return 0.0
        return float(self._before[i - 1] + min(when, self._ends[i - 1]) - self._begins[i - 1])

    def share(self, kernels: Sequence[Kernel]) -> float:
        """The share of these kernels' time."""
        total = sum(kernel.us for kernel in kernels)
        if not total or not len(self._begins):
            return 0.0
        return sum(self._until(kernel.end_us) - self._until(kernel.begin_us) for kernel in kernels) / total


def _overlap(calls: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, int]:
    """How much longer the same calls take beside collectives: the median over kinds of calls, and how many say so."""
    ratios: list[float] = []
    for times in calls:
        overlapped = [us for us, share in times if share >= _OVERLAPPED]
        free = [us for us, share in times if share <= _FREE]
        if overlapped and free:
            ratios.append(statistics.median(overlapped) / statistics.median(free))
    return (statistics.median(ratios) if len(ratios) >= _FEWEST_OVERLAPS else math.nan, len(ratios))

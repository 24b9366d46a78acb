"""Fits what elementwise kernels take: traffic of those that load vectors, walks of all others (`streamed.py`, `walks.py`).

    python -m benchmarks.fit_elementwise

Fitted to the even ones of the profiled steps on an H100 (`benchmarks/step_kinds`). Prints what the fit finds beside the
constants that are shipped, and median errors of the shipped ones on the even and on the odd steps, by how a kernel walks.
Constants are rounded, and the share of the peak bandwidth is lower than the fit's: another H100 reached less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from autosac.estimator import LearnedMemory, load_hardware
from autosac.estimator.streamed import CACHED, CYCLE_BYTES, SHARE
from autosac.estimator.walks import access
from autosac.estimator.work import family, kernel_count, moved_bytes
from benchmarks.step_kinds.evidence import Kind, load

_GPU = load_hardware("h100-sxm-80gb")
_OTHER = (
    "aten._foreach",
    "aten.silu_",
    "aten.masked_fill.",
    "aten.constant_pad",
    "aten.cat",
    "aten.stack",
    "aten.roll",
)
_POOLS = ("pool", "upsample")


def elementwise(kinds: Sequence[Kind]) -> list[Kind]:
    """Calls that are one elementwise kernel. (`silu_` is left out: its time in a trace holds a copy that autograd makes.)"""
    return [
        kind
        for kind in kinds
        if family(kind.signature.name) == "elementwise"
        and kernel_count(kind.signature) == 1
        and not kind.signature.name.startswith(_OTHER)
        and not any(name in kind.signature.name for name in _POOLS)
        and not kind.signature.name.endswith("_backward.default")
        and all(meta.place == "device" for meta in (*kind.signature.inputs, *kind.signature.outputs))
    ]


def traffic(kinds: Sequence[Kind]) -> NDArray[np.float64]:
    """Bytes a cycle of the L2, the sizes (of the L2) up to which all and from which no traffic hits it, and the share of the
    peak bandwidth that make the mean absolute logarithm of the errors least.
    """
    plain = [k for k in kinds if access(k.signature) == "elementwise"]
    moved = np.array([moved_bytes(k.signature, "elementwise") for k in plain])
    measured = np.array([k.us for k in plain])

    def error(values: NDArray[np.float64]) -> float:
        cycle, full, none, share = values
        if min(values) <= 0 or none <= full * 1.05:
            return 9.0
        left = np.log(none * _GPU.l2_bytes / np.maximum(moved, 1.0))
        hit = np.clip(left / math.log(none / full), 0.0, 1.0)
        fast, slow = cycle * _GPU.sm_count * _GPU.boost_mhz, share * _GPU.mem_bandwidth_gbps * 1e3
        us = _GPU.kernel_us + moved * (hit / fast + (1 - hit) / slow)
        return float(np.mean(np.abs(np.log(us / measured))))

    start = np.array([30.0, 0.5, 2.0, 0.85])
    options = {"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-6}
    return np.asarray(minimize(error, start, method="Nelder-Mead", options=options).x)


def main() -> None:
    """The command line."""
    halves = [[k for k in elementwise(load()) if k.number % 2 == half] for half in (0, 1)]
    found, shipped = traffic(halves[0]), (CYCLE_BYTES, *CACHED, SHARE)
    for name, mine, theirs in zip(("bytes a cycle", "all cached", "none cached", "share"), found, shipped, strict=True):
        print(f"{name:15s} fitted {mine:7.3f}   shipped {theirs:7.3f}")
    memory = LearnedMemory(_GPU)
    for half, kinds in zip(("even", "odd"), halves, strict=True):
        for walk in ("elementwise", "converted", "broadcast", "strided"):
            chosen = [k for k in kinds if access(k.signature) == walk]
            prices = memory.estimate([k.signature for k in chosen])
            errors = [abs(p.ms * 1e3 / k.us - 1) for p, k in zip(prices, chosen, strict=True) if p is not None]
            print(f"{half:5s} {walk:12s} {len(errors):4d} kinds, median error {statistics.median(errors):5.1%}")


if __name__ == "__main__":
    main()

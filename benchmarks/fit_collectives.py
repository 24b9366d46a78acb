"""Fits the log-sigmoid curves of collectives inside a node (`autosac.estimator.log_sigmoid`).

One curve for every link generation and collective, on all sizes (512 B to 512 MiB) and 2, 4, 8 GPUs except the held-out
sizes. The target is the median over NCCL versions from 2.26 on (those that PyTorch 2.7 and later ship).

Of GPUs without NVLink one machine was measured, with L40S. Two of them reach 20 GB/s, 0.63 of the link, four 5.6 GB/s, and
eight 1.4 GB/s: how they are joined is that machine's own (`_OWN_PATHS`). Elsewhere more GPUs lose little: four RTX 5090 reach
35 GB/s and eight 28 GB/s, 0.56 and 0.44 of their link (NVIDIA/nccl, issue 1639), three A100 PCIe 20 GB/s, 0.65
(NVIDIA/nccl-tests, issue 178). So the fit takes large messages from two GPUs alone, and what more GPUs lose from the RTX 5090.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autosac.estimator import load_hardware
from autosac.estimator.log_sigmoid import Curve
from benchmarks.measurements import collectives

LINKS = {
    "NVLink3": ("a100_sxm", "a100-sxm-80gb"),
    "NVLink4": ("h100_sxm", "h100-sxm-80gb"),
    "NVLink5": ("b200_sxm", "b200-sxm-180gb"),
    "PCIe4": ("l40s", "l40s"),
}
KINDS = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}
_HELD_OUT_PERCENT = 20
# by how much the share of the link falls for each doubling of the GPUs
_OWN_PATHS = {"PCIe4": math.log(0.44 / 0.63) / 2}
_LATENCY_BYTES, _LARGE_BYTES = 4096, 2**24


def is_held_out(nbytes: int) -> bool:
    """Whether a message size is kept from the fit."""
    return zlib.crc32(f"collective {nbytes}".encode()) % 100 < _HELD_OUT_PERCENT


def read(data: Path, system: str, kind: str) -> list[tuple[int, int, float]]:
    """(ranks, bytes, microseconds), one for each distinct size."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in collectives(data):
        version = row["nccl_version"].split(".")
        recent = len(version) > 1 and version[0] == "2" and int(version[1]) >= 26
        if row["system"] == system and row["op_name"] == kind.replace("all_to_all", "alltoall") and recent:
            found[int(row["num_gpus"]), int(float(row["bytes"]))].append(float(row["latency_ms"]) * 1e3)
    return [(n, size, float(np.median(times))) for (n, size), times in sorted(found.items())]


def usable(link: str, rows: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Without what is one machine's own."""
    if link not in _OWN_PATHS:
        return rows
    return [(n, size, time) for n, size, time in rows if n == 2 or size <= _LATENCY_BYTES]


def _curve(values: NDArray[np.float64]) -> Curve:
    latency, hop, share, steepness, midpoint, share_step, midpoint_step = (float(v) for v in values)
    return Curve(
        latency_us=math.exp(latency),
        hop_us=math.exp(hop),
        share=share,
        steepness=steepness,
        midpoint=midpoint,
        share_per_doubling=share_step,
        midpoint_per_doubling=midpoint_step,
    )


def microseconds(curve: Curve, kind: str, ranks: int, nbytes: int, link_gbps: float) -> float:
    """The model inside one node."""
    moved = KINDS[kind] * (ranks - 1) / ranks * nbytes
    return curve.latency_us + curve.hop_us * (ranks - 1) + moved / curve.bandwidth(nbytes, ranks, link_gbps)


def fit_curve(
    rows: list[tuple[int, int, float]], kind: str, link_gbps: float, share_per_doubling: float | None = None
) -> tuple[Curve, NDArray[np.float64]]:
    """The curve, and the log errors on the held-out sizes. `share_per_doubling`: given rather than fitted."""

    def log_errors(values: NDArray[np.float64], held_out: bool) -> NDArray[np.float64]:
        curve = _curve(values)
        return np.array(
            [
                math.log(microseconds(curve, kind, n, size, link_gbps) / time)
                for n, size, time in rows
                if is_held_out(size) == held_out
            ]
        )

    start = np.array([2.0, -0.5, 0.75, 0.5, 14.5, 0.0, 0.0])
    low = [0.0, -4.0, 0.005, 0.1, 5.0, -1.7, -4.0]
    high = [4.0, 2.0, 1.15, 0.95, 20.0, 0.7, 4.0]
    if share_per_doubling is not None:  # what large messages of two GPUs reach, which is two doublings from eight
        reached = [KINDS[kind] / 2 * size / time / link_gbps / 1e3 for n, size, time in rows if size >= _LARGE_BYTES]
        for i, value in (
            (2, float(np.median(reached)) * math.exp(2 * share_per_doubling)),
            (5, share_per_doubling),
            (6, 0.0),
        ):
            start[i], low[i], high[i] = value, value - 1e-9, value + 1e-9
    solution = least_squares(
        log_errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, args=(False,), x_scale=np.abs(start) + 0.1
    )
    return _curve(solution.x), log_errors(solution.x, True)


def fit_collectives(data: Path) -> dict[str, Any]:
    """Link generation -> collective -> parameters of its curve."""
    result: dict[str, Any] = {}
    for link, (system, gpu) in LINKS.items():
        gbps = load_hardware(gpu).link_gbps
        for kind in KINDS:
            rows = usable(link, read(data, system, kind))
            curve, errors = fit_curve(rows, kind, gbps, _OWN_PATHS.get(link))
            values = {name: float(f"{value:.5g}") for name, value in asdict(curve).items()}
            values["rel_std"] = round(float(errors.std()), 4)
            result.setdefault(link, {})[kind] = values
            print(f"{link} {kind:14} held out: median {np.median(np.abs(np.expm1(errors))) * 100:.1f} %")
    return result

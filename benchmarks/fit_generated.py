"""Fits the prices of generated kernels to hand-written Triton kernels: ``python -m benchmarks.fit_generated DATA``.

``estimator/generated.py`` holds the result. Of each kind one kernel is fitted (``*``) and the others are checked; a gradient
that is split over blocks, and a loss that computes more than it moves, are no kernels of these kinds and are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from autosac.estimator import load_hardware
from benchmarks.measurements import hand_written

_GPU, _NAME = "NVIDIA H100 80GB HBM3", "h100-sxm-80gb"


class Kernel(NamedTuple):
    """A measured kernel: its kind, whether the fit sees it, and its bytes by the benchmark's size."""

    kind: str
    fitted: bool
    nbytes: Callable[[float], float]


_KERNELS = {
    ("relu_squared", "liger", "forward"): Kernel("pointwise", True, lambda n: 2 * 4096 * n * 2),
    ("relu_squared", "liger", "backward"): Kernel("pointwise", False, lambda n: 3 * 4096 * n * 2),
    ("megatron_swiglu", "liger", "forward"): Kernel("pointwise", False, lambda n: 3 * 8192 * n * 2),
    ("megatron_rms_norm", "liger", "forward"): Kernel("persistent", True, lambda n: 2 * 4096 * n * 2),
    ("layer_norm", "liger", "forward"): Kernel("persistent", False, lambda n: 2 * 4096 * n * 4),
    ("fused_add_rms_norm", "liger_fused_add_rms_norm", "forward"): Kernel(
        "persistent", False, lambda n: 4 * 2048 * n * 4
    ),
    ("tvd", "liger", "forward"): Kernel("looped", True, lambda n: 3 * 16384 * n * 4),
}


def main(data: Path) -> None:
    """Fit one rate and a launch for each kind by least squares of relative errors; print them and all errors."""
    points = []
    for row in hand_written(data):
        kernel = _KERNELS.get((row["kernel_name"], row["kernel_provider"], row["kernel_operation_mode"]))
        if kernel is not None and row["gpu_name"] == _GPU:
            points.append((row["kernel_name"], kernel, kernel.nbytes(float(row["x_value"])), float(row["y_value_50"])))
    kinds = sorted({kernel.kind for _, kernel, _, _ in points})
    seen = [(kernel, nbytes, ms) for _, kernel, nbytes, ms in points if kernel.fitted]
    table = np.array([[nbytes / 1e9, *(kernel.kind == kind for kind in kinds)] for kernel, nbytes, _ in seen])
    times = np.array([ms for _, _, ms in seen])
    (slope, *launches), _ = nnls(table / times[:, None], np.ones(len(times)))
    peak = load_hardware(_NAME).mem_bandwidth_gbps
    fitted = dict(zip(kinds, launches, strict=True))
    print(json.dumps({"share": 1e3 / slope / peak, "launch_us": {kind: 1e3 * ms for kind, ms in fitted.items()}}))
    for name in dict.fromkeys((name, kernel) for name, kernel, _, _ in points):
        of_kernel = [(nbytes, ms) for label, kernel, nbytes, ms in points if (label, kernel) == name]
        errors = [(slope * nbytes / 1e9 + fitted[name[1].kind]) / ms - 1 for nbytes, ms in of_kernel]
        mark = "*" if name[1].fitted else " "
        print(
            f"{mark} {name[0]:<20} {name[1].kind:<10} {len(errors):2} sizes, mean error "
            f"{100 * np.mean(np.abs(errors)):4.1f}%, worst {100 * np.max(np.abs(errors)):4.1f}%"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

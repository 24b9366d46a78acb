"""The fit of attention's blocks and tiles to measured kernels, for the programs that compare with those."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares

from autosac.estimator.attention_times import BlockTimes, kernels_of
from autosac.estimator.hardware import load_hardware
from autosac.estimator.tiled_attention import TiledAttention
from autosac.trace import Signature

_MOST_US = 60.0  # of any of the times


def fitted_times(
    gpu: str,
    backend: str,
    measured: Sequence[tuple[Signature, float]],
    backward: bool,
    changed: Callable[[BlockTimes, Sequence[float]], BlockTimes],
    first: Sequence[float],
) -> BlockTimes:
    """The known times of one direction as `changed` by values that begin as `first`, such that the squares of the prices'
    logarithmic errors are least. `measured`: calls and microseconds.
    """
    hardware = load_hardware(gpu)
    kernels = kernels_of(hardware, backend)
    assert kernels is not None
    known = kernels.backward if backward else kernels.forward
    signatures = [signature for signature, _ in measured]

    def residuals(values: Sequence[float]) -> list[float]:
        times = changed(known, values)
        model = TiledAttention(hardware, {backend: kernels._replace(forward=times, backward=times)})
        pairs = zip(model.estimate(signatures), measured, strict=True)
        return [math.log(estimate.ms * 1e3 / us) for estimate, (_, us) in pairs if estimate is not None]

    found = least_squares(residuals, first, bounds=(np.zeros(len(first)), np.full(len(first), _MOST_US)))
    return changed(known, [round(float(value), 3) for value in found.x])
